"""What this node has seen of its two speeds, computing prompts and fetching blocks from the KV pool, and what follows. Pure.

Of the reading, a line: seconds = latency + blocks x seconds per block, fitted to the fetches so far, of which each weighs less
than the next (least squares with forgetting); and the share of the blocks asked for that came. Of the computing, this node's own
rate while it computes prompts. Which of both is sooner: proto/prefill_speed.py, by which routers reckon, too.
"""

from __future__ import annotations

import math
from typing import Final

from proto import prefill_speed
from proto.prefill_speed import FetchSpeed, PrefillSpeed

FORGETS: Final = 0.3  # of what was known, at each fetch and look
# Computed prompt positions, after which a step counts 1/e. By steps, a few short prompts, each of which pays for a whole one, would
# make the node look slow for long ones, too.
_TOKENS_REMEMBERED: Final = 20_000
COLD_WAIT_S: Final = 0.25  # that a request waits at most where either speed is unknown


class FetchCost:
    """The two speeds of one node. Owned by prefill_node/fetching.py."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._step_tokens = self._step_s = 0.0  # of steps that computed prompts, the last ones counting most
        self._num_prompt_tokens = 0  # by all steps that were read
        self._busy_since: float | None = None
        self._sums = [0.0] * 5  # of fetches, weighted: how many, blocks, seconds, blocks squared, blocks times seconds
        self._share = 1.0
        self._look_s = 0.0

    # What is seen

    def read(self, num_prompt_tokens: int, now: float) -> None:
        """A step was read; by all steps so far so many prompt positions are computed."""
        num_tokens, self._num_prompt_tokens = num_prompt_tokens - self._num_prompt_tokens, num_prompt_tokens
        began_at, self._busy_since = self._busy_since, now
        if num_tokens and began_at is not None:
            kept = math.exp(-num_tokens / _TOKENS_REMEMBERED)
            self._step_tokens = kept * self._step_tokens + num_tokens
            self._step_s = kept * self._step_s + now - began_at

    def turned(self, is_busy: bool, now: float) -> None:
        """The core's turn is over; whether any step is under way."""
        if not is_busy:
            self._busy_since = None
        elif self._busy_since is None:
            self._busy_since = now

    def looked(self, seconds: float) -> None:
        """A look took so long."""
        self._look_s += FORGETS * (seconds - self._look_s)

    def fetched(self, num_asked: int, num_blocks: int, seconds: float) -> None:
        """A fetch of so many blocks brought so many."""
        seen = (1.0, num_blocks, seconds, num_blocks * num_blocks, num_blocks * seconds)
        self._sums = [(1 - FORGETS) * old + new for old, new in zip(self._sums, seen, strict=True)]
        self._share += FORGETS * (num_blocks / num_asked - self._share)

    # What follows

    @property
    def is_known(self) -> bool:
        """Whether both speeds are."""
        return self._sums[0] > 0 and self._step_tokens > 0

    def compute_s(self, num_tokens: int) -> float:
        """How long this node computes so many prompt positions. COLD_WAIT_S where it has computed none."""
        return num_tokens * self._step_s / self._step_tokens if self._step_tokens else COLD_WAIT_S

    def line(self) -> tuple[float, float]:
        """Latency and seconds per block."""
        weight, blocks, seconds, squares, products = self._sums
        if not weight:
            return 0.0, 0.0
        spread = weight * squares - blocks * blocks
        if spread > 1e-9 * weight * squares:
            per_block = (weight * products - blocks * seconds) / spread
            latency = (seconds - per_block * blocks) / weight
            if per_block >= 0 and latency >= 0:
                return latency, per_block
            if per_block < 0:
                return seconds / weight, 0.0
        return (0.0, seconds / blocks) if blocks else (seconds / weight, 0.0)

    def speed(self) -> PrefillSpeed | None:
        """What is known; None: this node has computed no prompt."""
        if not self._step_tokens or not self._step_s:
            return None
        fetch = FetchSpeed(*self.line(), self._share, self._look_s) if self._sums[0] else None
        return PrefillSpeed(self._step_s / self._step_tokens, self._block_size, fetch)

    def num_worth(self, num_blocks: int, num_tokens_in_front: int) -> int:
        """How many leading ones of so many blocks, which the pool has, are fetched sooner than computed; unknown: all."""
        speed = self.speed()
        if speed is None or speed.fetch is None:
            return num_blocks
        return prefill_speed.num_worth(speed, num_blocks, num_tokens_in_front)

    def is_worth_a_look(self, num_blocks: int, num_tokens_in_front: int) -> bool:
        """Whether to ask the pool for so many blocks, which it may not have; unknown: yes."""
        speed = self.speed()
        if speed is None:
            return True
        if speed.fetch is None:
            speed = PrefillSpeed(speed.token_s, speed.block_size, FetchSpeed(0.0, 0.0, 1.0, self._look_s))
        return prefill_speed.is_worth_a_look(speed, num_blocks, num_tokens_in_front)

    def patience_s(self, num_blocks: int, num_tokens_in_front: int) -> float:
        """How long a request may wait for so many blocks: as long as it would take to compute them."""
        if not self.is_known:
            return min(COLD_WAIT_S, self.compute_s(num_tokens_in_front + num_blocks * self._block_size))
        return self.compute_s(num_tokens_in_front + num_blocks * self._block_size)
