"""Matching a prefix: as long as possible, and safe against the allocation that follows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.block_pool import BlockPool, BlockState
from engine.plan import BROKEN_ROW, NO_TOKEN, STALLED_ROW, SlotResult, StepResult
from engine.prefix_cache import PrefixCache
from proto.block_key import block_keys, seed_key
from tests.engine_pure.checked_node import SIZES, CheckedNode, make_spec, rows_of
from tests.thorough import examples

SEED = seed_key(b"prefix cache tests")
BLOCK_SIZE = 2


def cached_prefix(pool: BlockPool, token_ids: Sequence[int]) -> list[int]:
    """Leave the full blocks of a sequence in the cache."""
    keys = block_keys(SEED, token_ids, BLOCK_SIZE)
    block_ids = pool.allocate(len(keys))
    pool.publish(dict(zip(block_ids, keys, strict=True)))
    pool.free(block_ids)
    return block_ids


@pytest.mark.covers("P02")
@given(
    held=st.lists(st.lists(st.integers(0, 1), max_size=10), max_size=5),
    wanted=st.lists(st.integers(0, 1), max_size=12),
    max_blocks=st.integers(0, 6),
)
@settings(deadline=None, max_examples=examples(150, 3))
def test_a_match_is_the_longest_common_prefix_in_whole_blocks(
    held: list[list[int]], wanted: list[int], max_blocks: int
) -> None:
    pool = BlockPool(40, BLOCK_SIZE)
    for token_ids in held:
        cached_prefix(pool, token_ids)
    longest = 0
    while (longest + 1) * BLOCK_SIZE <= len(wanted) and any(
        len(token_ids) >= (longest + 1) * BLOCK_SIZE
        and token_ids[: (longest + 1) * BLOCK_SIZE] == wanted[: (longest + 1) * BLOCK_SIZE]
        for token_ids in held
    ):
        longest += 1
    keys = block_keys(SEED, wanted, BLOCK_SIZE)
    before = pool.snapshot()
    matched = PrefixCache(pool).match(keys, max_blocks)
    assert len(matched) == min(longest, max_blocks)
    assert [pool.find(key) for key in keys[: len(matched)]] == matched
    assert pool.snapshot() == before, "matching alone takes nothing"


@pytest.mark.covers("P02")
def test_acquiring_a_match_takes_one_reference_on_each_block_and_freeing_it_gives_them_back() -> None:
    pool = BlockPool(6, BLOCK_SIZE)
    block_ids = cached_prefix(pool, range(6))
    keys = block_keys(SEED, range(6), BLOCK_SIZE)
    before = pool.snapshot()
    first, second = PrefixCache(pool).acquire_match(keys, 3), PrefixCache(pool).acquire_match(keys, 2)
    assert (first, second) == (block_ids, block_ids[:2])
    assert pool.snapshot()["num_references"] == (2, 2, 1, 0, 0, 0)
    pool.free(first)
    pool.free(second)
    assert pool.snapshot() == before


@pytest.mark.covers("P02")
def test_a_match_ends_at_a_hole_though_a_later_block_is_still_cached() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    keys = block_keys(SEED, range(8), BLOCK_SIZE)
    for block_id, index in zip(pool.allocate(3), (0, 1, 3), strict=True):
        pool.publish({block_id: keys[index]})
    assert PrefixCache(pool).match(keys, 4) == [0, 1]


@pytest.mark.covers("S12")
def test_what_is_matched_is_never_evicted_by_the_allocation_behind_it() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    old, young = cached_prefix(pool, [1, 1, 1, 1]), cached_prefix(pool, [2, 2, 2, 2])
    matched = PrefixCache(pool).acquire_match(block_keys(SEED, [1, 1, 1, 1], BLOCK_SIZE), 2)
    assert matched == old, "the least recently used ones, next to be evicted"
    assert not pool.can_allocate(1, evict=False)
    assert sorted(pool.allocate(2)) == sorted(young)
    assert not pool.can_allocate(1)


@pytest.mark.covers("S12")
def test_a_match_stops_where_it_would_break_a_promise() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    block_ids = cached_prefix(pool, range(6))
    keys = block_keys(SEED, range(6), BLOCK_SIZE)
    pool.promise(2)
    matched = PrefixCache(pool).acquire_match(keys, 3)
    assert matched == block_ids[:2]
    assert pool.num_available == 0
    also = PrefixCache(pool).acquire_match(keys, 3)
    assert also == block_ids[:2], "blocks in use cost nobody anything"
    promised = pool.allocate(2, promised=True)
    states = pool.snapshot()["states"]
    assert states == (BlockState.USED,) * 4 and not set(promised) & set(matched)


def finish_of_next_step(node: CheckedNode, answered: int) -> str | None:
    """What becomes of the only sequence, if its row answers this."""
    plan = node.scheduler.plan()
    assert plan is not None
    (row,) = rows_of(plan)
    answer = SlotResult(row.slot, row.generation, answered)
    (progress,) = node.scheduler.complete(StepResult.of(plan.step_id, (answer,)))
    return progress.finish


@pytest.mark.covers("P02")
def test_what_was_forgotten_is_not_offered_again_by_who_had_found_it_before() -> None:
    """Where prompts that begin alike overlap, there would always be one that finds it, and breaks."""
    sizes = replace(SIZES, max_batched_tokens=8)
    node = CheckedNode(sizes)
    prompt = [1, 2, 3, 4, 5] * 4
    node.submit(make_spec("before", prompt, 1, sizes))
    node.run_to_the_end()
    longer = make_spec("b", [*prompt, *[5] * 14], 1, sizes)
    node.submit(make_spec("a", [*prompt, *[6] * 4], 1, sizes))
    node.submit(longer)
    plan = node.plan()
    assert plan is not None and [chunk.samples for chunk in plan.chunks] == [True, False]
    node.complete((0, BROKEN_ROW))
    assert node.aborted == {"a"} and not node.cache.match(longer.block_keys, 9)
    node.run_to_the_end()
    assert node.finished["b"] == "length"
    found = [node.pool.find(key) is not None for key in longer.block_keys]
    assert found == [False] * 5 + [True] * 3, "what it computed itself is found, by who has the beginning"


@pytest.mark.covers("P02")
@pytest.mark.parametrize(("answered", "finish"), [(BROKEN_ROW, "broken"), (STALLED_ROW, "stalled")])
def test_nobody_finds_the_blocks_behind_a_row_without_numbers(answered: int, finish: str) -> None:
    """Neither those that it matched nor those of its own earlier chunks: whoever found them would break as well, for ever."""
    node = CheckedNode(SIZES)
    prompt = [1, 2, 3, 4, 5] * 5
    keys = make_spec("s", prompt, 3, SIZES).block_keys
    node.submit(make_spec("before", prompt[:9], 1, SIZES))
    node.run_to_the_end()
    node.pool.key_log.switch(True)
    node.submit(make_spec("s", prompt, 3, SIZES))
    assert finish_of_next_step(node, NO_TOKEN) is None
    assert len(node.cache.match(keys, 6)) == 6
    assert finish_of_next_step(node, answered) == finish
    changes = [is_held for _, is_held in node.pool.key_log.since(0, 99) or ()]
    num_left = 0 if finish == "broken" else 6
    assert len(node.cache.match(keys, 6)) == num_left == node.pool.counts().cached
    assert changes == [True] * 4 + [False] * (6 - num_left) and node.is_idle(), "routers hear of it"
