"""A request while it lives in the router: its phases as types, and what each PD Error means for it.

    Waiting ──dispatch──> Prefilling ──receiver's first batch──> Decoding ──finish──> (forgotten)
       ^                     │  │                                   ^
       └──refused, retried───┘  └──commit unanswered──> CommitUnknown

Who of the two nodes is believed in which phase is the owner rule (ownership.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Final

from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey
from router.events import GenerationRequest, NodeRef
from router.ownership import Owner
from router.placement import Pair
from router.token_log import TokenLog


@dataclass(frozen=True, slots=True)
class RouterCoreConfig:
    """The core's numbers; the router's flags fill the first three."""

    max_queue: int = 1024  # requests waiting; beyond: 429
    max_inflight_prefills: int = 32  # per prefill node
    preempt_retry_count: int = 3  # attempts after the first that a broken handoff may cost
    commit_unknown_grace_s: float = 2.0  # how long the receiver's first batch is awaited after an unanswered Commit
    min_refusal_wait_s: float = 0.05  # a node that refused is not asked again before
    max_refusal_wait_s: float = 2.0  # whatever it says: the request holds up those behind it meanwhile
    retry_after_s: float = 1.0  # what a client turned away is told
    forgotten_fence_s: float = 30.0  # how long a node fences an attempt of a request that has ended here


@dataclass(frozen=True, slots=True)
class Waiting:
    """In the queue, on no node."""

    owner: ClassVar = Owner.NOBODY


@dataclass(frozen=True, slots=True)
class Prefilling:
    """Dispatched; the prefill node owns the attempt."""

    owner: ClassVar = Owner.SENDER
    pair: Pair


@dataclass(frozen=True, slots=True)
class CommitUnknown:
    """The sender sent Commit and heard nothing; the receiver may own the attempt, or nobody does."""

    owner: ClassVar = Owner.UNSURE
    pair: Pair
    until: float
    error: pb.PDError


@dataclass(frozen=True, slots=True)
class Decoding:
    """The receiver owns the attempt."""

    owner: ClassVar = Owner.RECEIVER
    pair: Pair


Phase = Waiting | Prefilling | CommitUnknown | Decoding


@dataclass(slots=True)
class LiveRequest:
    """Everything that the router's core keeps for a request, until its one end."""

    request: GenerationRequest
    arrival: int  # its place in the queue, also when it comes back
    log: TokenLog
    retries_left: int
    phase: Phase
    num_refusals: int = 0  # that it met so far; they use no retry
    attempt: int = -1  # number of the newest attempt; before the first there is none
    last_pair: Pair | None = None  # where that attempt ran
    held_off: dict[NodeRef, float] = field(
        default_factory=dict
    )  # nodes that refused or failed it: not before that instant

    @property
    def pair(self) -> Pair | None:
        """The nodes that the newest attempt is on; None while the request waits."""
        return None if isinstance(self.phase, Waiting) else self.phase.pair

    @property
    def key(self) -> AttemptKey:
        """The newest attempt's fence."""
        return AttemptKey(self.request.request_id, 0, self.attempt)

    @property
    def total_tokens(self) -> int:
        """How long the sequence may become, prompt included."""
        return len(self.request.prompt_token_ids) + self.request.max_tokens

    @property
    def is_complete(self) -> bool:
        """Nothing is left to generate, whatever became of the attempt."""
        return self.ended_by_stop_token or len(self.log) >= self.request.max_tokens

    @property
    def ended_by_stop_token(self) -> bool:
        """The newest token ends the completion."""
        return self.log.last_token_id in self.request.stop_token_ids

    def wake_at(self, now: float) -> float:
        """The nearest instant at which something happens to the request by itself: the deadline at the latest."""
        instants = [self.request.deadline]
        if isinstance(self.phase, Waiting):
            instants += [until for until in self.held_off.values() if until > now]
        if isinstance(self.phase, CommitUnknown):
            instants.append(self.phase.until)
        return min(instants)

    def ms_left(self, now: float) -> int:
        """Milliseconds of the deadline, as they cross the wire; at least one, since a dead request is not sent."""
        return max(int((self.request.deadline - now) * 1000), 1)

    def dispatch(self, target: pb.Target, now: float) -> pb.Dispatch:
        """The message that starts the newest attempt."""
        request = self.request
        return pb.Dispatch(
            request_id=request.request_id,
            attempt=self.attempt,
            branches=[pb.Branch(choice=0, seed=request.seed, generated_token_ids=self.log.token_ids)],
            prompt_token_ids=request.prompt_token_ids,
            sampling=pb.Sampling(
                temperature=request.temperature,
                max_tokens=request.max_tokens,
                stop_token_ids=request.stop_token_ids,
            ),
            target=target,
            ms_left=self.ms_left(now),
        )


# Before Commit: no room there now. The request waits for capacity; no retry is used.
REFUSALS: Final = frozenset({pb.NO_BLOCKS, pb.BUSY})

# Before Commit: the attempt broke. One retry each.
BROKEN_HANDOFFS: Final = frozenset({pb.CHECKSUM, pb.TRANSFER_FAILED, pb.LEASE_EXPIRED})

# HTTP status of a request that ends with this code. What is not here is 500.
STATUS: Final[dict[int, int]] = {
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
}
