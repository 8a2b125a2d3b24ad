"""What a mixed node decides: which of its cores hears what, and what the one scheduler that they share does next. Pure.

    Dispatch to another node, what its receiver says, what the KV pool has               -> prefill core
    Dispatch to itself -> waits with the prefill core for what the KV pool has of it     -> decode core
    Reserve, Renew, Release, writes, Commit, moves and their answers                     -> decode core
    Cancel, router lost, drain                                                           -> both
    StepDone -> completed once; each core reads what its own sequences said
    BlocksStaged -> the scheduler's; what is to be stored is asked for once, at the end of the turn

A sequence has its attempt's key whichever core submitted it, so no attempt may be in both: a Dispatch to another node of one that
the decode core has a lease for is refused here, and so is a second one, to whomever, of what waits in the prefill core for the KV
pool; a Reserve for that by the decode core, which asks the other; everything else by each core's own look at the scheduler. Of an
attempt that an older one is to be ended for, the router's Cancel tells both.

It has drained when both have: what one has done, nothing that the other does undoes, since neither takes anything new.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, cast

from connector.transport import Answered, BlocksTaken, LinkClosed
from engine.scheduler import Scheduler
from node import events as ev
from node.identity import NodeIdentity
from node.steps import StepsAhead, saves_of
from node.timers import earliest
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey, attempt_key


class FetchingPart(ev.PartOfCore, Protocol):
    """The prefill core, likewise."""

    def hold(self, router: ev.RouterId, dispatch: pb.Dispatch, now: float) -> bool:
        """Whether a prompt of the decode core waits for what the KV pool has, until `take_released` names its first branch."""

    def has(self, key: AttemptKey) -> bool:
        """Whether an attempt is there: its own, or one of the decode core that waits for what the KV pool has."""

    def drop(self, key: AttemptKey) -> None:
        """Nobody wants such a prompt any more."""

    def take_released(self) -> list[AttemptKey]:
        """Those that have waited."""

    def hold_back(self, is_held_up: bool) -> None:
        """Whether no blocks are to be taken to read the KV pool into."""

    def tell_speed(self, report: pb.LoadReport) -> None:
        """Add to a load report how fast this node computes prompts."""


class LeasingPart(ev.PartOfCore, Protocol):
    """The decode core, as far as it must know that it is not alone."""

    def holds(self, key: AttemptKey) -> bool:
        """Whether this attempt has a lease here, or waits for one."""

    def refuse_who(self, is_elsewhere: Callable[[AttemptKey], bool]) -> None:
        """Give no lease to whom another core of this node has."""

    def sends(self, event: ev.Event) -> bool:
        """Whether it is the answer to a handoff of a sequence that moves."""

    def hold_back(self, is_held_up: bool) -> None:
        """Whether no lease is to be given now."""

    @property
    def has_line(self) -> bool:
        """Whether anybody waits for room for a lease."""

    def load(self) -> pb.LoadReport:
        """See NodeCore."""


MAX_HELD: Final = 64  # Dispatches to itself that wait for the KV pool; one more is computed at once


@dataclass(frozen=True, slots=True)
class _Held:
    """A Dispatch to this node itself that waits for the KV pool."""

    event: ev.FromRouter
    since: float
    keys: frozenset[AttemptKey]  # of all its branches


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
        decode.refuse_who(prefill.has)
        self._parts = (prefill, decode)
        self._steps = StepsAhead(scheduler)
        self._num_draining = len(self._parts)  # those that have not said that they have drained
        self._is_draining = False
        self._held: dict[AttemptKey, _Held] = {}  # Dispatches to itself, by their first branch
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
            case ev.FromRouter(_, message) if message.WhichOneof("kind") == "move":
                self._decode.take(event, now)
            case ev.FromRouter() | ev.RouterLost() | ev.DrainAsked():
                for part in self._parts:
                    part.take(event, now)
                self._let_go(event, now)
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
        return earliest(self._prefill.next_deadline(), self._decode.next_deadline())

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
        has_lease = any(map(self._decode.holds, keys))  # no right router sends it to two nodes
        if any(map(self._is_here, keys)):
            self._out.append(ev.Count("stale_refused"))
        elif dispatch.target.node != self._self:
            if has_lease:
                self._out.append(ev.Count("stale_refused"))
            else:
                self._prefill.take(event, now)
        elif has_lease or self._is_draining or not self._may_hold(event, dispatch, now):
            self._decode.take(event, now)
        else:
            self._held[keys[0]] = _Held(event, now, frozenset(keys))

    def _is_here(self, key: AttemptKey) -> bool:
        """Whether this attempt is the prefill core's, or waits with it: it is, or will be, submitted under its key."""
        return self._prefill.has(key) or any(key in held.keys for held in self._held.values())

    def _may_hold(self, event: ev.FromRouter, dispatch: pb.Dispatch, now: float) -> bool:
        return len(self._held) < MAX_HELD and self._prefill.hold(event.router, dispatch, now)

    def _let_go(self, event: ev.Event, now: float) -> None:
        """Nobody waits for a router that is gone, or at a node that is to end.

        Of several branches that wait together the decode core's fence refuses those that were cancelled meanwhile.
        """
        match event:
            case ev.FromRouter(_, message) if message.WhichOneof("kind") == "cancel":
                ended = attempt_key(message.cancel.key)
                for key, held in tuple(self._held.items()):
                    is_alone = len(held.event.message.dispatch.branches) == 1
                    if is_alone and key.branch == ended.branch and key.attempt <= ended.attempt:
                        del self._held[key]
                        self._prefill.drop(key)
            case ev.RouterLost(router):
                for key in [key for key, held in self._held.items() if held.event.router == router]:
                    del self._held[key]
                    self._prefill.drop(key)
            case ev.DrainAsked():
                self._is_draining = True
                for key in tuple(self._held):
                    self._prefill.drop(key)
                    self._pass_on(key, now)

    def _pass_on(self, key: AttemptKey, now: float) -> None:
        held = self._held.pop(key)
        message = pb.RouterMessage()
        message.CopyFrom(held.event.message)
        message.dispatch.ms_left = max(1, message.dispatch.ms_left - round(1000 * (now - held.since)))
        self._decode.take(ev.FromRouter(held.event.router, message), now)

    def _finish_turn(self, now: float) -> list[ev.Action]:
        """Plan what can be planned, then let each core go on from there."""
        for key in self._prefill.take_released():
            self._pass_on(key, now)
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
