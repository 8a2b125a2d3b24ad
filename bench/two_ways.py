"""A cluster for bench.local_prefill: a prefill and a decode node, known to two routers, of which each sends all prompts one way.

    router "handoff"  --every prompt-->  prefill node  --KV-->  decode node
    router "local"    --every prompt---------------------------->  decode node

Both see the same nodes, so that requests of both ways can take turns on them. Not here: load.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from bench.cluster import ClusterProblem
from runtime.config import ENVIRONMENT_PREFIX, child_environment

WAYS: Final[Mapping[str, int]] = {"handoff": 0, "local": 1 << 20}  # -> the router's --local-prefill-max-tokens
_PATIENT: Final = ("--session-grace-s", "60")  # on a machine that others use too a node may be silent for seconds
_POLL_S: Final = 0.05
_START_BOUND_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class TwoWays:
    """A ready cluster."""

    urls: dict[str, str]  # way -> its router
    decode: str  # host:port of the decode node's HTTP server

    def num_local(self) -> int:
        """Prompts that the decode node has computed, or begun to, for itself."""
        state: dict[str, Any] = httpx.get(f"http://{self.decode}/state", timeout=60, trust_env=False).json()
        return int(state["counters"]["local_prefills"])


@contextmanager
def started_two_ways(model: Path, chunk: int, sizes: Mapping[str, int]) -> Iterator[TwoWays]:
    """Start it, end it. `sizes`: knobs of both nodes. ClusterProblem if it does not come up."""
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="baton-bench-", ignore_cleanup_errors=True) as folder:
        starter = _Starter(Path(folder), model.absolute(), processes)
        try:
            routers = {
                way: starter.start(
                    f"router-{way}", "router", *_PATIENT, "--port", "0", "--local-prefill-max-tokens", str(most)
                )
                for way, most in WAYS.items()
            }
            announced = {way: starter.ready(name) for way, name in routers.items()}
            flags = ["--router", ",".join(each["registry"] for each in announced.values()), "--threads", "1", *_PATIENT]
            flags += [word for key, value in sizes.items() for word in (f"--{key}", str(value))]
            prefill = starter.start("prefill", "deploy.node_process", "prefill", *flags)
            chunked = ("--local-prefill-chunk", str(chunk))
            decode = starter.start("decode", "deploy.node_process", "decode", *flags, *chunked)
            starter.ready(prefill)
            address = starter.ready(decode)["http"]
            cluster = TwoWays({way: each["url"] for way, each in announced.items()}, address)
            _wait_for_both(cluster)
            yield cluster
        finally:
            for process in processes:
                process.kill()
                process.wait()


class _Starter:
    """Starts processes whose ready files lie in one folder."""

    def __init__(self, folder: Path, model: Path, processes: list[subprocess.Popen[bytes]]) -> None:
        self._folder = folder
        self._model = model
        self._processes = processes
        # A variable would change what is to be measured; the back end alone is the user's to choose.
        self._environment = {
            name: value
            for name, value in child_environment(threads=1).items()
            if not name.startswith(ENVIRONMENT_PREFIX) or name in ("BATON_KERNELS", "BATON_DEVICE")
        }

    def start(self, name: str, module: str, *words: str) -> str:
        """Start a process; its name, by which `ready` knows it."""
        role, flags = ([words[0]], words[1:]) if module == "deploy.node_process" else ([], words)
        command = [sys.executable, "-m", module, *role, "--model", str(self._model), *flags]
        command += ["--ready-file", str(self._folder / f"{name}.json"), "--parent-pid", str(os.getpid())]
        with (self._folder / f"{name}.log").open("wb") as log:
            self._processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=self._environment))
        return name

    def ready(self, name: str) -> dict[str, Any]:
        """What the process announced, once it has."""
        path, started_at = self._folder / f"{name}.json", time.monotonic()
        while not path.exists():
            ended = any(process.poll() is not None for process in self._processes)
            if ended or time.monotonic() - started_at > _START_BOUND_S:
                lines = (self._folder / f"{name}.log").read_text(errors="replace").splitlines()
                raise ClusterProblem(f"{name} did not start; its last words: {lines[-1] if lines else 'none'}")
            time.sleep(_POLL_S)
        content: dict[str, Any] = json.loads(path.read_text())
        return content


def _wait_for_both(cluster: TwoWays) -> None:
    started_at = time.monotonic()
    for url in cluster.urls.values():
        while time.monotonic() - started_at < _START_BOUND_S:
            with suppress(httpx.TransportError):
                answer = httpx.get(f"{url}/ready", timeout=60, trust_env=False)
                if answer.status_code == httpx.codes.OK and not answer.json()["degraded"]:
                    break
            time.sleep(_POLL_S)
        else:
            raise ClusterProblem("the routers found no node of each role")
