"""A node's steps beside a KV pool that takes a second for every block: the same steps, in the same time."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pytest
import torch

from connector.kv_store import RunRead
from engine.block_pool import BlockPool
from engine.kv_memory import KvMemory
from engine.make_model import main as make_model
from engine.model import load_model
from engine.model_config import read_model_config
from engine.plan import SamplingParams
from engine.reserve import ReserveConfig
from engine.runner import TorchRunner
from engine.saving import SaveRules
from engine.scheduler import Scheduler, SchedulerConfig
from engine.sequence import SequenceSpec
from node.events import BlocksStaged, Event, PoolSaid, SaveBlocks
from node.kv_pool import KvPoolBounds, KvPoolThreads
from node.loop import KvPool, NoKvPool
from node.measures import Measures
from node.steps import plan_ahead
from tests.kernels_choice import KERNELS

BLOCK_SIZE = 16
SECONDS_PER_BLOCK = 1.0
PATIENCE_S = 20.0


class SlowStore:
    """Keeps nothing, a second for each block, until it is let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.num_asked = 0

    def identity(self) -> bytes:
        return bytes(16)

    def missing(self, keys: Sequence[bytes]) -> list[bool]:
        self.num_asked += 1
        self.let_go.wait(SECONDS_PER_BLOCK)
        return [True] * len(keys)

    def num_leading(self, keys: Sequence[bytes]) -> int:
        return 0

    def write(self, blocks: Sequence[tuple[bytes, memoryview]]) -> int:
        for _ in blocks:
            self.num_asked += 1
            self.let_go.wait(SECONDS_PER_BLOCK)
        return len(blocks)

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> RunRead:
        return RunRead(0, is_corrupt=False)

    def remove(self, keys: Sequence[bytes]) -> None:
        pass

    def close(self) -> None:
        pass


class Node:
    """An engine that saves all it can: who gives way, and who is done."""

    def __init__(self, model_dir: Path) -> None:
        torch.set_num_threads(1)
        self.memory = KvMemory(read_model_config(model_dir), BLOCK_SIZE, 40, "fp32")
        config = SchedulerConfig(
            8, 64, 256, reserve=ReserveConfig("none"), saves=SaveRules(of_preempted=True, of_finished=True)
        )
        self.scheduler = Scheduler(config, BlockPool(40, BLOCK_SIZE), b"seed")
        self.runner = TorchRunner(load_model(model_dir, "fp32", KERNELS), self.memory, 8, 256)

    def submit(self, random: Random) -> None:
        """Twelve sequences that do not fit together."""
        for number in range(12):
            prompt = tuple(random.randrange(256) for _ in range(random.randint(20, 60)))
            self.scheduler.submit(
                SequenceSpec(number, prompt, 0, SamplingParams(0.0, 0), 120 - len(prompt), frozenset(), ())
            )

    async def run(self, kv_pool: KvPool, events: list[Event]) -> list[float]:
        """Seconds of each turn: planning, computing, reading, and asking the pool."""
        seconds: list[float] = []
        while self.scheduler.has_sequences:
            began_at = time.perf_counter()
            steps = plan_ahead(self.scheduler, 1)
            for step in steps:
                self.scheduler.complete(self.runner.run(step.plan))
            for save in self.scheduler.take_saves():
                kv_pool.save(SaveBlocks(save.save_id, save.blocks))
            seconds += [time.perf_counter() - began_at] * len(steps)
            if not steps:
                await asyncio.sleep(0)  # everybody waits for what is being copied
            while events:
                event = events.pop(0)
                if isinstance(event, PoolSaid):
                    continue
                assert isinstance(event, BlocksStaged)
                self.scheduler.saved(event.save_id)
        return seconds


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small random model."""
    path = tmp_path_factory.mktemp("models") / "llama-tiny"
    make_model(["--like", "llama-tiny", "--dtype", "fp32", "--out", str(path)])
    return path


@pytest.mark.covers("W05", "W01")
def test_steps_take_the_time_that_they_take_without_a_pool(model_dir: Path) -> None:
    """Ten times at most, and the whole work as well; how little it is, bench/kv_pool.py says."""

    async def measure(make_pool: Callable[[Node, list[Event]], KvPool]) -> tuple[list[float], float, Node]:
        node, events = Node(model_dir), list[Event]()
        kv_pool = make_pool(node, events)
        node.submit(Random(7))
        began_at = time.perf_counter()
        async with asyncio.timeout(PATIENCE_S):
            seconds = await node.run(kv_pool, events)
        return seconds, time.perf_counter() - began_at, node

    async def test() -> None:
        store, measures = SlowStore(), Measures()
        pools: list[KvPoolThreads] = []

        def slow(node: Node, events: list[Event]) -> KvPool:
            bounds = KvPoolBounds(staging_bytes=8 * node.memory.block_bytes)
            pools.append(KvPoolThreads(store, node.memory.bytes, bounds, events.append, measures))
            return pools[-1]

        try:
            turns: dict[str, list[float]] = {"with": [], "without": []}
            totals = {"with": 0.0, "without": 0.0}
            for _ in range(2):
                for name, make_pool in (("without", lambda _, events: NoKvPool(events.append)), ("with", slow)):
                    seconds, total, node = await measure(make_pool)
                    assert node.scheduler.num_preempted > 0
                    turns[name] += seconds
                    totals[name] += total
            assert len(turns["with"]) >= len(turns["without"]) > 100
            assert statistics.median(turns["with"]) <= 10 * statistics.median(turns["without"])
            assert totals["with"] <= 10 * totals["without"] + 0.2
            outcomes = measures.amounts()["kv_pool_saves"]
            assert outcomes["full"] > 0, "what did not fit was let go, and counted"
            assert store.num_asked > 0
        finally:
            store.let_go.set()
            for pool in pools:
                assert await pool.stop(PATIENCE_S)

    asyncio.run(test())
