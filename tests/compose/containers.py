"""The containers of deploy/compose.yaml: built, started, hurt, and taken away again.

The images of others are Debian's packages (peers.Dockerfile), so that no container registry is needed.
"""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final

import httpx

from bench.free_port import free_port

ROOT: Final = Path(__file__).resolve().parents[2]
DEPLOY: Final = ROOT / "deploy"
IMAGE: Final = "baton-under-test"
PEERS_IMAGE: Final = "baton-peers"
PATIENCE_S: Final = 360.0  # six processes that load torch take two minutes on a busy machine of two cores
_GET: Final = (
    "import socket, ssl, sys, urllib.request\n"
    "url = f'{sys.argv[3]}://{socket.gethostbyname(socket.gethostname())}:{sys.argv[1]}{sys.argv[2]}'\n"
    "trusted = ssl.create_default_context(cafile=sys.argv[4]) if sys.argv[4:] else None\n"
    "if trusted: trusted.check_hostname = False\n"
    "sys.stdout.write(urllib.request.urlopen(url, timeout=10, context=trusted).read().decode())"
)
KNOBS: Final = {
    "BATON_REGISTRY": "redis://redis:6379/0",
    "BATON_TRANSPORT": "zmq",
    "BATON_SERVED_MODEL_NAME": "llama-tiny",
    "BATON_DTYPE": "fp32",
    "BATON_THREADS": "1",
    "BATON_NUM_BLOCKS": "2048",
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


def model_for_containers(folder: Path) -> Path:
    """A tiny model in that folder of pytest's, which their user, who is another one, can read."""
    model = folder / "llama-tiny"
    command = ["engine.make_model", "--like", "llama-tiny", "--dtype", "fp32", "--seed", "0", "--out", str(model)]
    subprocess.run([sys.executable, "-m", *command], check=True, timeout=120)
    for path in (folder, *folder.rglob("*"), *folder.parents[:2]):
        path.chmod(path.stat().st_mode | (0o055 if path.is_dir() else 0o044))
    return model


def docker(*words: str, limit_s: float = PATIENCE_S, with_stderr: bool = False) -> str:
    """Run `docker WORDS` in the repository; what it printed. AssertionError with that if it fails."""
    return _run(["docker", *words], os.environ, limit_s, with_stderr=with_stderr)


class Containers:
    """One project of compose. A *service* is a name of compose.yaml."""

    def __init__(
        self, model: Path, folder: Path, certs: Path | None = None, more: Mapping[str, str] | None = None
    ) -> None:
        """`certs`: what `baton certs make` made for the services; none: nothing is encrypted. `more`: knobs of all processes."""
        self._project = f"baton{os.getpid()}"
        self._env_file = folder / "knobs.env"
        knobs = KNOBS | dict(more or {})
        if certs is not None:
            del knobs["BATON_REGISTRY"]
        self._env_file.write_text("".join(f"{name}={value}\n" for name, value in knobs.items()))
        peers = dict.fromkeys(("HAPROXY_IMAGE", "REDIS_IMAGE", "PROMETHEUS_IMAGE", "GRAFANA_IMAGE"), PEERS_IMAGE)
        ours = {"MODEL_DIR": str(model), "BATON_IMAGE": IMAGE, "BATON_ENV": str(self._env_file)}
        self._ports = {"HTTP_PORT": free_port(), "PROMETHEUS_PORT": free_port(), "GRAFANA_PORT": free_port()}
        self._environment = os.environ | peers | ours | {name: str(port) for name, port in self._ports.items()}
        self._files = [DEPLOY / "compose.yaml"]
        self._shown = ["http"]  # how a page is asked for inside a container
        if certs is not None:
            self._environment["CERTS_DIR"] = str(certs)
            self._files.append(DEPLOY / "compose.tls.yaml")
            self._shown = ["https", "/tls/ca.crt"]
        self._ids: dict[str, str] = {}
        self.url: Final = f"{self._shown[0]}://127.0.0.1:{self._ports['HTTP_PORT']}"
        self.prometheus: Final = f"http://127.0.0.1:{self._ports['PROMETHEUS_PORT']}"

    def compose(self, *words: str) -> str:
        """Run compose, v1 or v2, whichever is there."""
        command = ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]
        files = [word for file in self._files for word in ("-f", str(file))]
        return _run([*command, "-p", self._project, *files, *words], self._environment, PATIENCE_S)

    def inspect(self, service: str, path: str) -> str:
        """A field of `docker inspect`, such as `.State.Pid`."""
        return docker("inspect", "--format", f"{{{{{path}}}}}", self.container(service)).strip()

    def pid(self, service: str) -> int:
        """Of its process 1, as this machine numbers it."""
        return int(self.inspect(service, ".State.Pid"))

    def cut_off(self, service: str) -> AbstractContextManager[None]:
        """While it is entered nothing comes in or goes out, and nobody is told."""
        return _cut_off(self.pid(service))

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
        return docker("exec", self.container(service), "python3", "-c", _GET, str(port), path, *self._shown)

    def container(self, service: str) -> str:
        """Its id, which it keeps however often it is started: asked for once, since compose takes longer than some streams."""
        if service not in self._ids:
            self._ids[service] = self.compose("ps", "-q", service).strip()
        return self._ids[service]

    def num_nodes(self, router: str) -> int:
        """Nodes with which a router has a session."""
        lines = self._get(router, 8000, "/metrics").splitlines()
        return sum(line.startswith("baton_router_node_up{") and line.endswith(" 1.0") for line in lines)


@contextmanager
def started_containers(
    model: Path, folder: Path, certs: Path | None = None, more: Mapping[str, str] | None = None
) -> Iterator[Containers]:
    """Up and ready; gone, with their logs printed if something went wrong."""
    containers = Containers(model, folder, certs, more)
    trusted: bool | ssl.SSLContext = True
    if certs is not None:
        trusted = ssl.create_default_context(cafile=str(certs / "ca.crt"))
    try:
        containers.compose("up", "-d", "--no-build")
        containers.wait_until_ready()
        with httpx.Client(base_url=containers.url, trust_env=False, verify=trusted) as client:
            wait_until("the front serves", lambda: client.get("/ready").status_code == 200)
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


@contextmanager
def _cut_off(pid: int) -> Iterator[None]:
    rules = [["INPUT", "!", "-i", "lo"], ["OUTPUT", "!", "-o", "lo"]]
    enter = ["nsenter", "-t", str(pid), "-n", "iptables"]
    for rule in rules:
        _run([*enter, "-I", *rule, "-j", "DROP"], os.environ, PATIENCE_S)
    try:
        yield
    finally:
        for rule in rules:
            _run([*enter, "-D", *rule, "-j", "DROP"], os.environ, PATIENCE_S)


def _run(command: Sequence[str], environment: Any, limit_s: float, *, with_stderr: bool = False) -> str:
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout + (done.stderr if with_stderr else "")
