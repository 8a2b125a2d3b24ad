"""The containers of deploy/compose.yaml: built, started, hurt, and taken away again.

The images of others are Debian's packages (peers.Dockerfile), so that no container registry is needed.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx

ROOT: Final = Path(__file__).resolve().parents[2]
COMPOSE_FILE: Final = ROOT / "deploy" / "compose.yaml"
IMAGE: Final = "baton-under-test"
PEERS_IMAGE: Final = "baton-peers"
PATIENCE_S: Final = 120.0
_GET: Final = (
    "import socket, sys, urllib.request\n"
    "url = f'http://{socket.gethostbyname(socket.gethostname())}:{sys.argv[1]}{sys.argv[2]}'\n"
    "sys.stdout.write(urllib.request.urlopen(url, timeout=10).read().decode())"
)
KNOBS: Final = {
    "BATON_REGISTRY": "redis://redis:6379/0",
    "BATON_TRANSPORT": "zmq",
    "BATON_SERVED_MODEL_NAME": "llama-tiny",
    "BATON_DTYPE": "fp32",
    "BATON_THREADS": "1",
    "BATON_NUM_BLOCKS": "1024",
    "BATON_PREEMPT_RETRY_COUNT": "20",
    "BATON_MAX_NODES_LOST": "20",
}


def build_images() -> None:
    """Ours and the peers'; TORCH_INDEX and PYTHON_IMAGE in the environment go to the build."""
    arguments = [
        f"--build-arg={name}={os.environ[name]}" for name in ("TORCH_INDEX", "PYTHON_IMAGE") if name in os.environ
    ]
    docker("build", "--network=host", *arguments, "-f", "deploy/Dockerfile", "-t", IMAGE, ".", limit_s=1800)
    peers = [each for each in arguments if "PYTHON_IMAGE" in each]
    docker(
        "build",
        "--network=host",
        *peers,
        "-f",
        "tests/compose/peers.Dockerfile",
        "-t",
        PEERS_IMAGE,
        "tests/compose",
        limit_s=1800,
    )


def docker(*words: str, limit_s: float = PATIENCE_S) -> str:
    """Run `docker WORDS` in the repository; raises CalledProcessError with what it printed."""
    return _run(["docker", *words], os.environ, limit_s)


class Containers:
    """One project of compose. A *service* is a name of compose.yaml."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._project = f"baton{os.getpid()}"
        self._env_file = folder / "knobs.env"
        self._env_file.write_text("".join(f"{name}={value}\n" for name, value in KNOBS.items()))
        peers = dict.fromkeys(("HAPROXY_IMAGE", "REDIS_IMAGE", "PROMETHEUS_IMAGE", "GRAFANA_IMAGE"), PEERS_IMAGE)
        ours = {"MODEL_DIR": str(model), "BATON_IMAGE": IMAGE, "BATON_ENV": str(self._env_file)}
        self._ports = {"HTTP_PORT": _free_port(), "PROMETHEUS_PORT": _free_port(), "GRAFANA_PORT": _free_port()}
        self._environment = os.environ | peers | ours | {name: str(port) for name, port in self._ports.items()}
        self.url: Final = f"http://127.0.0.1:{self._ports['HTTP_PORT']}"
        self.prometheus: Final = f"http://127.0.0.1:{self._ports['PROMETHEUS_PORT']}"

    def compose(self, *words: str) -> str:
        """Run compose, v1 or v2, whichever is there."""
        command = ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]
        return _run([*command, "-p", self._project, "-f", str(COMPOSE_FILE), *words], self._environment, PATIENCE_S)

    def inspect(self, service: str, path: str) -> str:
        """A field of `docker inspect`, such as `.State.Pid`."""
        return docker("inspect", "--format", f"{{{{{path}}}}}", self._container(service)).strip()

    def crash(self, service: str) -> None:
        """SIGKILL, as the kernel out of memory would: the engine starts it again."""
        os.kill(int(self.inspect(service, ".State.Pid")), 9)

    @contextmanager
    def cut_off(self, service: str) -> Iterator[None]:
        """Nothing comes in or goes out, and nobody is told; over when the block is."""
        rules = [["INPUT", "!", "-i", "lo"], ["OUTPUT", "!", "-o", "lo"]]
        enter = ["nsenter", "-t", self.inspect(service, ".State.Pid"), "-n", "iptables"]
        for rule in rules:
            _run([*enter, "-I", *rule, "-j", "DROP"], os.environ, PATIENCE_S)
        try:
            yield
        finally:
            for rule in rules:
                _run([*enter, "-D", *rule, "-j", "DROP"], os.environ, PATIENCE_S)

    def state(self, service: str) -> dict[str, Any]:
        """`/state` of a node, asked for from inside its container."""
        state: dict[str, Any] = json.loads(self._get(service, 8002, "/state"))
        return state

    def wait_until_ready(self) -> None:
        """Until both routers have all four nodes."""
        wait_until("both routers have four nodes", lambda: all(self.num_nodes(f"router-{i}") == 4 for i in (0, 1)))

    def query(self, expression: str) -> list[dict[str, Any]]:
        """What Prometheus answers: a list of series."""
        answer = httpx.get(f"{self.prometheus}/api/v1/query", params={"query": expression}, timeout=10, trust_env=False)
        series: list[dict[str, Any]] = answer.json()["data"]["result"]
        return series

    def _get(self, service: str, port: int, path: str) -> str:
        return docker("exec", self._container(service), "python3", "-c", _GET, str(port), path)

    def _container(self, service: str) -> str:
        return self.compose("ps", "-q", service).strip()

    def num_nodes(self, router: str) -> int:
        """Nodes with which a router has a session."""
        lines = self._get(router, 8000, "/metrics").splitlines()
        return sum(line.startswith("baton_router_node_up{") and line.endswith(" 1.0") for line in lines)


@contextmanager
def started_containers(model: Path, folder: Path) -> Iterator[Containers]:
    """Up and ready; gone, with their logs printed if something went wrong."""
    containers = Containers(model, folder)
    try:
        containers.compose("up", "-d", "--no-build")
        containers.wait_until_ready()
        wait_until("the front serves", lambda: httpx.get(f"{containers.url}/ready", trust_env=False).status_code == 200)
        yield containers
    except BaseException:
        print(containers.compose("logs", "--no-color", "--tail=60"))  # noqa: T201 (shown with the failure)
        raise
    finally:
        containers.compose("down", "-v", "--remove-orphans", "-t", "1")


def wait_until(what: str, is_so: Callable[[], bool]) -> None:
    """Ask until it is so; what cannot be asked counts as no."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            if is_so():
                return
        except (httpx.HTTPError, json.JSONDecodeError, KeyError, AssertionError):
            pass
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:.0f} s: {what}"
        time.sleep(0.2)


def _run(command: Sequence[str], environment: Any, limit_s: float) -> str:
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
