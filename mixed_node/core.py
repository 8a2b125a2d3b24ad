"""What a mixed node decides: which of its cores hears what, and what the one scheduler that they share does next. Pure.

    Dispatch to another node, what its receiver says, what the KV pool has for it        -> prefill core
    Dispatch to itself, Reserve, Renew, Release, writes, Commit, moves and their answers -> decode core
    Cancel, router lost, drain                                                           -> both
    StepDone -> completed once; each core reads what its own sequences said
    BlocksStaged -> the scheduler's; what is to be stored is asked for once, at the end of the turn

A sequence has its attempt's key whichever core submitted it, so no attempt may be in both: a Dispatch to another node of one that
the decode core has a lease for is refused here, everything else by each core's own look at the scheduler. Of an attempt that an
older one is to be ended for, the router's Cancel tells both.

It has drained when both have: what one has done, nothing that the other does undoes, since neither takes anything new.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, cast

from connector.transport import Answered, BlocksTaken, LinkClosed
from engine.scheduler import Scheduler
from node import events as ev
from node.identity import NodeIdentity
from node.steps import StepsAhead, saves_of
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey


class FetchingPart(ev.PartOfCore, Protocol):
    """The prefill core, likewise."""

    def hold_back(self, is_held_up: bool) -> None:
        """Whether no blocks are to be taken to read the KV pool into."""

    def tell_speed(self, report: pb.LoadReport) -> None:
        """Add to a load report how fast this node computes prompts."""


class LeasingPart(ev.PartOfCore, Protocol):
    """The decode core, as far as it must know that it is not alone."""

    def holds(self, key: AttemptKey) -> bool:
        """Whether this attempt has a lease here, or waits for one."""

    def sends(self, event: ev.Event) -> bool:
        """Whether it is the answer to a handoff of a sequence that moves."""

    def hold_back(self, is_held_up: bool) -> None:
        """Whether no lease is to be given now."""

    @property
    def has_line(self) -> bool:
        """Whether anybody waits for room for a lease."""

    def load(self) -> pb.LoadReport:
        """See NodeCore."""


class MixedCore:
    """Two cores over one scheduler and one pool, seen as one."""

    def __init__(
        self, identity: NodeIdentity, scheduler: Scheduler, prefill: FetchingPart, decode: LeasingPart
    ) -> None:
        """The scheduler resumes what it preempts (SchedulerConfig.resumes_preempted)."""
        self._self = identity.to_proto()
        self._scheduler = scheduler
        self._prefill = prefill
        self._decode = decode
        self._parts = (prefill, decode)
        self._steps = StepsAhead(scheduler)
        self._num_draining = len(self._parts)  # those that have not said that they have drained
        self._out: list[ev.Action] = []

    # ------------------------------------------------------------ the four methods of a core

    def receive(self, event: ev.Event, now: float) -> list[ev.Action]:
        """Take one event; see NodeCore."""
        match event:
            case ev.StepDone(result):
                progress = self._scheduler.complete(result)
                for part in self._parts:
                    part.read(progress, now)
            case ev.PoolLooked() | ev.BlocksFetched():
                self._prefill.take(event, now)
            case ev.BlocksStaged(save_id):
                self._scheduler.saved(save_id)
            case ev.FromRouter(_, message) if message.WhichOneof("kind") == "dispatch":
                self._dispatch(event, message.dispatch, now)
            case ev.FromRouter() | ev.RouterLost() | ev.DrainAsked():
                for part in self._parts:
                    part.take(event, now)
            case ev.ReserveAnswered() | ev.RenewAnswered() | BlocksTaken() | Answered() | LinkClosed():
                (self._decode if self._decode.sends(event) else self._prefill).take(event, now)
            case _:
                self._decode.take(event, now)
        return self._finish_turn(now)

    def tick(self, now: float) -> list[ev.Action]:
        """Fire what is due; see NodeCore."""
        for part in self._parts:
            part.expire(now)
        return self._finish_turn(now)

    def next_deadline(self) -> float | None:
        """See NodeCore."""
        times = (part.next_deadline() for part in self._parts)
        return min((at for at in times if at is not None), default=None)

    def snapshot(self) -> Mapping[str, object]:
        """See NodeCore. What each core shows, and the fences of all."""
        shown = [part.snapshot() for part in self._parts]
        merged = {name: value for each in shown for name, value in each.items()}
        return merged | {"fences": sum(cast(int, each["fences"]) for each in shown)}

    def load(self) -> pb.LoadReport:
        """See NodeCore."""
        report = self._decode.load()
        self._prefill.tell_speed(report)
        return report

    # ------------------------------------------------------------ inside

    def _dispatch(self, event: ev.FromRouter, dispatch: pb.Dispatch, now: float) -> None:
        keys = [AttemptKey(dispatch.request_id, each.choice, dispatch.attempt) for each in dispatch.branches]
        if dispatch.target.node == self._self:
            self._decode.take(event, now)
        elif any(map(self._decode.holds, keys)):  # no right router sends it to two nodes
            self._out.append(ev.Count("stale_refused"))
        else:
            self._prefill.take(event, now)

    def _finish_turn(self, now: float) -> list[ev.Action]:
        """Plan what can be planned, then let each core go on from there."""
        steps = self._steps.plan()
        self._decode.hold_back(self._steps.is_held_up)
        self._prefill.hold_back(self._decode.has_line)
        out: list[ev.Action] = [*self._out, *steps]
        self._out = []
        said = [action for part in self._parts for action in part.settle(now)]
        out += [action for action in said if not isinstance(action, ev.Drained)]
        num_drained = sum(isinstance(action, ev.Drained) for action in said)
        self._num_draining -= num_drained
        if num_drained and not self._num_draining:
            out.append(ev.Drained())
        return [*out, *saves_of(self._scheduler)]
