"""What each kind of fault does to the world, when it strikes, and which failures it excuses.

An attempt may fail, and a session be lost, only if something struck that it had to do with: one of its processes, or a way between
two of them. This file knows for how long a fault is felt; `Blame` is that knowledge as a value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tests.sim.nodes import SimNode
from tests.sim.scenario import Fault

if TYPE_CHECKING:
    from tests.sim.world import World

_WAITS_FOR_MOMENT_S: Final = 2.0
AFTERMATH_S: Final = 15.0  # a lease life, a session's grace, and some more


@dataclass(frozen=True, slots=True)
class Blame:
    """Between these instants, whatever needs all of these hosts may fail."""

    hosts: frozenset[str]
    begins: float
    ends: float


class Faults:
    """The schedule of a run."""

    def __init__(self, world: World, faults: tuple[Fault, ...]) -> None:
        self._world = world
        self._waiting: list[Fault] = []  # for their moment
        self._blames: list[Blame] = []
        self.num_pending = len(faults)
        self.ends_at = 0.0
        for fault in faults:
            world.kernel.at(fault.at, lambda fault=fault: self._due(fault))  # type: ignore[misc]

    def moment(self, what: str, host: str) -> None:
        """Something has just happened at a host: faults that waited for it strike now."""
        for fault in list(self._waiting):
            if fault.moment == what and host in (fault.who, fault.other):
                self._waiting.remove(fault)
                self._world.kernel.after(0.0, lambda fault=fault: self._strike(fault))  # type: ignore[misc]

    def _due(self, fault: Fault) -> None:
        if not fault.moment:
            self._strike(fault)
            return
        self._waiting.append(fault)
        self._world.kernel.after(_WAITS_FOR_MOMENT_S, lambda: self._late(fault))

    def _late(self, fault: Fault) -> None:
        if fault in self._waiting:
            self._waiting.remove(fault)
            self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        world, now = self._world, self._world.kernel.now
        self.num_pending -= 1
        seconds = fault.seconds
        self.ends_at = max(self.ends_at, now + seconds)
        if fault.kind not in ("drain", "role"):  # which costs nobody anything, unless its time is over
            self.struck(frozenset((fault.who, fault.other) if fault.other else (fault.who,)), seconds)
        world.kernel.tell("FAULT", fault.kind, str(fault))
        if seconds:
            world.kernel.after(seconds, lambda: world.kernel.tell("FAULT", "over", str(fault)))
        armed = fault.kind in ("cut link", "flip bit", "lose ack", "broken row")
        if not armed:  # those are counted when they find something to hurt
            world.kernel.count(fault.kind)
        self._do(fault)

    def _do(self, fault: Fault) -> None:
        world, who, other, seconds = self._world, fault.who, fault.other, fault.seconds
        network = world.network
        match fault.kind:
            case "crash" | "power off" | "stop":
                process = network.find(who)
                if process is not None:
                    world.lives.end(process, fault.kind, seconds, fault.number)
            case "drain" | "role":
                process = network.find(who)
                if isinstance(process, SimNode):
                    world.lives.drain(process, seconds, other)
            case "pause":
                process = network.find(who)
                if process is not None:
                    process.paused_until = max(process.paused_until, world.kernel.now + seconds)
            case "partition":
                network.block(who, other, seconds)
                network.block(other, who, seconds)
            case "one way":
                network.block(who, other, seconds)
            case "slow":
                network.slow(who, other, seconds)
            case "cut stream":
                for stream in world.lives.streams_between(who, other):
                    stream.cut(fault.number in (0, 1), fault.number in (0, 2))
            case "lose calls":
                world.calls.lose(who, other, seconds)
            case "repeat calls":
                world.calls.repeat(who, other, seconds)
            case "broken row":
                process = network.find(who)
                if process is not None:
                    process.runner.breaks_next_row = True  # type: ignore[attr-defined]
            case _:
                world.links.arm(fault.kind, who, other, fault.number)

    # ---------------------------------------------------------------- excuses

    def struck(self, hosts: frozenset[str], seconds: float = 0.0) -> None:
        """Something strikes now, for so long. What lies in wait strikes when it finds something to hurt."""
        now = self._world.kernel.now
        self._blames.append(Blame(hosts, now, now + seconds + AFTERMATH_S))

    def excuses(self, hosts: frozenset[str]) -> bool:
        """Whether something is felt now that struck hosts that are all among these."""
        now = self._world.kernel.now
        return any(blame.hosts <= hosts and blame.begins <= now <= blame.ends for blame in self._blames)

    def felt_s(self, begins: float, ends: float) -> float:
        """For how long faults are felt between these instants, one after the other."""
        spans = [min(ends, blame.ends) - max(begins, blame.begins) for blame in self._blames]
        return sum(span for span in spans if span > 0)
