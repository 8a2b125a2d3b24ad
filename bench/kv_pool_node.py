"""What a node does between two steps, its KV pool included, for bench.kv_pool_step; loads torch."""

from __future__ import annotations

import asyncio
from typing import Final

from connector.kv_store import KvStore
from engine.block_pool import BlockPool
from engine.kv_memory import KvMemory
from engine.model import Model
from engine.plan import SamplingParams, StepResult
from engine.reserve import ReserveConfig
from engine.runner import TorchRunner
from engine.saving import SaveRules
from engine.scheduler import Scheduler, SchedulerConfig
from engine.sequence import SequenceSpec
from node.events import BlocksStaged, Event, SaveBlocks
from node.kv_pool import KvPoolBounds, KvPoolThreads
from node.measures import Measures
from node.runner_thread import RunnerThread
from node.steps import plan_ahead

_MAX_BATCHED_TOKENS: Final = 512


class PooledNode:
    """A scheduler, a runner and its thread, and a KV pool once it is opened. Made in the running loop."""

    def __init__(
        self, model: Model, batch: int, num_blocks: int, block_size: int, longest: int, *, is_saving: bool
    ) -> None:
        """`is_saving`: who gives way and who is done is saved; then a pool must be opened. `longest`: tokens of a sequence."""
        pool = BlockPool(num_blocks, block_size)
        config = SchedulerConfig(
            num_slots=batch,
            max_batched_tokens=max(batch, _MAX_BATCHED_TOKENS),
            max_model_len=longest,
            reserve=ReserveConfig(policy="none"),  # so that some give way
            saves=SaveRules(of_preempted=is_saving, of_finished=is_saving),
        )
        self.measures = Measures()
        self.num_saved = 0  # blocks
        self._scheduler = Scheduler(config, pool, bytes(32))
        self._memory = KvMemory(model.config, block_size, num_blocks, model.dtype)
        self._told: asyncio.Queue[StepResult | Event] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._runner = RunnerThread(TorchRunner(model, self._memory, batch, longest), self._tell)
        self._pool: KvPoolThreads | None = None
        self._num_submitted = 0

    @property
    def block_bytes(self) -> int:
        """Of a block."""
        return int(self._memory.bytes.shape[1])

    def open_pool(self, store: KvStore, staging_bytes: int) -> None:
        """Save there from now on."""
        bounds = KvPoolBounds(staging_bytes=staging_bytes)
        self._pool = KvPoolThreads(store, self._memory.bytes, bounds, self._tell, self.measures)

    def submit(self, prompt: tuple[int, ...], num_tokens: int) -> None:
        """Take one more sequence, which says so many tokens."""
        number = self._num_submitted
        self._num_submitted += 1
        self._scheduler.submit(
            SequenceSpec(number, prompt, 0, SamplingParams(1.0, number), num_tokens, frozenset(), ())
        )

    async def step(self) -> int:
        """Until the next step's result is read; how many sequences it ended."""
        while True:
            for step in plan_ahead(self._scheduler):
                self._runner.submit(step.plan)
            for save in self._scheduler.take_saves():
                if self._pool is None:
                    raise AssertionError("no pool was opened")
                self.num_saved += len(save.blocks)
                self._pool.save(SaveBlocks(save.save_id, save.blocks))
            match await self._told.get():
                case BlocksStaged(save_id):
                    self._scheduler.saved(save_id)
                case StepResult() as result:
                    return sum(item.finish is not None for item in self._scheduler.complete(result).others)

    async def stop(self) -> None:
        """End the threads; what is staged is not written."""
        await self._runner.stop()
        if self._pool is not None:
            await self._pool.stop(0.01)

    def _tell(self, told: StepResult | Event) -> None:
        self._loop.call_soon_threadsafe(self._told.put_nowait, told)
