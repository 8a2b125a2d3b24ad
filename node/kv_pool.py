"""The KV pool as a node's loop sees it: saves, looks and fetches go to threads, and each is answered by one event.

Nothing here waits for the store, whatever it does (kv_pool_writer.py, kv_pool_reader.py). A store that keeps failing is left
alone for a while, to write and to read each by itself (kv_pool_circuit.py). Not here: what is stored and read when (the
cores).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from connector.kv_breaker import BreakerTiming
from connector.kv_store import KvStore
from node.events import Event, FetchBlocks, LookInPool, SaveBlocks, TakeOutBlocks
from node.kv_pool_circuit import PoolCircuit
from node.kv_pool_reader import PoolReader
from node.kv_pool_writer import PoolWriter
from node.kv_recent import RecentKeys
from node.measures import Measures
from node.pool_word import PoolWord


@dataclass(frozen=True, slots=True)
class KvPoolBounds:
    """What the threads keep within."""

    staging_bytes: int = 64 << 20  # of blocks that wait to be written
    num_recent: int = 1 << 16  # keys of blocks that the pool has, which are not copied again
    recent_s: float = 60.0  # for so long: it may have dropped one since
    look_timeout_s: float = 1.0  # from asking to the answer, whatever the store does
    fetch_timeout_s: float = 5.0
    num_readers: int = 2  # fetches at once
    breaker: BreakerTiming = field(default_factory=BreakerTiming)


class KvPoolThreads:
    """Implements loop.KvPool over one store; made, called and stopped on the loop's thread."""

    def __init__(
        self,
        store: KvStore,
        kv_bytes: npt.NDArray[np.uint8],
        bounds: KvPoolBounds,
        post: Callable[[Event], None],
        measures: Measures,
    ) -> None:
        """kv_bytes: [num_blocks, block_bytes] u8, contiguous. `post` is called from any thread, and from inside the calls."""
        self._store = store
        self._circuits = {side: PoolCircuit(side, bounds.breaker, measures) for side in ("read", "write")}
        recent = RecentKeys(bounds.num_recent, bounds.recent_s)
        word = PoolWord(store, post, lambda keys: self._writer.forget(keys))
        to_write = (bounds.staging_bytes, recent, self._circuits["write"])
        self._writer = PoolWriter(store, kv_bytes, *to_write, (post, word), measures)
        timeouts_s = (bounds.look_timeout_s, bounds.fetch_timeout_s)
        self._reader = PoolReader(
            store, kv_bytes, bounds.num_readers, timeouts_s, self._circuits["read"], (post, word), measures
        )
        self.ended: tuple[Future[None], ...] = (
            *self._writer.ended,
            *self._reader.ended,
        )  # each resolves when its thread ends

    def save(self, action: SaveBlocks) -> None:
        """See loop.KvPool."""
        self._writer.save(action)

    def take_out(self, action: TakeOutBlocks) -> None:
        """See loop.KvPool."""
        self._writer.take_out(action)

    def look(self, action: LookInPool) -> None:
        """See loop.KvPool."""
        self._reader.look(action)

    def fetch(self, action: FetchBlocks) -> None:
        """See loop.KvPool."""
        self._reader.fetch(action)

    async def stop(self, timeout_s: float = 2.0) -> bool:
        """Write what is staged while there is time, then end; False: a thread hangs in the store, and it stays open."""
        self._writer.end()
        self._reader.end()
        waiting = {asyncio.ensure_future(asyncio.wrap_future(end)) for end in self.ended}
        _, late = await asyncio.wait(waiting, timeout=timeout_s)
        if late:
            self._writer.hurry()
            _, late = await asyncio.wait(late, timeout=timeout_s / 4)
        for each in late:
            each.cancel()
        if not late:
            self._store.close()
        return not late

    def snapshot(self) -> Mapping[str, object]:
        """JSON-able."""
        return {
            "staging_blocks": self._writer.num_slots,
            "staging_blocks_used": self._writer.num_used,
            "calls_waiting": self._reader.num_waiting,
            "circuits": {side: circuit.state for side, circuit in self._circuits.items()},
        }
