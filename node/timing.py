"""What an attempt's client waits for on this node, as durations by the node's own clock. Pure.

    sender    Dispatch --queue--> first chunk planned --prefill--> first token --reserve wait--> lease: Commit
    receiver                                                       Commit --admit--> it runs --first step--> its next token
    alone     Dispatch --queue--> first chunk planned --prefill--> first token --first step--> its next token

Each is told once, with the batch that ends it, so a step that only goes on tells nothing and costs nothing. What lies between two
nodes is nobody's to measure: the router takes it to be what remains of its own time (router/timeline.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey

MAX_CHUNKS: Final = 64  # that are told of one prompt


def to_us(seconds: float) -> int:
    """Whole microseconds; none is negative."""
    return max(round(seconds * 1_000_000), 0)


@dataclass(slots=True)
class Computed:
    """An attempt whose prompt is computed here."""

    came_at: float
    begun_at: float | None = None  # its first chunk was planned
    told_at: float | None = None  # its first token was
    chunk_ends: list[float] = field(default_factory=list)

    def chunk_computed(self, now: float) -> None:
        """A chunk of its prompt is, which is not the last one."""
        if len(self.chunk_ends) < MAX_CHUNKS:
            self.chunk_ends.append(now)

    def first_token(self, key: AttemptKey, now: float, num_cached: int) -> pb.Timing:
        """It has its first token; `num_cached` of those before it were not computed for it."""
        self.told_at = now
        begun_at = now if self.begun_at is None else self.begun_at
        return pb.Timing(
            key=key.to_proto(),
            queue_us=to_us(begun_at - self.came_at),
            prefill_us=to_us(now - begun_at),
            chunk_end_us=[to_us(end - begun_at) for end in self.chunk_ends],
            cached_tokens=num_cached,
        )

    def reserve_wait_us(self, now: float) -> int:
        """It can be handed over: what the lease was waited for once the token was there."""
        return 0 if self.told_at is None else to_us(now - self.told_at)

    def next_token(self, key: AttemptKey, now: float, num_cached: int) -> tuple[pb.Timing, bool]:
        """One more token where nothing is handed over; and whether there is more to tell."""
        if self.told_at is None:
            return self.first_token(key, now, num_cached), True
        return pb.Timing(key=key.to_proto(), first_step_us=to_us(now - self.told_at)), False


@dataclass(slots=True)
class Received:
    """An attempt that was handed over to this node, and runs."""

    reserve_wait_us: int
    committed_at: float
    began_at: float

    def next_token(self, key: AttemptKey, now: float, _num_cached: int) -> tuple[pb.Timing, bool]:
        """Its first token here; and whether there is more to tell. What was cached is who computed its prompt to tell."""
        timing = pb.Timing(
            key=key.to_proto(),
            reserve_wait_us=self.reserve_wait_us,
            admit_us=to_us(self.began_at - self.committed_at),
            first_step_us=to_us(now - self.began_at),
        )
        return timing, False
