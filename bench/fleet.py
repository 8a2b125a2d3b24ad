"""A cluster started process by process, as on several machines: each can be killed, stopped, cut off and started again.

A process that is started again has its old name and its old addresses. With a Network every process is a host of its own in it;
without one they share loopback. Whatever happens to this process, they end with it. Not here: load, and what a fault costs.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import httpx

from bench.cluster import BATON, ClusterProblem, environment_of_a_cluster
from bench.free_port import free_port
from bench.namespaces import Network

START_BOUND_S: Final = 100.0  # ten times what the design allows
END_BOUND_S: Final = 20.0
BOUND_S: Final = 20.0  # ten times the two seconds within which a fault is to be found
HELD: Final = ("used", "leased", "quarantined")
# Other processes change what is polled. Asking takes 6 ms of the CPU that all of them share: who has waited for long asks less.
_POLL_S: Final = 0.02
_SLOW_POLL_S: Final = 0.1
_SAMPLE: Final = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


def wait_until(what: str, is_so: Callable[[], bool], bound_s: float = BOUND_S) -> float:
    """Seconds until `is_so()`; ClusterProblem after the bound."""
    started_at = time.monotonic()
    while not is_so():
        waited_s = time.monotonic() - started_at
        if waited_s >= bound_s:
            raise ClusterProblem(f"not within {bound_s:g} s: {what}")
        time.sleep(min(max(_POLL_S, waited_s / 10), _SLOW_POLL_S))
    return time.monotonic() - started_at


def pin(pid: int, cores: Collection[int]) -> None:
    """All threads of a process that runs; what they start later inherits it."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), cores)


