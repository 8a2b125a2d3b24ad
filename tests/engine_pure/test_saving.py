"""What goes to the KV pool: whose blocks, when, and that keeping them for a moment costs nobody else anything."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from random import Random

import pytest

from engine.block_pool import BlockPool
from engine.plan import BROKEN_ROW, StepResult
from engine.saving import SaveRules
from engine.sequence import Phase
from proto.block_key import block_keys
from tests.engine_pure.checked_node import KEY_SEED, SIZES, CheckedNode, Sizes, make_spec, phase_of
from tests.engine_pure.test_pressure import node_with, until_marked

PREEMPTED = SaveRules(of_preempted=True)
FINISHED = SaveRules(of_finished=True)
# 16 blocks of 4: one sequence at its limit of 64 tokens fills the pool.
TIGHT = Sizes(num_blocks=16, num_slots=4, max_batched_tokens=64, policy="none", saves=PREEMPTED)


def keys_of(node: CheckedNode, name: str, num_tokens: int) -> tuple[bytes, ...]:
    known = [*node.specs[name].token_ids, *node.token_ids[name]]
    return tuple(block_keys(KEY_SEED, known[:num_tokens], node.sizes.block_size))


def given_way(sizes: Sizes = TIGHT) -> tuple[CheckedNode, int]:
    """A node of which "c" has just given way, and how many blocks it had."""
    node = node_with((16, 15, 14), sizes)
    until_marked(node)
    num_blocks = len(node.scheduler.block_ids("c"))
    while node.unread:
        node.complete()
    return node, num_blocks


@pytest.mark.covers("W01", "W09", "Q02")
def test_who_gives_way_is_saved_when_its_mark_is_answered_every_full_block_of_prompt_and_completion() -> None:
    node, _ = given_way()
    assert phase_of(node, "c") is Phase.WAITING
    num_final = 14 + len(node.token_ids["c"]) - 1  # the last token is never fed
    assert num_final > 16 and num_final % 4, "there is a completion block, and a tail that is not full"
    assert node.saved == [keys_of(node, "c", num_final)]


@pytest.mark.covers("W01", "S17")
def test_blocks_being_copied_count_as_coming_and_nobody_else_gives_way_for_the_same_need() -> None:
    node, num_blocks = given_way()
    (save,) = node.saves.values()
    num_freed = num_blocks - len(save.blocks)
    assert num_freed <= 1 and node.pool.num_available == num_freed, "only the tail is free at once"
    held = node.pool.lease(num_freed)  # somebody else was quicker
    for _ in range(8):  # the pool takes its time: who finds no block waits, whoever still has room goes on
        while len(node.unread) < 2 and node.plan() is not None:
            pass
        while node.unread:
            node.complete()
    assert node.plan() is None, "all wait for what is being copied"
    assert node.scheduler.num_preempted == 1 and len(node.saves) == 1
    assert {phase_of(node, name) for name in "ab"} == {Phase.RUNNING_DECODE}
    node.stage(save.save_id)
    assert node.plan() is not None, "and go on as soon as it is"
    node.pool.release_lease(held)
    for _ in range(8):
        node.run_to_the_end()
        for save_id in list(node.saves):
            node.stage(save_id)
    assert set(node.finished) == {"a", "b", "c"} and node.is_idle()


@pytest.mark.covers("S17")
@pytest.mark.parametrize("seed", range(20))
def test_what_becomes_available_is_counted_over_all_who_leave_and_all_that_is_kept(seed: int) -> None:
    """Branches share their prompt's blocks, and a save shares all of them: no single one's leaving frees any."""
    random, pool = Random(seed), BlockPool(8, 4)
    held = [[block_id] for block_id in pool.allocate(8)]
    for _ in range(random.randint(1, 6)):
        held.append(random.sample(range(8), random.randint(1, 8)))
        pool.acquire(held[-1])
    leaving = random.sample(held, random.randint(1, len(held)))
    expected = pool.num_freed_by(chain.from_iterable(leaving))
    for block_ids in leaving:
        pool.free(block_ids)
    assert pool.num_available == expected


@pytest.mark.covers("W01")
def test_while_blocks_are_being_copied_the_node_has_something_here() -> None:
    node = CheckedNode(replace(SIZES, saves=FINISHED))
    node.submit(make_spec("s", [1] * 9, 3, SIZES))
    node.run_to_the_end()
    shown = [(node.scheduler.has_sequences, node.scheduler.num_saves)]
    (save_id,) = node.saves
    node.stage(save_id)
    shown.append((node.scheduler.has_sequences, node.scheduler.num_saves))
    assert shown == [(True, 1), (False, 0)] and node.is_idle()
    with pytest.raises(KeyError):
        node.scheduler.saved(save_id)


@pytest.mark.covers("W01", "W09")
@pytest.mark.parametrize("max_new_tokens", range(1, 10))
def test_who_finishes_is_saved_where_it_is_asked_for(max_new_tokens: int) -> None:
    node = CheckedNode(replace(SIZES, saves=FINISHED))
    node.submit(make_spec("s", [1, 2, 3, 4, 5], max_new_tokens, SIZES))
    node.run_to_the_end()
    assert node.saved == [keys_of(node, "s", 5 + max_new_tokens - 1)], "the last token has no KV"


@pytest.mark.covers("W01", "H01")
def test_what_lends_its_blocks_is_saved_too_and_its_reader_keeps_them() -> None:
    node = CheckedNode(replace(SIZES, saves=FINISHED))
    node.submit(make_spec("s", [1] * 9, 1, SIZES, lends=True))
    node.run_to_the_end()
    (save_id,) = node.saves
    assert len(node.saves[save_id].blocks) == 2
    node.stage(save_id)
    assert node.pool.counts().used == 3
    assert node.scheduler.release("s") and node.is_idle()


@pytest.mark.covers("W04")
@pytest.mark.parametrize("saves", [SaveRules(), FINISHED])
def test_nothing_of_who_gives_way_is_saved_or_kept_where_it_is_not_asked_for(saves: SaveRules) -> None:
    node, num_blocks = given_way(replace(TIGHT, saves=saves))
    assert not node.saved and not node.scheduler.num_saves
    assert node.pool.num_available == num_blocks


@pytest.mark.covers("W04")
def test_nothing_of_who_finishes_is_saved_where_it_is_not_asked_for() -> None:
    node = CheckedNode(replace(SIZES, saves=PREEMPTED))
    node.submit(make_spec("s", [1] * 9, 3, SIZES))
    node.run_to_the_end()
    assert not node.saved and node.is_idle()


@pytest.mark.covers("W01", "D10")
def test_who_waits_for_another_node_is_saved_only_when_it_gives_that_up() -> None:
    node, _ = given_way(replace(TIGHT, resumes=False, keeps=True))
    assert node.paused == {"c": "preempted"} and not node.saved
    node.abandon("c")
    assert len(node.saved) == 1 and node.saved == node.to_save


@pytest.mark.covers("W01", "D10")
def test_nothing_is_saved_of_who_goes_to_another_node_or_is_wanted_no_more() -> None:
    node, _ = given_way(replace(TIGHT, resumes=False, keeps=True))
    node.abort("c")
    node.run_to_the_end()
    assert not node.saved and not node.scheduler.num_saves


@pytest.mark.covers("W01", "H05")
def test_a_link_that_still_reads_what_is_given_up_keeps_it_beside_the_save() -> None:
    node, _ = given_way(replace(TIGHT, resumes=False, keeps=True))
    node.scheduler.lend("c")
    block_ids = node.scheduler.block_ids("c")
    node.abandon("c")
    (save_id,) = node.saves
    node.stage(save_id)
    assert node.pool.num_freed_by(block_ids) == len(block_ids), "in use, by the link alone"
    assert node.scheduler.release("c")
    assert node.pool.num_available == len(block_ids)


@pytest.mark.covers("W01")
def test_the_plan_with_the_mark_names_what_will_be_saved_and_what_finished_is_named_by_the_next_plan() -> None:
    """A device with memory of its own copies what a plan names to where the saving reads, before it answers."""
    node = node_with((16, 15, 14), TIGHT)
    plan = until_marked(node)
    while node.unread:
        node.complete()
    (save,) = node.saves.values()
    assert [block_id for _, block_id in save.blocks] == list(plan.leaving_block_ids)
    node = CheckedNode(replace(SIZES, saves=FINISHED))
    node.submit(make_spec("s", [1] * 9, 1, SIZES))
    node.plan()
    node.complete()
    assert node.finished and not node.saves
    naming = node.plan()
    assert naming is not None and naming.num_tokens == 0 and not node.saves
    node.complete()
    (save,) = node.saves.values()
    assert [block_id for _, block_id in save.blocks] == list(naming.leaving_block_ids)


@pytest.mark.covers("W01", "Q05")
def test_nothing_is_saved_of_who_ended_because_its_numbers_are_none() -> None:
    node = CheckedNode(replace(SIZES, saves=SaveRules(True, True)))
    node.scheduler.submit(make_spec("s", [1] * 9, 3, SIZES))
    plan = node.scheduler.plan()
    assert plan is not None
    first, *others = node.runner.run(plan)
    answers = [first._replace(token_id=BROKEN_ROW), *others]
    assert [item.finish for item in node.scheduler.complete(StepResult.of(plan.step_id, answers))] == ["broken"]
    while (plan := node.scheduler.plan()) is not None:
        node.scheduler.complete(node.runner.run(plan))
    assert not node.scheduler.take_saves() and node.is_idle()


@pytest.mark.covers("W08", "W01")
@pytest.mark.parametrize("is_named", [False, True])
def test_what_finished_is_not_saved_any_more_when_its_blocks_break_another_before_they_are_handed_out(
    is_named: bool,
) -> None:
    node = CheckedNode(replace(SIZES, saves=SaveRules(of_finished=True, takes_out_broken=True)))
    node.submit(make_spec("first", [1] * 9, 1, SIZES))
    node.plan()
    node.complete()
    assert node.finished and node.scheduler.num_saves == 1
    if is_named:
        naming = node.scheduler.plan()
        assert naming is not None and len(naming.leaving_block_ids) == 2
        node.scheduler.complete(node.runner.run(naming))
    second = make_spec("second", [*[1] * 8, *[2] * 4], 2, SIZES)
    node.scheduler.submit(second)
    plan = node.scheduler.plan()
    assert plan is not None and plan.chunks[0].start == 8, "the first one's blocks are found"
    answers = [row._replace(token_id=BROKEN_ROW) for row in node.runner.run(plan)]
    assert [item.finish for item in node.scheduler.complete(StepResult.of(plan.step_id, answers))] == ["broken"]
    (save,) = node.scheduler.take_saves()
    assert not save.blocks and node.scheduler.take_broken() == tuple(second.block_keys[:2])
    node.scheduler.saved(save.save_id)
    assert node.is_idle()


@pytest.mark.covers("Q07", "W01")
def test_without_cache_generated_only_the_prompts_blocks_are_saved() -> None:
    node, _ = given_way(replace(TIGHT, cache_generated=False))
    assert node.saved == [keys_of(node, "c", 14)]


@pytest.mark.covers("Q07")
@pytest.mark.parametrize("cache_generated", [True, False])
def test_generated_tokens_are_cached_by_who_decodes_never_by_who_computes_a_prompt(cache_generated: bool) -> None:
    """Of a retried attempt: 8 tokens of prompt, 8 that an earlier attempt generated."""
    sizes = replace(SIZES, cache_generated=cache_generated)
    prompt = make_spec("s", [1, 2, 3, 4] * 4, 1, sizes, num_generated=8)
    node = CheckedNode(sizes)
    node.submit(prompt)
    node.run_to_the_end()
    assert len(node.cache.match(prompt.block_keys, 4)) == 2, "what a prefill node does"
    node = CheckedNode(sizes)
    node.submit(replace(prompt, max_new_tokens=6))
    found: list[int] = []
    while node.plan() is not None:
        node.complete()
        found.append(len(node.cache.match(prompt.block_keys, 4)))
    assert found == ([2, 2, 2, 2, 4, 4] if cache_generated else [2] * 6), "with the block that decoding fills"


@pytest.mark.covers("Q07")
@pytest.mark.parametrize(("cache_generated", "num_found"), [(True, 4), (False, 2)])
def test_of_a_sequence_that_was_handed_over_generated_tokens_are_cached_at_once_if_at_all(
    cache_generated: bool, num_found: int
) -> None:
    """The second branch shares the first one's blocks, and offers only what is behind them."""
    node = CheckedNode(replace(SIZES, cache_generated=cache_generated, saves=PREEMPTED))
    spec = make_spec("x", [1, 2, 3, 4] * 4 + [5], 6, node.sizes, num_generated=9)
    blocks = node.pool.allocate(4)
    kv = node.memory[:, : 4 * node.sizes.block_size].view("<i4")
    kv[blocks] = [2, 3, 4, 5]
    node.pool.acquire(blocks)
    assert node.scheduler.reserve_slots(2)
    for name, num_published in (("x", 0), ("y", 4)):
        named = replace(spec, sequence_id=name)
        node._remember(named)
        node.pool.promise(2)
        node.scheduler.adopt(named, [*blocks], 2, num_published)
    assert len(node.cache.match(spec.block_keys, 4)) == num_found
