"""The scheduler's rules, one sentence each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.block_pool import BlockCounts, BlockPool
from engine.plan import BROKEN_ROW, NO_TOKEN, STALLED_ROW, SlotResult, StepResult
from engine.scheduler import Scheduler, SchedulerConfig
from engine.sequence import Phase
from proto.block_key import block_keys
from tests.engine_pure.checked_node import KEY_SEED, SIZES, CheckedNode, make_spec, phase_of, right_answer


@pytest.mark.covers("P01")
def test_several_prompts_share_a_step_in_chunks_within_the_budget() -> None:
    node = CheckedNode(SIZES)
    for sequence_id, num_tokens in (("a", 6), ("b", 21), ("c", 5)):
        node.submit(make_spec(sequence_id, [num_tokens % 7] * num_tokens, 1, SIZES))
    shapes = []
    while (plan := node.plan()) is not None:
        shapes.append([(chunk.start, len(chunk.token_ids), chunk.samples) for chunk in plan.chunks])
    assert shapes == [[(0, 6, True), (0, 10, False)], [(10, 11, True), (0, 5, True)]]
    node.run_to_the_end()
    assert node.finished == {"a": "length", "b": "length", "c": "length"}


@pytest.mark.covers("S14")
def test_what_decodes_need_is_taken_from_the_budget_first() -> None:
    sizes = replace(SIZES, max_batched_tokens=4)
    node = CheckedNode(sizes)
    for sequence_id in range(3):
        node.submit(make_spec(sequence_id, [sequence_id], 20, sizes))
    node.plan()
    node.submit(make_spec("long", [5] * 30, 2, sizes))
    for start in range(3):
        plan = node.plan()
        assert plan is not None and plan.num_tokens == 4
        assert len(plan.decodes) == 3
        assert [(chunk.start, len(chunk.token_ids)) for chunk in plan.chunks] == [(start, 1)]
    node.run_to_the_end()
    assert node.is_idle()


@pytest.mark.covers("S14")
def test_prompts_have_a_smaller_budget_in_steps_that_decode_and_all_of_it_in_the_others() -> None:
    sizes = replace(SIZES, max_beside_decodes=3)
    node = CheckedNode(sizes)
    node.submit(make_spec("a", [1] * 20, 3, sizes))
    node.submit(make_spec("b", [2] * 20, 2, sizes))
    shapes = []
    while (plan := node.plan()) is not None:
        shapes.append((len(plan.decodes), [len(chunk.token_ids) for chunk in plan.chunks]))
    assert shapes == [(0, [16]), (0, [4, 12]), (1, [3]), (1, [3]), (0, [2]), (1, [])]
    node.run_to_the_end()
    assert node.finished == {"a": "length", "b": "length"}


def test_no_budget_at_all_for_prompts_beside_decodes_is_refused() -> None:
    with pytest.raises(ValueError, match="beside decodes"):
        SchedulerConfig(4, 8, 64, max_prompt_tokens_beside_decodes=0)


@pytest.mark.covers("S14")
@pytest.mark.parametrize(("num_slots", "max_batched_tokens"), [(0, 8), (8, 7)])
def test_a_budget_that_cannot_feed_every_slot_is_refused(num_slots: int, max_batched_tokens: int) -> None:
    with pytest.raises(ValueError, match="slots"):
        SchedulerConfig(num_slots, max_batched_tokens, 64)


def test_a_pool_that_cannot_hold_one_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="max_model_len = 65"):
        Scheduler(SchedulerConfig(1, 8, 65), BlockPool(16, 4), KEY_SEED)


@pytest.mark.covers("P02")
def test_a_prefix_hit_saves_compute_and_blocks() -> None:
    node = CheckedNode(SIZES)
    prompt = [1, 2, 3, 4, 5] * 5
    node.submit(make_spec("first", prompt, 3, SIZES))
    node.run_to_the_end()
    node.submit(make_spec("held", prompt, 3, SIZES))
    node.plan()
    used = node.pool.counts().used
    node.submit(make_spec("second", prompt, 3, SIZES))
    plan = node.plan()
    assert plan is not None
    assert [(chunk.start, chunk.token_ids) for chunk in plan.chunks] == [(24, (5,))]
    assert node.scheduler.block_ids("second")[:6] == node.scheduler.block_ids("held")[:6]
    assert node.pool.counts().used == used + 1
    node.run_to_the_end()
    assert node.is_idle()


@pytest.mark.covers("P02")
@pytest.mark.parametrize("num_tokens", [4, 8, 12])
def test_at_least_the_last_token_is_computed_though_all_blocks_are_cached(num_tokens: int) -> None:
    node = CheckedNode(SIZES)
    for sequence_id in ("first", "second"):
        node.submit(make_spec(sequence_id, list(range(num_tokens)), 1, SIZES))
        plan = node.plan()
        node.run_to_the_end()
    assert plan is not None
    assert [(chunk.start, chunk.samples) for chunk in plan.chunks] == [(num_tokens - 4, True)]
    assert node.finished["second"] == "length"


@pytest.mark.covers("P02", "S12")
def test_an_admission_that_fails_behind_a_match_returns_every_reference_and_evicts_nothing() -> None:
    sizes = replace(SIZES, num_blocks=8, max_model_len=32)
    node = CheckedNode(sizes)
    prompt = list(range(1, 7)) * 2
    node.submit(make_spec("leaves a prefix", prompt, 1, sizes))
    node.run_to_the_end()
    node.submit(make_spec("in the way", [0] * 13, 4, sizes))
    node.plan()
    before = node.pool.snapshot()
    node.submit(make_spec("matches three blocks, needs five", [*prompt, 0], 8, sizes))
    node.scheduler.plan()  # one decode row at most: the waiting one does not fit
    assert node.scheduler.num_waiting == 1
    assert node.pool.snapshot() == before
    assert node.pool.counts().cached == 3


@pytest.mark.covers("S12")
def test_with_a_full_pool_a_match_never_eats_itself() -> None:
    sizes = replace(SIZES, num_blocks=8, max_model_len=32)
    node = CheckedNode(sizes)
    prompt = list(range(16))
    for sequence_id, token_ids in (("prefix", prompt), ("other", [9] * 16)):  # 4 blocks each, "prefix" older
        node.submit(make_spec(sequence_id, token_ids, 1, sizes))
        node.run_to_the_end()
    assert node.pool.counts() == BlockCounts(free=0, cached=8, used=0, leased=0, quarantined=0)
    node.submit(make_spec("again", [*prompt, 5], 15, sizes))
    plan = node.plan()
    assert plan is not None and plan.num_tokens == 1, "the four oldest blocks are matched; the others are evicted"
    node.run_to_the_end()
    assert node.finished["again"] == "length"
    assert node.is_idle()


def test_the_head_that_does_not_fit_blocks_those_behind_it() -> None:
    sizes = replace(SIZES, num_blocks=8, max_model_len=32)
    node = CheckedNode(sizes)
    for sequence_id, max_new_tokens in (("running", 17), ("big", 17), ("small", 1)):
        node.submit(make_spec(sequence_id, [3, 4], max_new_tokens, sizes))
    order = []
    while "small" not in node.finished:
        plan = node.plan()
        assert plan is not None
        order += [len(plan.starts)] if plan.starts else []
        assert (phase_of(node, "big") is Phase.WAITING) <= (phase_of(node, "small") is Phase.WAITING)
        node.complete()
    node.run_to_the_end()
    assert order == [1, 2], "the small one starts with the big one, though it would have fitted before"


def test_nothing_is_ever_preempted() -> None:
    """More work than blocks: who was admitted keeps slot and blocks to the end, and never waits for either."""
    sizes = replace(SIZES, num_blocks=16, num_slots=8, max_batched_tokens=8)
    node = CheckedNode(sizes)
    for sequence_id in range(12):
        node.submit(
            make_spec(sequence_id, [sequence_id % 7] * (3 + 5 * (sequence_id % 3)), 14, sizes, seed=sequence_id)
        )
    num_starts = 0
    rows_due: set[int] = set()  # slots of those that decode and have tokens left
    remaining: dict[int, int] = {}
    while (plan := node.plan()) is not None or node.unread:
        if plan is not None:
            num_starts += len(plan.starts)
            assert rows_due <= {row.slot for row in plan.decodes}, "a decode is never left out of a step"
            for row in plan.decodes:
                remaining[row.slot] -= 1
            remaining |= {chunk.slot: 13 for chunk in plan.chunks if chunk.samples}
            rows_due = {slot for slot, left in remaining.items() if left > 0}
        if plan is None or len(node.unread) == 2:
            node.complete()  # CheckedNode sees that phases go forward only and rows continue where the last ended
    assert num_starts == 12, "each sequence starts once"
    assert len(node.finished) == 12
    assert node.is_idle()


@pytest.mark.covers("Q08")
@pytest.mark.parametrize("how", ["stop token", "abort"])
def test_blocks_and_slot_are_free_only_when_the_last_step_launched_with_the_sequence_was_read(how: str) -> None:
    sizes = replace(SIZES, num_slots=1)
    node = CheckedNode(sizes)
    spec = make_spec("a", [1, 2, 3], 9, sizes)
    if how == "stop token":
        spec = replace(spec, stop_token_ids=frozenset(right_answer(spec, sizes.vocab_size)[:1]))
    node.submit(spec)
    for _ in range(3):
        node.plan()  # the prompt, then two rows that a stop makes surplus
    if how == "abort":
        node.abort("a")
    for _ in range(2):
        progress = node.complete()
        assert [item.finish for item in progress] in ([], ["stop"])
        assert phase_of(node, "a") is Phase.FINISHED
        assert node.scheduler.num_free_slots == 0 and node.pool.counts().used == 2
        assert node.pool.num_promised == 0, "it will grow no more"
        assert node.plan() is None
    assert node.complete() == []
    assert node.is_idle()


@pytest.mark.covers("Q08")
def test_an_abort_between_steps_frees_at_once() -> None:
    node = CheckedNode(SIZES)
    node.submit(make_spec("a", [1, 2, 3], 9, SIZES))
    node.submit(make_spec("waiting", [1, 2, 3], 9, SIZES))
    node.abort("waiting")
    node.plan()
    node.complete()
    node.abort("a")
    assert node.is_idle()
    assert not node.scheduler.abort("a")
    assert not node.scheduler.abort("never seen")


@pytest.mark.covers("Q05")
def test_a_result_of_an_old_generation_is_ignored() -> None:
    sizes = replace(SIZES, num_slots=1)
    node = CheckedNode(sizes)
    for sequence_id in ("a", "b"):
        node.submit(make_spec(sequence_id, [1, 2, 3], 1, sizes))
    node.plan()
    node.complete()
    plan = node.plan()
    assert plan is not None and plan.starts[0].slot == 0 and plan.starts[0].generation == 2
    assert not node.scheduler.complete(StepResult.of(plan.step_id, (SlotResult(0, 1, 4),)))
    assert "b" not in node.finished
    assert phase_of(node, "b") is Phase.RUNNING_PREFILL


@pytest.mark.covers("Q05")
def test_a_decode_rows_result_of_an_old_generation_is_ignored() -> None:
    node = CheckedNode(replace(SIZES, num_slots=1))
    for sequence_id in ("a", "b"):
        node.submit(make_spec(sequence_id, [1, 2, 3], 5, node.sizes))
    while node.plan() is not None:
        node.complete()
        if "a" in node.finished and node.token_ids["b"]:
            break
    plan = node.scheduler.plan()
    assert plan is not None and [row.generation for row in plan.decodes] == [2]
    assert not node.scheduler.complete(StepResult.of(plan.step_id, (SlotResult(0, 1, 4),)))


def test_results_that_are_not_those_of_the_oldest_step_are_a_bug() -> None:
    node = CheckedNode(SIZES)
    node.submit(make_spec("a", [1, 2, 3], 2, SIZES))
    scheduler = node.scheduler
    assert scheduler.plan() is not None and scheduler.plan() is not None
    for result, why in (
        (StepResult.of(1, (SlotResult(0, 1, 4),)), "out of order"),
        (StepResult.of(0, ()), "not those of its rows"),
        (StepResult.of(0, (SlotResult(1, 1, 4),)), "not those of its rows"),
    ):
        with pytest.raises(ValueError, match=why):
            scheduler.complete(result)
    with pytest.raises(ValueError, match="answered -1"):
        scheduler.complete(StepResult.of(0, (SlotResult(0, 1, NO_TOKEN),)))


@pytest.mark.covers("Q03")
def test_token_id_0_is_a_token_like_any_other() -> None:
    sizes = replace(SIZES, vocab_size=1)
    node = CheckedNode(sizes)
    node.submit(make_spec("zeros", [0] * 9, 11, sizes))
    node.submit(make_spec("stops at 0", [0] * 9, 11, sizes, stop_token_ids=frozenset({0})))
    node.run_to_the_end()
    assert node.token_ids == {"zeros": [0] * 11, "stops at 0": [0]}
    assert node.finished == {"zeros": "length", "stops at 0": "stop"}


def test_a_sequence_that_samples_one_token_is_never_decoded() -> None:
    node = CheckedNode(SIZES)
    node.submit(make_spec("a", [1] * 20, 1, SIZES))
    plans = [node.plan() for _ in range(4)]
    assert [plan is None or len(plan.decodes) for plan in plans] == [0, 0, True, True]


@pytest.mark.parametrize("cache_generated", [True, False])
def test_generated_blocks_are_published_when_read_if_at_all(cache_generated: bool) -> None:
    sizes = replace(SIZES, cache_generated=cache_generated)
    node = CheckedNode(sizes)
    spec = make_spec("a", [1, 2, 3], 6, sizes)
    keys = block_keys(KEY_SEED, [1, 2, 3, *right_answer(spec, sizes.vocab_size)], sizes.block_size)
    assert len(keys) == 2  # 9 tokens, of which the last is never fed
    node.submit(spec)
    found = []
    for _ in range(6):
        node.plan()
        found.append(sum(node.pool.find(key) is not None for key in keys))
        node.complete()
    found.append(sum(node.pool.find(key) is not None for key in keys))
    assert found == ([0, 0, 1, 1, 1, 1, 2] if cache_generated else [0] * 7)


@pytest.mark.covers("P02")
def test_the_next_turn_of_a_conversation_finds_the_blocks_that_the_turns_before_it_generated() -> None:
    node = CheckedNode(SIZES)
    token_ids = [1, 2, 3]
    matched = []
    for turn in range(4):
        spec = make_spec(turn, token_ids, 10, SIZES)
        node.submit(spec)
        plan = node.plan()
        assert plan is not None
        matched.append(plan.chunks[0].start)
        node.run_to_the_end()
        token_ids = [*token_ids, *node.token_ids[turn]]
    assert matched == [0, 12, 20, 32]  # of 3, 13, 23 and 33 tokens; the last one generated has no KV


def test_what_can_never_run_is_refused_at_the_door() -> None:
    node = CheckedNode(SIZES)
    node.submit(make_spec("longest", [1] * 60, 4, SIZES))
    for spec, why in (
        (make_spec("a", [1] * 60, 5, SIZES), "longer than max_model_len = 64"),
        (make_spec("longest", [1], 1, SIZES), "is here already"),
        (replace(make_spec("a", [1] * 3, 1, SIZES), block_keys=(b"key",)), "1 block keys for 3 tokens"),
    ):
        with pytest.raises(ValueError, match=why):
            node.submit(spec)
    for token_ids, num_generated, max_new_tokens in (([], 0, 1), ([1], 0, 0), ([1], 2, 1)):
        with pytest.raises(ValueError, match="sequence a"):
            make_spec("a", token_ids, max_new_tokens, SIZES, num_generated=num_generated)
    node.run_to_the_end()
    assert node.finished == {"longest": "length"}


@pytest.mark.covers("Q08", "A14")
@pytest.mark.parametrize(("answered", "finish"), [(BROKEN_ROW, "broken"), (STALLED_ROW, "stalled")])
def test_a_row_that_gives_none_ends_its_sequence_without_a_token_and_is_not_cached(answered: int, finish: str) -> None:
    node = CheckedNode(SIZES)
    node.submit(make_spec("a", [1, 2, 3, 4, 5], 9, SIZES))
    plan = node.scheduler.plan()
    assert plan is not None
    (chunk,) = plan.chunks
    answer = StepResult.of(plan.step_id, (SlotResult(chunk.slot, chunk.generation, answered),))
    (progress,) = node.scheduler.complete(answer)
    assert (progress.token_id, progress.finish) == (None, finish)
    assert node.pool.counts() == BlockCounts(free=SIZES.num_blocks, cached=0, used=0, leased=0, quarantined=0)


@pytest.mark.covers("P09")
@pytest.mark.parametrize("is_broken", [False, True])
def test_what_an_aborted_prompt_had_launched_is_found_by_the_next_unless_it_is_broken(is_broken: bool) -> None:
    node = CheckedNode(SIZES)
    prompt = [1, 2, 3] * 10
    node.submit(make_spec("refused", prompt, 2, SIZES))
    plan = node.plan()
    assert plan is not None and len(plan.chunks[0].token_ids) == SIZES.max_batched_tokens
    node.abort("refused")
    answers = tuple(
        SlotResult(chunk.slot, chunk.generation, BROKEN_ROW if is_broken else NO_TOKEN) for chunk in plan.chunks
    )
    assert not node.scheduler.complete(StepResult.of(plan.step_id, answers))
    node.scheduler.submit(make_spec("again", prompt, 2, SIZES))
    again = node.scheduler.plan()
    assert again is not None and again.chunks[0].start == (0 if is_broken else SIZES.max_batched_tokens)
