"""Watches what goes into a node's core and what comes out of it, and measures how long things took.

    Dispatch --queue--> SendReserve --reserve--> ReserveAnswered(lease) .. first WriteBlocks --transfer--> Commit's answer
    RunStep --step--> StepDone                                             any of these ........ --> Ended: forgotten

Durations of one host only, by the loop's own clock: an instant is when the loop took the event or performed the action. Knows
no clock and decides nothing: a core does the same whether it is watched or not.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError

from connector.transport import Answered
from engine.plan import Plan
from node import events as ev
from node.measures import Measures
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey, attempt_key

# Attempts are forgotten at Ended; a Dispatch that the core drops without one (stale, repeated) would stay. Far more than
# the branches of what a core keeps (NodeLimits.max_attempts), so that what falls out is such a leftover.
MAX_WATCHED: Final = 16_384


@dataclass(slots=True)
class _Watched:
    """What one Dispatch asked for: the attempts of one branch or several, which are handed over together."""

    dispatched_at: float
    lease_id: int | None = None  # once granted
    first_write_at: float | None = None
    is_answered: bool = False  # its Commit


class _Step(NamedTuple):
    """One plan that the runner was given."""

    plan: Plan
    given_at: float


class Watch:
    """Measures for one loop, which tells it everything in order."""

    def __init__(self, measures: Measures) -> None:
        self._measures = measures
        self._attempts: dict[AttemptKey, _Watched] = {}  # oldest first
        self._by_lease: dict[int, _Watched] = {}  # lease ids are 64 random bits; a clash costs a wrong duration
        self._asked_at: dict[AttemptKey, float] = {}  # Reserve sent; its answer is certain to come, Ended or not
        self._steps: deque[_Step] = deque()
        self._last_done_at = float("-inf")

    def received(self, event: ev.Event, now: float) -> None:
        """The core is about to get this event."""
        match event:
            case ev.StepDone():
                self._step_done(now)
            case ev.FromRouter(_, message) if message.WhichOneof("kind") == "dispatch":
                self._dispatched(message.dispatch, now)
            case ev.ReserveAnswered(key, reply):
                self._reserve_answered(key, reply, now)
            case Answered(_, payload):
                self._commit_answered(payload, now)

    def performed(self, action: ev.Action, now: float) -> None:
        """The core has asked for this."""
        match action:
            case ev.RunStep(plan):
                self._steps.append(_Step(plan, now))
            case ev.SendReserve(key):
                self._asked_at[key] = now
                if (watched := self._attempts.get(key)) is not None:
                    self._measures.observe("queue_seconds", now - watched.dispatched_at)
            case ev.WriteBlocks(_, lease):
                self._written(lease.lease_id, now)
            case ev.NotifyLink(_, message):
                self._written(message.commit.lease_id, now)  # counts where the receiver held every block already
            case ev.Ended(key, outcome):
                self._ended(key, outcome)

    @property
    def num_watched(self) -> int:
        """Everything that is remembered."""
        return len(self._attempts) + len(self._by_lease) + len(self._asked_at) + len(self._steps)

    def _dispatched(self, dispatch: pb.Dispatch, now: float) -> None:
        watched = _Watched(now)
        for branch in dispatch.branches:
            self._attempts.setdefault(AttemptKey(dispatch.request_id, branch.choice, dispatch.attempt), watched)
        while len(self._attempts) > MAX_WATCHED:
            self._forget(next(iter(self._attempts)))

    def _reserve_answered(self, key: AttemptKey, reply: pb.ReserveReply | None, now: float) -> None:
        if (asked_at := self._asked_at.pop(key, None)) is not None:
            self._measures.observe("reserve_seconds", now - asked_at)
        watched = self._attempts.get(key)
        if watched is not None and reply is not None and reply.WhichOneof("result") == "lease":
            watched.lease_id = reply.lease.lease_id
            self._by_lease[watched.lease_id] = watched

    def _written(self, lease_id: int, now: float) -> None:
        watched = self._by_lease.get(lease_id)
        if watched is not None and watched.first_write_at is None:
            watched.first_write_at = now

    def _commit_answered(self, payload: bytes, now: float) -> None:
        try:
            answer = pb.DataMessage.FromString(payload).answer
        except DecodeError:
            return  # the core counts it
        watched = self._attempts.get(attempt_key(answer.key))
        if watched is None or watched.first_write_at is None or watched.lease_id != answer.lease_id:
            return
        if not watched.is_answered:
            watched.is_answered = True
            self._measures.observe("transfer_seconds", now - watched.first_write_at)

    def _ended(self, key: AttemptKey, outcome: str) -> None:
        self._measures.add("attempts_ended", outcome.replace(" ", "_"))
        watched = self._forget(key)
        if watched is not None and watched.lease_id is not None and outcome in pb.ErrorCode.keys():  # noqa: SIM118
            self._measures.add("transfer_failures", outcome)

    def _forget(self, key: AttemptKey) -> _Watched | None:
        watched = self._attempts.pop(key, None)
        if watched is not None and watched.lease_id is not None and self._by_lease.get(watched.lease_id) is watched:
            del self._by_lease[watched.lease_id]
        return watched

    def _step_done(self, now: float) -> None:
        """Results come in the order of the plans, and the runner began this one when it was free and had it."""
        step = self._steps.popleft()
        self._measures.observe("step_seconds", now - max(step.given_at, self._last_done_at))
        self._last_done_at = now
        num_decodes = len(step.plan.decodes)
        self._measures.add("tokens_computed", "decode", num_decodes)
        if step.plan.chunks:
            self._measures.add("tokens_computed", "prefill", step.plan.num_tokens - num_decodes)
