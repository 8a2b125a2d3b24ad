"""The door of a simulated decode node: leases as the product's admission grants them, and the line of those who wait. Pure.

Not in it: that who waits in the line is refused after a while, asks elsewhere, and comes back (decode_node/door.py). Here all wait
until there is room, in order.
"""

from __future__ import annotations

from collections import deque

from bench.plan_engine import Engine, Work
from decode_node import admission
from engine.prefix_cache import PrefixCache


class Door:
    """Of one node."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._cache = PrefixCache(engine.pool)
        self._leases: dict[Work, admission.LeasedBlocks] = {}
        self.line: deque[Work] = deque()

    def ask(self, work: Work) -> None:
        """Take a place in the line; `settle` says who has a lease."""
        self.line.append(work)

    def settle(self) -> list[tuple[Work, int]]:
        """Who has a lease from now on, with the tokens that need not be sent: the node holds them."""
        granted: list[tuple[Work, int]] = []
        while self.line and self._engine.reserve_slot():
            work = self.line[0]
            blocks = self._take(work)
            if blocks is None:
                self._engine.unreserve_slot()
                break
            self._leases[work] = blocks
            granted.append((self.line.popleft(), blocks.num_held * self._engine.pool.block_size))
        return granted

    def _take(self, work: Work) -> admission.LeasedBlocks | None:
        pool, num_total = self._engine.pool, work.num_given + work.num_new
        need = admission.block_need(work.num_given, num_total, pool.block_size)
        is_promised = self._engine.promises_growth

        def has_room(num_blocks: int) -> bool:
            granted = [each.num_new - 1 for each in self._leases]
            return self._engine.admits(num_blocks, [] if is_promised else [work.num_new - 1], granted)

        keys = work.keys[: work.num_given // pool.block_size]
        return admission.take_blocks(pool, self._cache, need, keys, is_promised, has_room)

    def commit(self, work: Work) -> None:
        """All KV of a lease is here: it decodes."""
        blocks = self._leases.pop(work)
        (block_ids,) = admission.start_branches(self._engine.pool, blocks, [0]).values()
        self._engine.adopt(work, block_ids, blocks.num_growth)
        self._engine.pool.take_arrived()

    @property
    def num_leases(self) -> int:
        """That were not committed yet."""
        return len(self._leases)
