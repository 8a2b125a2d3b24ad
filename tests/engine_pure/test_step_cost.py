"""What a step of the scheduler does not do for every sequence: the counts behind bench/scheduler.py's times."""

from __future__ import annotations

import sys
import time
from collections import Counter
from types import CodeType, FrameType

import numpy as np
import pytest

from engine.block_pool import BlockPool
from engine.plan import NO_TOKEN, Plan, SamplingParams, SlotResult, StepResult
from engine.reserve import ReserveConfig, ReservePolicy
from engine.scheduler import Scheduler, SchedulerConfig
from engine.sequence import Phase, SequenceSpec
from proto.block_key import block_keys
from tests.engine_pure.checked_node import KEY_SEED

BLOCK_SIZE = 16


def answers(plan: Plan) -> StepResult:
    """Token 5 for every row that samples."""
    rows = [SlotResult(row.slot, row.generation, 5) for row in plan.decodes]
    rows += [SlotResult(chunk.slot, chunk.generation, 5 if chunk.samples else NO_TOKEN) for chunk in plan.chunks]
    return StepResult.of(plan.step_id, rows)


def decoding(num_sequences: int, policy: ReservePolicy = "ratio", num_waiting: int = 1) -> Scheduler:
    """So many sequences that decode, all of them at the begin of a block; no slot is left for those that wait."""
    pool = BlockPool(num_sequences * 16, BLOCK_SIZE)
    config = SchedulerConfig(num_sequences, 4 * BLOCK_SIZE * num_sequences, 256, reserve=ReserveConfig(policy))
    scheduler = Scheduler(config, pool, KEY_SEED)
    for name in range(num_sequences + num_waiting):
        prompt = tuple(np.random.default_rng(name).integers(1000, size=BLOCK_SIZE).tolist())
        scheduler.submit(SequenceSpec(name, prompt, 0, SamplingParams(0.0, 0), 200, frozenset({3}), ()))
    for _ in range(2):  # the prompts, then the first row behind them
        step(scheduler)
    assert scheduler.num_in(Phase.RUNNING_DECODE) == num_sequences and scheduler.num_waiting == num_waiting
    return scheduler


def step(scheduler: Scheduler) -> None:
    plan = scheduler.plan()
    assert plan is not None
    scheduler.complete(answers(plan))


def calls_of(scheduler: Scheduler, num_steps: int = 1) -> Counter[str]:
    """Calls of Python functions that these steps' plan() and complete() made, by the functions' names."""
    codes: Counter[CodeType] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            codes[frame.f_code] += 1

    for _ in range(num_steps):
        sys.setprofile(note)
        plan = scheduler.plan()
        sys.setprofile(None)
        assert plan is not None
        result = answers(plan)
        sys.setprofile(note)
        scheduler.complete(result)
        sys.setprofile(None)
    names: Counter[str] = Counter()
    for code, number in codes.items():
        names[code.co_qualname] += number
    return names


@pytest.mark.parametrize("policy", ["full", "ratio", "fixed", "none"])
def test_a_step_in_which_nobody_needs_a_block_or_ends_calls_nothing_for_each_sequence(policy: ReservePolicy) -> None:
    few, many = calls_of(decoding(4, policy)), calls_of(decoding(64, policy))
    assert many == few
    assert not {"BlockPool.allocate", "BlockPool.publish", "Room.grow", "Scheduler._read"} & many.keys()


@pytest.mark.parametrize("policy", ["full", "ratio"])
def test_blocks_are_allocated_and_published_for_all_rows_at_once(policy: ReservePolicy) -> None:
    calls = calls_of(decoding(64, policy), BLOCK_SIZE)
    assert calls["Sequence.next_key"] == 64 and calls["BlockPool.publish"] == 1
    assert calls["BlockPool.allocate"] <= 2 * BLOCK_SIZE and calls["Room.grow"] == calls["Scheduler._read"] == 0


def calls_of_a_life(num_blocks: int) -> Counter[str]:
    """From a prompt of so many blocks to its end, in a pool that has to evict as many for it."""
    pool = BlockPool(num_blocks + 1, BLOCK_SIZE)
    scheduler = Scheduler(SchedulerConfig(1, 4096, BLOCK_SIZE * (num_blocks + 1)), pool, KEY_SEED)
    for name in range(2):
        prompt = (name,) * (num_blocks * BLOCK_SIZE)
        keys = tuple(block_keys(KEY_SEED, prompt, BLOCK_SIZE))
        scheduler.submit(SequenceSpec(name, prompt, 0, SamplingParams(0.0, 0), 2, frozenset(), keys))
        calls = calls_of(scheduler, 2)
        assert not scheduler.has_sequences and pool.counts().cached == num_blocks
    return calls


def test_a_sequence_that_comes_and_goes_asks_the_pool_as_often_with_many_blocks_as_with_few() -> None:
    assert calls_of_a_life(64) == calls_of_a_life(4)


@pytest.mark.parametrize("num_waiting", [1, 500])
def test_those_that_wait_are_not_looked_at(num_waiting: int) -> None:
    assert calls_of(decoding(8, num_waiting=num_waiting)) == calls_of(decoding(8, num_waiting=2))


def test_a_step_of_256_slots_takes_at_most_ten_times_what_it_should() -> None:
    scheduler = decoding(256)
    seconds = []
    for _ in range(12):
        plan_begin = time.thread_time()
        plan = scheduler.plan()
        plan_s = time.thread_time() - plan_begin
        assert plan is not None
        result = answers(plan)
        begin = time.thread_time()
        scheduler.complete(result)
        seconds.append(plan_s + time.thread_time() - begin)
    assert min(seconds) < 10 * 200e-6
