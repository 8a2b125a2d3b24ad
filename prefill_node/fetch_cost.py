"""What is faster, as far as this node has seen: fetching blocks from the KV pool, or computing them. Pure.

Of the reading, a line: seconds = latency + blocks x seconds per block, fitted to the fetches so far, of which each weighs less
than the next (least squares with forgetting); and the share of the blocks asked for that came. Of the computing, this node's own
rate while it computes prompts. What is computed waits for those in front first, and what is fetched is fetched meanwhile:

    fetch      max(front, latency + blocks x per block) + the rest of the prompt
    compute    front + blocks x block_size / rate       + the rest of the prompt

so it pays to fetch while  latency + blocks x per block < front + share that comes x blocks x block_size / rate.
"""

from __future__ import annotations

from typing import Final

FORGETS: Final = 0.3  # of what was known, at each fetch and look
_STEP_FORGETS: Final = 0.1  # the same at each step with prompts
COLD_WAIT_S: Final = 0.25  # that a request waits at most where either speed is unknown
# A look may take this share of what there is to win: unless most prompts are known to the pool, more would be lost than won.
LOOK_SHARE: Final = 1 / 8


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
            self._step_tokens = (1 - _STEP_FORGETS) * self._step_tokens + num_tokens
            self._step_s = (1 - _STEP_FORGETS) * self._step_s + now - began_at

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

    def num_worth(self, num_blocks: int, num_tokens_in_front: int) -> int:
        """How many leading ones of so many blocks, which the pool has, are fetched sooner than computed; unknown: all."""
        if not self.is_known:
            return num_blocks
        latency, per_block = self.line()
        won_per_block = self._share * self.compute_s(self._block_size) - per_block
        ahead_s = self.compute_s(num_tokens_in_front) - latency
        if ahead_s + num_blocks * won_per_block > 0:
            return num_blocks
        return max(0, int(ahead_s / -won_per_block)) if won_per_block < 0 else 0

    def is_worth_a_look(self, num_blocks: int, num_tokens_in_front: int) -> bool:
        """Whether to ask the pool for so many blocks, which it may not have."""
        if not self._step_tokens:
            return True
        room_s = self.compute_s(num_tokens_in_front) + LOOK_SHARE * self.compute_s(num_blocks * self._block_size)
        return self.num_worth(num_blocks, num_tokens_in_front) > 0 and self._look_s <= room_s

    def patience_s(self, num_blocks: int, num_tokens_in_front: int) -> float:
        """How long a request may wait for so many blocks: as long as it would take to compute them."""
        if not self.is_known:
            return min(COLD_WAIT_S, self.compute_s(num_tokens_in_front + num_blocks * self._block_size))
        return self.compute_s(num_tokens_in_front + num_blocks * self._block_size)
