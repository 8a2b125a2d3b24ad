"""How much of a sequence is computed already: the longest run of leading full blocks that the pool still holds.

Keys are chained (proto/block_key.py), so a key names everything before it too, and a run of hits is a prefix. What blocks
hold, who references them and what is evicted is the pool's business; keys are computed by who sends the sequence.

Matching and evicting must not meet: a match is only safe from eviction once it is acquired, so acquire_match() comes before
any allocation for the same sequence, and never evicts anything itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from engine.block_pool import BlockPool


class PrefixCache:
    """Matching over one pool."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def match(self, keys: Sequence[bytes], max_blocks: int) -> list[int]:
        """The blocks of the longest cached prefix, at most `max_blocks` of them; NOT acquired: valid until the next change."""
        block_ids: list[int] = []
        for key in islice(keys, max_blocks):
            block_id = self._pool.find(key)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def acquire_match(self, keys: Sequence[bytes], max_blocks: int) -> list[int]:
        """The same, one reference taken on each: the caller frees them, all of them if it then finds no room for the rest.

        Cut where taking one more unreferenced block would break a promise made to somebody else. Who needs further blocks
        behind a match that was cut finds none available.
        """
        room = self._pool.num_available
        matched = self.match(keys, max_blocks)
        for num_blocks, block_id in enumerate(matched):
            room -= self._pool.is_cached(block_id)
            if room < 0:
                matched = matched[:num_blocks]
                break
        self._pool.acquire(matched)
        return matched
