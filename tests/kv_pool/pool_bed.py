"""A node's KV pool over a faulty store, and its events as a test waits for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from connector.kv_breaker import BreakerTiming
from node.events import BlocksFetched, BlocksStaged, Event, FetchBlocks, LookInPool, PoolLooked, PoolSaid, SaveBlocks
from node.kv_pool import KvPoolBounds, KvPoolThreads
from node.measures import Measures
from tests.kv_pool.faulty_store import FaultyStore
from tests.kv_pool.places import Blocks, blocks_of

PATIENCE_S: Final = 60.0
NEVER_OPENS: Final = BreakerTiming(num_failures=1 << 30)

_E = TypeVar("_E")


class PoolBed:
    """Random KV memory, the pool, and what it has posted."""

    def __init__(self, store: FaultyStore, num_blocks: int, bounds: KvPoolBounds) -> None:
        self.store = store
        self.memory: Blocks = blocks_of(num_blocks, store.records.block_bytes)
        self.measures = Measures()
        self.events: list[Event] = []  # answers
        self.said: list[PoolSaid] = []  # by the pool, beside them
        self._loop = asyncio.get_running_loop()
        self._posted = asyncio.Event()
        self.pool = KvPoolThreads(store, self.memory, bounds, self._post, self.measures)

    def of(self, kind: type[_E]) -> list[_E]:
        """Events of a kind, in order."""
        return [event for event in self.events if isinstance(event, kind)]

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait for something that an event, or a thread, makes so."""
        async with asyncio.timeout(PATIENCE_S):
            while not is_so():
                self._posted.clear()
                with contextlib.suppress(TimeoutError):  # what a thread does beside its events is seen by looking
                    async with asyncio.timeout(0.002):
                        await self._posted.wait()

    def let_time_pass(self, seconds: float) -> None:
        """On the loop's clock: what is not answered by then is now."""
        clock = self._loop.time
        self._loop.time = lambda: clock() + seconds  # type: ignore[method-assign]

    async def saved(self, action: SaveBlocks) -> BlocksStaged:
        """Ask, and wait for the answer."""
        return await self._answer(BlocksStaged, lambda: self.pool.save(action))

    async def looked(self, action: LookInPool) -> PoolLooked:
        """Ask, and wait for the answer."""
        return await self._answer(PoolLooked, lambda: self.pool.look(action))

    async def fetched(self, action: FetchBlocks) -> BlocksFetched:
        """Ask, and wait for the answer."""
        return await self._answer(BlocksFetched, lambda: self.pool.fetch(action))

    def amount(self, name: str, label: str) -> int:
        """One of the node's counters."""
        return self.measures.amounts()[name][label]

    async def _answer(self, kind: type[_E], ask: Callable[[], None]) -> _E:
        num_before = len(self.of(kind))
        ask()
        await self.until(lambda: len(self.of(kind)) > num_before)
        return self.of(kind)[num_before]

    def _post(self, event: Event) -> None:
        if isinstance(event, PoolSaid):
            self.said.append(event)
        else:
            self.events.append(event)
        self._loop.call_soon_threadsafe(self._posted.set)


@asynccontextmanager
async def pool_bed(
    block_bytes: int = 1000, num_blocks: int = 64, bounds: KvPoolBounds | None = None
) -> AsyncIterator[PoolBed]:
    """A bed; afterwards nothing hangs any more and every thread ends."""
    bed = PoolBed(FaultyStore(block_bytes), num_blocks, bounds or KvPoolBounds(breaker=NEVER_OPENS))
    try:
        yield bed
    finally:
        bed.store.may_write.set()
        bed.store.may_read.set()
        assert await bed.pool.stop(PATIENCE_S)
