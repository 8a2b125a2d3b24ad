"""Performs faults on a Fleet, checks that each has fired, and undoes it.

Fired means: the kernel says so. A killed process has its exit code, a stopped one its state, between two parties that are cut no
connection comes about; what does not fire ends the run.
"""

from __future__ import annotations

import math
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from datetime import datetime
from typing import Final, NamedTuple

from bench.cluster import BATON
from bench.fleet import Fleet, wait_until
from bench.namespaces import Network
from tests.chaos.schedule import REGISTRY, ChangeRole, Cut, Fault, Kill, Replace, Stop, Terminate, Unplug
from tests.registry.redis_server import RedisServer

DRAIN_BOUND_S: Final = 60.0
_LINE: Final = re.compile(r"^(\S+Z) \w+ router (session_\w+) node=(\S+) (.*)$", re.MULTILINE)


class Injector:
    """The faults that stand on one fleet."""

    def __init__(
        self, fleet: Fleet, network: Network | None, registry: RedisServer | None, note: Callable[[str], None]
    ) -> None:
        """`registry`: what the fleet's processes share, if they do; `note` is told one line of each fault that fired, and of its
        end."""
        self._fleet = fleet
        self._network = network
        self._registry = registry
        self._note = note
        self._replaced: dict[str, subprocess.Popen[bytes]] = {}
        self._touched_until: dict[str, float] = {}  # by time.monotonic, by process
        self.fired: Counter[tuple[str, str]] = Counter()  # by kind, and by role

    def begin(self, fault: Fault) -> None:
        """Let it happen; returns when it has."""
        fleet = self._fleet
        self._touched_until |= dict.fromkeys(fault.parties, math.inf)
        match fault:
            case Kill(name=name) if name == REGISTRY:
                self._redis.kill()
            case Stop(name=name) if name == REGISTRY:
                self._redis.freeze()
            case Kill(name=name):
                fleet.kill(name)
            case Stop(name=name):
                fleet.freeze(name)
            case Replace(name=name):
                fleet.freeze(name)
                self._replaced[name] = fleet.disown(name)
                fleet.start(name)
            case Terminate(name=name):
                fleet.terminate(name)
            case ChangeRole(name=name, role=role, timeout_s=timeout_s):
                self._change_role(name, role, timeout_s)
            case Unplug(name=name):
                self._net.unplug(name)
                assert not any(self._net.reaches(name, other) for other in self._others(name)), "still plugged"
            case Cut(one=one, other=other):
                self._net.cut(one, other)
                assert not self._net.reaches(one, other) and not self._net.reaches(other, one), "not cut"
        self.fired[type(fault).__name__, " and ".join(party.partition("-")[0] for party in fault.parties)] += 1
        self._note(f"{fault}")

    def end(self, fault: Fault) -> None:
        """Undo it; returns when whoever was concerned serves again."""
        fleet = self._fleet
        match fault:
            case Kill(name=name) if name == REGISTRY:
                with nullcontext() if self._network is None else self._network.entered(name):
                    self._redis.start()
            case Stop(name=name) if name == REGISTRY:
                self._redis.thaw()
            case Kill(name=name):
                fleet.start(name)
            case Stop(name=name):
                fleet.thaw(name)
            case Replace(name=name):
                old = self._replaced.pop(name)
                old.send_signal(signal.SIGCONT)
                assert old.wait(DRAIN_BOUND_S) == 2, f"the old {name} did not give way"
            case Terminate(name=name):
                code = fleet.wait_for_end(name, DRAIN_BOUND_S)
                assert code == 0, f"{name} was told to go and ended with {code}"
                fleet.start(name)
            case ChangeRole(name=name, timeout_s=timeout_s):
                self._change_role(name, "mixed", timeout_s)
            case Unplug(name=name):
                self._net.plug(name)
            case Cut(one=one, other=other):
                self._net.heal(one, other)
                assert self._net.reaches(one, other) and self._net.reaches(other, one), "still cut"
        self._touched_until |= dict.fromkeys(fault.parties, time.monotonic())
        self._note(f"over: {fault}")

    def _change_role(self, name: str, role: str, timeout_s: float) -> None:
        fleet, registry = self._fleet, self._registry
        router = next(each for each in fleet.routers if self._touched_until.get(each) != math.inf)
        place = ["--registry", registry.url] if registry else ["--router", fleet.registry_of(router)]
        command = [BATON, "role", name, role, *place, "--timeout-s", f"{timeout_s}", "--force"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DRAIN_BOUND_S, check=False)
        assert done.returncode == 0, f"{name} did not become {role}: {done.stdout[-300:]} {done.stderr[-300:]}"
        assert fleet.state(name)["role"] == role, "it says so, and is not"

    def was_touched(self, name: str, since: float) -> bool:
        """Whether something stood on a process after that instant, by time.monotonic; may be asked by any thread."""
        return self._touched_until.get(name, 0.0) >= since

    @property
    def num_fired(self) -> int:
        """Faults so far."""
        return self.fired.total()

    @property
    def _redis(self) -> RedisServer:
        assert self._registry is not None
        return self._registry

    @property
    def _net(self) -> Network:
        assert self._network is not None
        return self._network

    def _others(self, name: str) -> list[str]:
        return [other for other in (*self._fleet.routers, *self._fleet.nodes) if other != name][:2]


class Found(NamedTuple):
    """What a router said of its session with a node."""

    after_s: float
    why: str


def found(fleet: Fleet, node: str, since: float, event: str, router: str | None = None) -> Found:
    """Wait until a router says that about its session with a node: how long after an instant (by time.time), and why.

    `event`: session_broken, session_lost, session_up.
    """
    router = router or fleet.routers[0]
    said: list[Found] = []

    def is_found() -> bool:
        for said_at, what, of, why in _LINE.findall(fleet.log_text(router)):
            after_s = datetime.fromisoformat(said_at).timestamp() - since
            if what == event and of == node and after_s > -0.001:
                said.append(Found(after_s, why))
        return bool(said)

    wait_until(f"{router} says {event} of {node}", is_found)
    return said[0]


def now() -> float:
    """An instant for `found`."""
    return time.time()
