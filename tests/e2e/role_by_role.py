"""A cluster of real processes, started role by role as on several machines, each of which can be killed, frozen and started again.

A process that is started again has its old name and its old addresses. Nothing is waited for but conditions, each with a bound.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx

from tests.e2e.cluster import BATON, END_BOUND_S, HANDOFFS_ONLY, START_BOUND_S

BOUND_S: Final = 20.0  # ten times the two seconds within which a fault is to be found
HELD: Final = ("used", "leased", "quarantined")
_POLL_S: Final = 0.02  # other processes change what is polled
_SAMPLE: Final = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


def wait_until(what: str, is_so: Callable[[], bool], bound_s: float = BOUND_S) -> float:
    """Seconds until `is_so()`; fails after the bound."""
    started_at = time.monotonic()
    while not is_so():
        assert time.monotonic() - started_at < bound_s, f"not within {bound_s:g} s: {what}"
        time.sleep(_POLL_S)
    return time.monotonic() - started_at


class RoleByRole:
    """Processes by name, `router` or `<role>-<number>`; made by `started_role_by_role`."""

    def __init__(self, model: Path, folder: Path, flags: Mapping[str, Sequence[str]]) -> None:
        """`flags` are those of each process, by its name."""
        self._model = model
        self._folder = folder
        self._flags = flags
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._disowned: list[subprocess.Popen[bytes]] = []
        self._ready: dict[str, dict[str, Any]] = {}  # what each wrote when it began to listen; kept for its next life
        self.http = httpx.Client(timeout=60, trust_env=False)

    @property
    def url(self) -> str:
        """The router's."""
        url: str = self._ready["router"]["url"]
        return url

    @property
    def nodes(self) -> list[str]:
        """Names of all processes but the router."""
        return [name for name in self._flags if name != "router"]

    # ---------------------------------------------------------------- processes

    def start(self, *names: str) -> None:
        """Start processes side by side and wait until each of them listens."""
        for name in names:
            ready_file = self._ready_file(name)
            ready_file.unlink(missing_ok=True)
            with self._log(name).open("ab") as log:
                command = [BATON, *self._command(name), "--ready-file", str(ready_file)]
                command += ["--parent-pid", str(os.getpid()), *self._flags[name]]
                environment = {key: os.environ[key] for key in ("PATH", "HOME", "BATON_KERNELS") if key in os.environ}
                self._processes[name] = subprocess.Popen(
                    command, stdout=log, stderr=log, env=environment | HANDOFFS_ONLY
                )
        for name in names:
            wait_until(f"{name} listens", lambda name=name: self._is_listening(name), START_BOUND_S)  # type: ignore[misc]
            self._ready[name] = json.loads(self._ready_file(name).read_text())

    def kill(self, name: str) -> None:
        """SIGKILL; returns when the process has ended of it."""
        process = self._processes[name]
        process.kill()
        assert process.wait(END_BOUND_S) == -signal.SIGKILL, f"{name} had ended before"

    def freeze(self, name: str) -> None:
        """SIGSTOP; returns when the process has stopped."""
        pid = self._processes[name].pid
        os.kill(pid, signal.SIGSTOP)
        stopped = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert stopped is not None and stopped.si_code == os.CLD_STOPPED, f"{name} had ended before"

    def thaw(self, name: str) -> None:
        """SIGCONT."""
        self._processes[name].send_signal(signal.SIGCONT)

    def disown(self, name: str) -> subprocess.Popen[bytes]:
        """The process, which keeps its addresses: who is started next under this name takes others."""
        process = self._processes.pop(name)
        self._disowned.append(process)
        del self._ready[name]
        return process

    def exit_code(self, name: str) -> int | None:
        """None while it runs."""
        return self._processes[name].poll()

    def restore(self) -> None:
        """Thaw and start whatever a fault has left, and wait until the cluster is ready and idle."""
        for process in self._processes.values():
            process.send_signal(signal.SIGCONT)
        if self.exit_code("router") is not None:
            self.start("router")
        self.start(*(name for name in self.nodes if self.exit_code(name) is not None))
        self.wait_until_ready()
        self.wait_until_nothing_is_held(*self.nodes)

    def close(self) -> None:
        """Kill all of them."""
        for process in (*self._processes.values(), *self._disowned):
            process.kill()
            process.wait(END_BOUND_S)
        self.http.close()

    # ---------------------------------------------------------------- what they say

    def get(self, path: str) -> httpx.Response:
        """A page of the router."""
        return self.http.get(self.url + path)

    def missing(self) -> list[str]:
        """What the router lacks to be ready."""
        answer = self.get("/ready")
        missing: list[str] = answer.json()["missing"]
        assert answer.status_code == (503 if missing else 200)
        return missing

    def wait_until_ready(self) -> None:
        """Until every node is up, as the router sees it."""
        wait_until("every node is up", lambda: self.metric("node_up") == len(self.nodes))
        assert self.missing() == []

    def metric(self, name: str, label: str = "") -> float:
        """The sum of a metric of the router over all its samples; with `label`, over those that carry it."""
        samples = _SAMPLE.findall(self.get("/metrics").text)
        return sum(
            float(value) for each, labels, value in samples if each == f"baton_router_{name}" and label in labels
        )

    def state(self, node: str) -> dict[str, Any]:
        """A node's /state."""
        state: dict[str, Any] = self.http.get(f"http://{self._ready[node]['http']}/state").json()
        return state

    def held_blocks(self, *nodes: str) -> int:
        """Blocks that are neither free nor merely cached."""
        return sum(self.state(node)["blocks"][state] for node in nodes for state in HELD)

    def wait_until_nothing_is_held(self, *nodes: str) -> float:
        """Seconds until no block on these nodes is held and no sequence is there; fails after the bound."""

        def is_idle(state: dict[str, Any]) -> bool:
            return not (state["running"] or state["waiting"] or any(state["blocks"][each] for each in HELD))

        return wait_until("nothing is held", lambda: all(is_idle(self.state(node)) for node in nodes))

    def outcomes(self, node: str, request_id: str | None = None) -> list[str]:
        """How attempts (of one request, or all) ended on a node, in the order and the words of its log."""
        request = r"\S+" if request_id is None else re.escape(request_id)
        ended = re.compile(rf'attempt_ended request={request} .*outcome=("[^"]*"|\S+)$', re.MULTILINE)
        return [outcome.strip('"') for outcome in ended.findall(self._log(node).read_text())]

    # ---------------------------------------------------------------- files and flags

    def _command(self, name: str) -> list[str]:
        """Role and flags; the addresses are those that the process had in its last life."""
        old = self._ready.get(name)
        role = name.partition("-")[0]
        words = [role, "--model", str(self._model)]
        if role == "router":
            addresses = {"--port": old and old["url"], "--registry-port": old and old["registry"]}
        else:
            words += ["--node-id", name, "--router", self._ready["router"]["registry"], "--threads", "1"]
            addresses = {"--http-port": old and old["http"], "--grpc-port": old and old["grpc"]}
        for flag, address in addresses.items():
            words += [flag, address.rpartition(":")[2] if address else "0"]
        return words

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _ready_file(self, name: str) -> Path:
        return self._folder / f"{name}.ready.json"

    def _is_listening(self, name: str) -> bool:
        code = self.exit_code(name)
        assert code is None, f"{name} ended with {code}: {self._log(name).read_text()[-2000:]}"
        return self._ready_file(name).exists()


@contextmanager
def started_role_by_role(model: Path, folder: Path, flags: Mapping[str, Sequence[str]]) -> Iterator[RoleByRole]:
    """A ready cluster of the processes that `flags` names, `router` among them; all are killed at the end."""
    cluster = RoleByRole(model, folder, flags)
    try:
        cluster.start("router")
        cluster.start(*cluster.nodes)
        cluster.wait_until_ready()
        yield cluster
    finally:
        cluster.close()