class Fleet:
    """Processes by name: `router` or `router-<number>`, and `<role>-<number>`; made by `started`."""

    popen: ClassVar[type[subprocess.Popen[bytes]]] = subprocess.Popen  # starts them

    def __init__(
        self,
        model: Path,
        folder: Path,
        flags: Mapping[str, Sequence[str]],
        network: Network | None = None,
        registry: str | None = None,
    ) -> None:
        """`flags` are those of each process, by its name; `network` has a party of each of these names; `registry` is the url of
        the one that they share: without it each router has its own."""
        self._model = model
        self._folder = folder
        self._flags = flags
        self._network = network
        self._registry = registry
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._disowned: list[subprocess.Popen[bytes]] = []
        self._ready: dict[str, dict[str, Any]] = {}  # what each wrote when it began to listen; kept for its next life
        self.http = httpx.Client(timeout=60, trust_env=False)

    @classmethod
    @contextmanager
    def started(
        cls,
        model: Path,
        folder: Path,
        flags: Mapping[str, Sequence[str]],
        network: Network | None = None,
        registry: str | None = None,
    ) -> Iterator[Self]:
        """A ready cluster of the processes that `flags` names; all are killed at the end. ClusterProblem."""
        fleet = cls(model, folder, flags, network, registry)
        try:
            fleet.start(*fleet.routers)
            fleet.start(*fleet.nodes)
            fleet.wait_until_ready()
            yield fleet
        finally:
            fleet.close()

    @property
    def routers(self) -> list[str]:
        """Names of the routers."""
        return [name for name in self._flags if name.startswith("router")]

    @property
    def nodes(self) -> list[str]:
        """Names of all processes but the routers."""
        return [name for name in self._flags if not name.startswith("router")]

    @property
    def url(self) -> str:
        """The first router's."""
        return self.url_of(self.routers[0])

    def url_of(self, router: str) -> str:
        """Where clients reach it."""
        url: str = self._ready[router]["url"]
        return url

    def registry_of(self, router: str) -> str:
        """Where nodes announce themselves to it, if each router has a registry of its own."""
        address: str = self._ready[router]["registry"]
        return address

    # ---------------------------------------------------------------- processes

    def start(self, *names: str) -> None:
        """Start processes side by side and wait until each of them listens."""
        for name in names:
            self._ready_file(name).unlink(missing_ok=True)
            command = [BATON, *self._command(name), "--ready-file", str(self._ready_file(name))]
            command += ["--parent-pid", str(os.getpid()), *self._flags[name]]
            place = self._network.entered(name) if self._network else nullcontext()
            with place, self._log(name).open("ab") as log:
                self._processes[name] = self.popen(command, stdout=log, stderr=log, env=environment_of_a_cluster())
        for name in names:
            wait_until(f"{name} listens", lambda name=name: self._is_listening(name), START_BOUND_S)  # type: ignore[misc]
            self._ready[name] = json.loads(self._ready_file(name).read_text())

    def kill(self, name: str) -> float:
        """SIGKILL; returns, when the process has ended of it, the instant before it, by time.monotonic."""
        process, at = self._processes[name], time.monotonic()
        process.kill()
        if process.wait(END_BOUND_S) != -signal.SIGKILL:
            raise ClusterProblem(f"{name} had ended before")
        return at

    def freeze(self, name: str) -> float:
        """SIGSTOP; returns, when the process has stopped, the instant before it, by time.monotonic."""
        pid, at = self._processes[name].pid, time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        stopped = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        if stopped is None or stopped.si_code != os.CLD_STOPPED:
            raise ClusterProblem(f"{name} had ended before")
        return at

    def thaw(self, name: str) -> None:
        """SIGCONT."""
        self._processes[name].send_signal(signal.SIGCONT)

    def terminate(self, name: str) -> float:
        """SIGTERM; returns at once, with the instant before it, by time.monotonic."""
        at = time.monotonic()
        self._processes[name].terminate()
        return at

    def wait_for_end(self, name: str, bound_s: float = END_BOUND_S) -> int:
        """The exit code of a process that is about to end; TimeoutExpired after the bound."""
        return self._processes[name].wait(bound_s)

    def disown(self, name: str) -> subprocess.Popen[bytes]:
        """The process, which keeps its addresses: who is started next under this name takes others."""
        process = self._processes.pop(name)
        self._disowned.append(process)
        del self._ready[name]
        return process

    def exit_code(self, name: str) -> int | None:
        """None while it runs."""
        return self._processes[name].poll()

    def pid(self, name: str) -> int:
        """Of the process, also of one that has ended."""
        return self._processes[name].pid

    def restore(self) -> None:
        """Thaw and start whatever a fault has left, and wait until the cluster is ready and idle."""
        if self._network:
            self._network.mend()
        for process in (*self._processes.values(), *self._disowned):
            process.send_signal(signal.SIGCONT)
        self.start(*(name for name in self.routers if self.exit_code(name) is not None))
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

    def metric(self, name: str, label: str = "", router: str | None = None) -> float:
        """The sum of a metric of a router (the first) over all its samples; with `label`, over those that carry it."""
        text = self.http.get(f"{self.url_of(router or self.routers[0])}/metrics").text
        return _sum(text, f"baton_router_{name}", label)

    def metric_by_code(self, name: str) -> dict[str, int]:
        """A metric of the first router that counts by PD Error code; codes that it counted."""
        text = self.http.get(f"{self.url}/metrics").text
        found = [(labels, value) for each, labels, value in _SAMPLE.findall(text) if each == f"baton_router_{name}"]
        return {labels.split('"')[1]: int(float(value)) for labels, value in found if float(value) > 0}

    def node_metric(self, node: str, name: str, label: str = "") -> float:
        """Likewise of a node."""
        return _sum(self.http.get(f"http://{self._ready[node]['http']}/metrics").text, f"baton_node_{name}", label)

    def state(self, node: str) -> dict[str, Any]:
        """A node's /state."""
        state: dict[str, Any] = self.http.get(f"http://{self._ready[node]['http']}/state").json()
        return state

    def wait_until_ready(self, bound_s: float = BOUND_S) -> None:
        """Until every node is up, as every router sees it."""

        def is_ready(router: str) -> bool:
            return self.metric("node_up", router=router) == len(self.nodes)

        wait_until("every node is up", lambda: all(is_ready(router) for router in self.routers), bound_s)

    def wait_until_nothing_is_held(self, *nodes: str, bound_s: float = BOUND_S) -> float:
        """Seconds until no block on these nodes is held and no sequence is there; ClusterProblem after the bound."""

        def is_idle(state: dict[str, Any]) -> bool:
            return not (state["running"] or state["waiting"] or any(state["blocks"][each] for each in HELD))

        return wait_until("nothing is held", lambda: all(is_idle(self.state(node)) for node in nodes), bound_s)

    def log_text(self, name: str) -> str:
        """Everything that processes of this name have logged."""
        return self._log(name).read_text(encoding="utf-8")

    # ---------------------------------------------------------------- files and flags

    def _command(self, name: str) -> list[str]:
        """Role and flags; the addresses are those that the process had in its last life."""
        old = self._ready.get(name)
        role = name.partition("-")[0]
        words = [role, "--model", str(self._model)]
        if self._network:
            words += ["--host", self._network.address(name)]
        words += ["--registry", self._registry] if self._registry else []
        if role == "router":
            addresses = {"--port": old and old["url"]}
            addresses |= {} if self._registry else {"--registry-port": old and old["registry"]}
        else:
            registries = ",".join(self._ready[router]["registry"] for router in self.routers if not self._registry)
            words += ["--router", registries] if registries else []
            words += ["--node-id", name, "--threads", "1"]
            addresses = {"--http-port": old and old["http"], "--grpc-port": old and old["grpc"]}
        for flag, address in addresses.items():
            words += [flag, address.rpartition(":")[2] if address else self._first_port()]
        return words

    def _first_port(self) -> str:
        """One that nobody else is given while its process is dead; in a namespace there is nobody else."""
        return "0" if self._network else str(free_port())

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _ready_file(self, name: str) -> Path:
        return self._folder / f"{name}.ready.json"

    def _is_listening(self, name: str) -> bool:
        code = self.exit_code(name)
        if code is not None:
            raise ClusterProblem(f"{name} ended with {code}: {self.log_text(name)[-2000:]}")
        return self._ready_file(name).exists()


def _sum(text: str, name: str, label: str) -> float:
    """Of a metric's samples that carry the label, in Prometheus' text format."""
    found = [value for each, labels, value in _SAMPLE.findall(text) if each == name and label in labels]
    return sum(map(float, found))
