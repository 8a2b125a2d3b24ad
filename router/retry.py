"""What the end of an attempt without a finish means for its branch: another attempt, when and not where, or its end. Pure.

Who was refused for want of room, or by a node that is to end, asks again and pays nothing. Everything else pays from one budget
(`--preempt-retry-count`). A preemption costs a small part of a retry: the node was short of blocks, nothing is broken, and who is
patient is served; nor does it cost whoever fails later an attempt, for the last failure is paid for with what is left. A budget
that is 0 is spent by the first of either kind.

Who was on so many nodes when they died (`--max-nodes-lost`) may be what kills them: that is the end, as if the budget were spent. A
node that is silent, or cut off, is no such node.

The first attempt after a failure follows at once, elsewhere where it can; of several in a row each waits longer, with jitter, so
that those who failed together do not come back together. Not here: whose word ends an attempt (ownership.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from proto import baton_pb2 as pb
from router.entrance import RouterCoreConfig
from router.events import NodeRef
from router.placement import Draw

PREEMPTIONS_PER_RETRY: Final = 32
_JITTER_STEPS: Final = 1024


class Cost(Enum):
    """What an error takes from the budget."""

    NOTHING = auto()
    PART = auto()
    RETRY = auto()


# What is not here is final.
COST: Final[Mapping[int, Cost]] = {
    pb.NO_BLOCKS: Cost.NOTHING,
    pb.BUSY: Cost.NOTHING,
    pb.DRAINING: Cost.NOTHING,
    pb.PREEMPTED: Cost.PART,
    pb.LEASE_EXPIRED: Cost.RETRY,
    pb.TRANSFER_FAILED: Cost.RETRY,
    pb.CHECKSUM: Cost.RETRY,
    pb.NODE_LOST: Cost.RETRY,
    pb.INTERNAL: Cost.RETRY,
    pb.CANCELLED: Cost.RETRY,
}
# Not to be retried, says who cancels; but that is the router, and what it has cancelled counts no more. So this node has lost its
# session with the router, or was asked twice for one thing, and nobody meant the attempt.
_WHATEVER_THEY_SAY: Final = frozenset({pb.CANCELLED})
# Of these the node that is named is to blame. A broken handoff is put down to the receiver, whoever noticed it.
_OF_THE_SPEAKER: Final = frozenset({pb.NO_BLOCKS, pb.BUSY, pb.DRAINING, pb.PREEMPTED, pb.INTERNAL, pb.NODE_LOST})

# HTTP status of a request that ends with this code. What is not here is 500.
STATUS: Final[Mapping[int, int]] = {
    pb.NO_BLOCKS: 503,
    pb.BUSY: 503,
    pb.PREEMPTED: 503,
    pb.LEASE_EXPIRED: 503,
    pb.DRAINING: 503,
    pb.NODE_LOST: 503,
    pb.TRANSFER_FAILED: 502,
    pb.CHECKSUM: 502,
    pb.INCOMPATIBLE: 502,
    pb.DEADLINE: 504,
    pb.INVALID: 400,
}


@dataclass(frozen=True, slots=True)
class Again:
    """Another attempt."""

    cost: Cost
    held_s: (
        float | None
    )  # for so long not at the node that is to blame, which is a last resort ever after; None: no matter
    rest_s: float  # for so long nowhere


class Over(Enum):
    """No other attempt."""

    FINAL = auto()  # another would meet the same
    SPENT = auto()  # enough for here: what there is so far is handed up


class Tries:
    """What a branch has gone through, and what it may still."""

    def __init__(self, config: RouterCoreConfig) -> None:
        self._config = config
        self._credit = config.preempt_retry_count * PREEMPTIONS_PER_RETRY
        self.num_refusals = 0  # in a row, as `_patience_s` counts them
        self._heard_at: float | None = None  # when a receiver was heard first since the last refusal
        self.failures_in_row = 0  # attempts that failed since a receiver was heard
        self.num_deaths = 0  # of nodes that it was on, those of one event counted once
        self._dead: set[NodeRef] = set()  # whose deaths have ended no attempt yet
        self._joins_until: float | None = None  # when another death found no longer belongs to the last one

    @property
    def retries_left(self) -> int:
        """Failures that may be paid for, the last with what is left."""
        return -(-self._credit // PREEMPTIONS_PER_RETRY)

    def succeeded(self, now: float) -> None:
        """A receiver was heard: what fails now is no repetition."""
        self.failures_in_row = 0
        if self._heard_at is None:
            self._heard_at = now

    def saw_death(self, node: NodeRef) -> None:
        """The process of a node that it is on has ended."""
        self._dead.add(node)

    def lost(self, node: NodeRef, now: float) -> None:
        """An attempt has ended at `now` by the loss of this node, which counts if the node has died.

        Two that are found dead at nearly one time died of one thing, such as their host, and count as one: whoever goes on
        elsewhere after the first may be sent to the second before that is missed.
        """
        if node not in self._dead:
            return  # silent, or cut off, or it has lost the session: no request is to blame for that
        self._dead.discard(node)
        if self._joins_until is not None and now <= self._joins_until:
            self._joins_until = None
        else:
            self.num_deaths += 1
            self._joins_until = now + self._config.one_event_s

    def after(self, error: pb.PDError, is_at_decode: bool, draw: Draw, now: float) -> Again | Over:
        """Decide, and pay. `is_at_decode`: the node to blame is the attempt's decode node."""
        cost = COST.get(error.code)
        if cost is None or not (error.retryable or error.code in _WHATEVER_THEY_SAY):
            return Over.FINAL
        if error.code == pb.NODE_LOST and self.num_deaths >= self._config.max_nodes_lost:
            return Over.SPENT  # it may be what kills them
        wait_s = min(error.retry_after_ms / 1000, self._config.max_refusal_wait_s)
        is_held = cost is Cost.NOTHING or self._config.preempt_retry_exclude_decode or not is_at_decode
        if cost is Cost.RETRY:
            if self._credit == 0:
                return Over.SPENT
            self._credit = max(0, self._credit - PREEMPTIONS_PER_RETRY)
            self.failures_in_row += 1
            return Again(cost, wait_s if is_held else None, self._backoff_s(draw))
        if cost is Cost.PART:
            if self._credit == 0:
                return Over.SPENT
            self._credit -= 1
        return Again(cost, self._patience_s(wait_s, now) if is_held else None, 0.0)

    def _patience_s(self, wait_s: float, now: float) -> float:
        """Each refusal has cost a prefill, so who is refused again asks less and less often, whatever the node says.

        Who has run for longer than the longest wait since is refused anew, not again: others wait behind it at a node with room.
        """
        if self._heard_at is not None and now - self._heard_at > self._config.max_refusal_wait_s:
            self.num_refusals = 0
        self._heard_at = None
        self.num_refusals += 1
        patience_s: float = self._config.min_refusal_wait_s * 2 ** min(self.num_refusals - 1, 6)
        return min(max(wait_s, patience_s), self._config.max_refusal_wait_s)

    def _backoff_s(self, draw: Draw) -> float:
        """Nothing for the first failure, then doubling, and of that from a half to all."""
        if self.failures_in_row == 1:
            return 0.0
        most_s: float = self._config.min_backoff_s * 2 ** min(self.failures_in_row - 2, 10)
        return min(most_s, self._config.max_backoff_s) * (1 + draw.below(_JITTER_STEPS) / _JITTER_STEPS) / 2


def culprit(error: pb.PDError, sender: NodeRef, receiver: NodeRef) -> NodeRef:
    """Which of an attempt's nodes an error is put down to."""
    return sender if error.code in _OF_THE_SPEAKER and error.node_id == sender.name else receiver
