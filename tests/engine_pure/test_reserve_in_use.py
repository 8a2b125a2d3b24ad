"""The scheduler has its reserve follow what happens: the formulas of test_reserve.py, with real preemptions and steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.block_pool import BlockPool
from engine.reserve import FIXED_BLOCKS, FIXED_DECAY, MARGIN_BLOCKS, ReserveConfig, ReservePolicy
from engine.scheduler import Scheduler, SchedulerConfig
from tests.engine_pure.checked_node import KEY_SEED, CheckedNode, Sizes, make_spec

SIZES = Sizes(num_blocks=256, num_slots=4, max_batched_tokens=64, max_model_len=512)
LIMITS = {"a": 400, "b": 300, "c": 200}  # large beside the margin: the ratio is not capped
CONFIG = ReserveConfig("ratio")
DECAY = (CONFIG.init_ratio - CONFIG.min_ratio) / CONFIG.decay_steps


def reserve_of(node: CheckedNode) -> float:
    value = node.scheduler.snapshot()["reserve"]
    assert isinstance(value, float)
    return value


def running(policy: ReservePolicy) -> CheckedNode:
    """A node on which three sequences have said ten tokens and more."""
    node = CheckedNode(replace(SIZES, policy=policy))
    for length, (name, limit) in enumerate(LIMITS.items(), 8):  # no two need their next blocks in one step
        node.submit(make_spec(name, [ord(name) % 7] * length, limit, node.sizes))
    while min(map(len, node.token_ids.values())) < 10:
        step(node)
    return node


def step(node: CheckedNode) -> bool:
    """Plan and read one; whether somebody gave way."""
    plan = node.plan()
    assert plan is not None
    node.complete()
    return bool(plan.marks)


def until_one_gives_way(node: CheckedNode) -> dict[str, int]:
    """How much each had said before the step in which somebody did, since somebody outside takes all the blocks."""
    node.pool.lease(node.pool.num_available)
    while True:
        said = {str(name): len(tokens) for name, tokens in node.token_ids.items()}
        if step(node):
            return said


@pytest.mark.covers("S03", "S04")
def test_the_ratio_is_taken_from_what_runs_when_somebody_gives_way_and_falls_with_every_step_before_and_after() -> None:
    node = running("ratio")
    before = reserve_of(node)
    step(node)
    assert reserve_of(node) == pytest.approx(before - DECAY)
    assert before < CONFIG.init_ratio - 9 * DECAY
    said = until_one_gives_way(node)
    margin = MARGIN_BLOCKS * SIZES.block_size * len(LIMITS)
    taken = (sum(said.values()) + margin) / (sum(LIMITS.values()) + 1)
    assert CONFIG.min_ratio + DECAY < taken < CONFIG.init_ratio
    assert reserve_of(node) == pytest.approx(taken - DECAY, abs=1e-9)
    for number in range(2, 4):  # no more than the blocks that came back are good for
        assert not step(node)
        assert reserve_of(node) == pytest.approx(taken - number * DECAY, abs=1e-9)


@pytest.mark.covers("S05")
def test_who_gave_no_max_tokens_is_left_no_more_than_the_clip_and_others_find_room() -> None:
    """The router gives them all that their prompts leave (tests/router/test_api.py), which is all the pool has."""
    sizes = replace(SIZES, num_blocks=1024, max_model_len=4096, policy="ratio")
    admitted = {}
    for clip in (CONFIG.clip_max_new_tokens, 16):
        pool = BlockPool(sizes.num_blocks, sizes.block_size)
        reserve = replace(CONFIG, clip_max_new_tokens=clip)
        scheduler = Scheduler(SchedulerConfig(4, 64, sizes.max_model_len, reserve=reserve), pool, KEY_SEED)
        for number in range(4):
            prompt = [number + 1] * 8
            scheduler.submit(make_spec(number, prompt, sizes.max_model_len - len(prompt), sizes))
        scheduler.plan()
        admitted[clip] = scheduler.num_running
    assert admitted == {CONFIG.clip_max_new_tokens: 1, 16: 4}, "alone it needs no reserve"


@pytest.mark.covers("S06")
def test_the_fixed_policy_begins_when_somebody_gives_way_and_leaves_less_with_every_step() -> None:
    node = running("fixed")
    assert reserve_of(node) == 0
    until_one_gives_way(node)
    for number in range(1, 4):
        assert reserve_of(node) == pytest.approx(FIXED_BLOCKS - number * FIXED_DECAY)
        assert not step(node)
