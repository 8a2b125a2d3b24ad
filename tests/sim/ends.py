"""When a request may end in anything but success: everything that is not here is a bug.

A request ends well once there is a pair of nodes that can serve it, whatever was struck. What remains are limits that users set:

    aborted, router lost, no router    the client has gone, its router has died, none was there to ask
    OVERLOADED                         the router's queue was full (looked at where it is said, routers.py)
    DEADLINE                           the request's own limit, which is shorter than the work and the faults that it met
    LATE                               the same, as the router foresaw it
    NO_NODES                           no pair of nodes since the router's start, or for longer than its grace
    NODE_LOST                          its prompt's logprobs died with their sender, while its receiver was done
    pd_reschedule, NODE_LOST           no pair of nodes of the model that it was begun by, but one of another, for the same grace
    pd_reschedule, or its error        its retries are spent, or it was on so many nodes when they died that it may be what
      before the first token, or       kills them. What it has is a beginning of the right answer, and whoever resubmits that
      before its prompt's logprobs     gets the rest (clients.py, world.py)

A retry is paid for by an attempt that failed, and no attempt fails that was not struck: one of its hosts, or a way between two of
them (faults.py). The router's own count is not asked: here is written down what it was told.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from proto import baton_pb2 as pb
from router.events import NodeRef
from router.retry import COST, PREEMPTIONS_PER_RETRY, Cost
from tests.sim.scenario import ClientPlan, Knobs

# These say that somebody did not understand somebody.
_NEVER: Final = frozenset({"INCOMPATIBLE", "context_length_exceeded", "BUSY", "NO_BLOCKS", "DRAINING"})
_LONGEST_S: Final = 600.0  # a request's limit, where it has none of its own
_SLACK_S: Final = 5.0  # of a deadline: timers, and the network without faults


@dataclass(slots=True)
class Trials:
    """What one choice of a request has gone through, as its router was told."""

    attempt: int = -1  # the newest
    num_attempts: int = 0
    pair: tuple[NodeRef, NodeRef] | None = None  # where that runs; None: it has ended, or none was made
    failed: dict[int, str] = field(default_factory=dict)  # attempt -> why, where that costs a retry
    preempted: set[int] = field(default_factory=set)
    died: dict[NodeRef, None] = field(default_factory=dict)  # nodes whose process ended while it was on them
    moves: dict[int, NodeRef] = field(
        default_factory=dict
    )  # attempt -> the node that it may begin at, without a dispatch
    num_moved: int = 0

    def dispatched(self, attempt: int, pair: tuple[NodeRef, NodeRef]) -> None:
        """Another attempt."""
        self.attempt, self.pair = attempt, pair
        self.num_attempts += 1

    def may_move(self, attempt: int, target: NodeRef) -> None:
        """The holder was told of a target."""
        self.moves[attempt] = target

    def heard_receiver(self, attempt: int) -> None:
        """Tokens of an attempt: of a new one, where it has moved."""
        if attempt > self.attempt and (target := self.moves.get(attempt)) is not None:
            self.attempt, self.pair = attempt, (target if self.pair is None else self.pair[0], target)
            self.num_moved += 1

    def heard_error(self, error: pb.PDError) -> None:
        """A node says that an attempt is over."""
        cost = COST.get(error.code)
        if cost is Cost.PART:
            self.preempted.add(error.key.attempt)
        elif cost is Cost.RETRY:
            self.failed.setdefault(error.key.attempt, pb.ErrorCode.Name(error.code))

    def lost_node(self, node: NodeRef, has_died: bool) -> None:
        """A node is gone, or its session is."""
        if node in self.nodes:
            if has_died:
                self.died[node] = None
            self.failed.setdefault(self.attempt, "NODE_LOST")

    @property
    def nodes(self) -> tuple[NodeRef, ...]:
        """Where it is: on a pair, and perhaps at the node that it was to move to last, which has not said so."""
        if self.pair is None:
            return ()
        target = self.moves.get(max(self.moves, default=-1))
        return self.pair if target is None else (*self.pair, target)

    @property
    def may_compute_again(self) -> bool:
        """Whether an attempt has ended with less than was computed."""
        return bool(self.failed or self.preempted)

    def have_spent(self, retries: int) -> bool:
        """Whether so many retries cannot pay for all that has failed, in its order, the last failure with what is left."""
        credit = PREEMPTIONS_PER_RETRY * retries
        for attempt in range(max((*self.failed, *self.preempted), default=-1) + 1):
            for price in (PREEMPTIONS_PER_RETRY * (attempt in self.failed), int(attempt in self.preempted)):
                if price and credit <= 0:
                    return True
                credit -= price
        return False


@dataclass(frozen=True, slots=True)
class Circumstances:
    """Of a request that has not succeeded."""

    plan: ClientPlan
    trials: list[Trials]
    has_tokens: bool
    is_unscored: (
        bool  # the logprobs of its prompt, which only its first answer can tell, have not come for every choice
    )
    patience_s: float  # what all the work of the scenario can take without any fault
    felt_s: float  # for so long faults were felt while the request was open
    had_no_pair: bool  # at its end, as long as NO_NODES demands
    had_no_heirs: bool  # the same of pairs of the model that some choice was begun by


def problem(end: str, error: str, knobs: Knobs, met: Circumstances) -> str | None:
    """Why the request should not have ended so; None: it had to."""
    if end in ("finished", "aborted", "router lost", "no router", "OVERLOADED"):
        return None
    if end in _NEVER:
        return "nobody may say so"
    if end == "LATE":
        return None if met.plan.timeout_s < _LONGEST_S else "it has all the time in the world"
    if end == "DEADLINE":
        needed_s = met.patience_s + met.felt_s + _SLACK_S
        return None if met.plan.timeout_s < needed_s else f"{needed_s:.1f} s would have been enough"
    if end == "NO_NODES":
        return None if met.had_no_pair else "there was a pair of nodes, a moment ago at most"
    if end == "NODE_LOST" and "logprobs" in error:
        return None if met.plan.wants_prompt_logprobs and any(each.failed for each in met.trials) else "no loss"
    if end == "NODE_LOST" and "weights" in error:
        return None if met.had_no_heirs and met.plan.wants_prompt_logprobs else "its model is served"
    may_kill = any(len(each.died) >= knobs.max_nodes_lost for each in met.trials)
    is_over = (may_kill and end in ("NODE_LOST", "pd_reschedule")) or any(
        each.have_spent(knobs.retries) for each in met.trials
    )
    is_over |= met.had_no_heirs and end == "pd_reschedule"
    if not is_over:
        return f"of {knobs.retries} retries some are left: {met.trials}"
    if met.has_tokens and end != "pd_reschedule" and not met.is_unscored:
        return "what it has is lost"
    return None
