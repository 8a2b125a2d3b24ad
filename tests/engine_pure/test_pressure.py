"""Short of blocks: who gives way, who waits, who is admitted, and when anything may be used again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from random import Random

import pytest

from engine.plan import NO_TOKEN, PREEMPTED_TOKEN_ID, Plan, SlotResult, StepResult
from engine.reserve import ReservePolicy
from engine.sequence import Phase
from tests.engine_pure.checked_node import CheckedNode, Sizes, make_spec, phase_of, right_answer
from tests.thorough import only_thorough

# 16 blocks of 4: one sequence at its limit of 64 tokens fills the pool.
TIGHT = Sizes(num_blocks=16, num_slots=4, max_batched_tokens=64, policy="none")


def node_with(lengths: Iterable[int], sizes: Sizes = TIGHT, max_new_tokens: int = 32) -> CheckedNode:
    """Sequences a, b, c … with prompts of these lengths, all admitted and past their prompts."""
    node = CheckedNode(sizes)
    for name, length in zip("abcdef", lengths, strict=False):
        node.submit(make_spec(name, [ord(name) % 7] * length, max_new_tokens, sizes))
    return node


def until_marked(node: CheckedNode) -> Plan:
    """Plan and read in turn until a plan has a mark."""
    while True:
        plan = node.plan()
        assert plan is not None, "nothing gives way"
        if plan.marks:
            return plan
        node.complete()


def owner_of(node: CheckedNode, slot: int) -> object:
    slots = node.scheduler.snapshot()["slots"]
    assert isinstance(slots, tuple)
    return slots[slot]


@pytest.mark.covers("S01", "S17", "Q02", "S10")
def test_the_youngest_gives_way_keeps_all_it_said_and_is_first_in_line() -> None:
    node = node_with((16, 16, 16), replace(TIGHT, num_slots=3))
    node.submit(make_spec("later", [1], 2, TIGHT))
    plan = until_marked(node)
    assert [owner_of(node, mark.slot) for mark in plan.marks] == ["c"]
    assert phase_of(node, "c") is Phase.PREEMPTING
    blocks = node.scheduler.block_ids("c")
    node.complete()
    assert phase_of(node, "c") is Phase.WAITING and not node.scheduler.block_ids("c")
    assert blocks
    phases = node.scheduler.snapshot()["phases"]
    assert isinstance(phases, dict)
    assert [name for name, phase in phases.items() if phase is Phase.WAITING] == ["c", "later"]
    node.run_to_the_end()
    assert set(node.finished) == {"a", "b", "c", "later"} and node.is_idle()


@pytest.mark.covers("Q02", "Q04", "Q08")
def test_a_preempted_sequence_is_requeued_only_when_its_mark_is_answered_whatever_is_in_flight() -> None:
    node = node_with((30, 30))
    while not (node.unread and node.unread[-1].marks):
        while len(node.unread) < 3 and not (node.unread and node.unread[-1].marks):
            assert node.plan() is not None
        if not node.unread[-1].marks:
            node.complete()
    blocks = set(node.scheduler.block_ids("b"))
    while node.unread:
        assert phase_of(node, "b") is Phase.PREEMPTING
        assert blocks <= set(node.scheduler.block_ids("b")), "its blocks are its own until the mark is answered"
        node.complete()
    assert phase_of(node, "b") is Phase.WAITING
    node.run_to_the_end()
    assert node.is_idle()


@pytest.mark.covers("Q04")
def test_a_step_in_which_every_slot_gives_way_still_answers() -> None:
    node = node_with((20,))
    node.plan()
    node.complete()
    held = node.pool.lease(node.pool.num_available)  # somebody outside takes all that is left
    plan = until_marked(node)
    assert not plan.decodes and not plan.chunks and len(plan.marks) == 1
    node.complete()
    assert phase_of(node, "a") is Phase.WAITING
    node.pool.release_lease(held)
    node.run_to_the_end()
    assert node.finished == {"a": "length"} and node.is_idle()


@pytest.mark.covers("Q04")
def test_a_step_in_which_several_are_marked_and_nobody_has_a_row_answers_for_each() -> None:
    node = node_with((8, 8))
    while any(phase_of(node, name) is not Phase.RUNNING_DECODE for name in "ab"):
        node.plan()
        node.complete()
    assert node.pause("a") and node.pause("b")
    plan = node.plan()
    assert plan is not None and not plan.num_tokens
    assert [owner_of(node, mark.slot) for mark in plan.marks] == ["a", "b"]
    node.complete()
    assert node.paused == {"a": "paused", "b": "paused"}
    for name in "ab":
        node.resume(name)
    node.run_to_the_end()
    assert node.finished == {"a": "length", "b": "length"} and node.is_idle()


@pytest.mark.covers("S17")
def test_the_same_need_never_preempts_twice() -> None:
    node = node_with((16, 16, 16))
    until_marked(node)
    while node.unread[0] is not node.unread[-1]:
        node.complete()
    for _ in range(3):  # nobody reads the answer: the need stays, and blocks are on their way
        plan = node.plan()
        assert plan is None or not plan.marks
    assert node.scheduler.num_preempted == 1
    node.run_to_the_end()
    assert node.is_idle()


@pytest.mark.covers("S11")
def test_nobody_is_admitted_in_a_step_that_preempted_nor_before_the_mark_is_answered() -> None:
    node = node_with((16, 16), replace(TIGHT, num_slots=3))
    node.plan()
    node.complete()
    held = node.pool.lease(4)
    plan = until_marked(node)
    node.submit(make_spec("tiny", [1], 1, TIGHT))
    assert not plan.chunks
    node.pool.release_lease(held)  # there is room again, for somebody who gave way
    following = node.plan()
    assert following is not None and following.decodes and not following.chunks
    assert phase_of(node, "tiny") is Phase.WAITING
    node.run_to_the_end()
    assert node.finished.keys() == {"a", "b", "tiny"}


@pytest.mark.covers("S16", "S10")
def test_who_gave_way_once_keeps_its_age() -> None:
    node = node_with((16, 16, 16), replace(TIGHT, num_slots=3))
    node.scheduler.reserve_slots(1)  # c came before b gives way, and runs after it
    assert [owner_of(node, mark.slot) for mark in until_marked(node).marks] == ["b"]
    node.scheduler.unreserve_slots(1)
    victims = []
    while len(node.finished) < 3:
        while len(node.unread) < 2 and (plan := node.plan()) is not None:
            victims += [owner_of(node, mark.slot) for mark in plan.marks]
        node.complete()
    assert victims and set(victims) == {"c"}
    assert set(node.finished) == {"a", "b", "c"}


@pytest.mark.covers("S01")
def test_without_a_decode_nobody_gives_way() -> None:
    sizes = replace(TIGHT, max_batched_tokens=8)
    node = node_with((40, 40), sizes, max_new_tokens=4)
    node.plan()
    held = node.pool.lease(node.pool.num_available - 1)
    while node.unread:
        node.complete()
        node.plan()
    assert node.scheduler.num_preempted == 0 and phase_of(node, "a") is Phase.RUNNING_PREFILL
    node.pool.release_lease(held)
    node.run_to_the_end()
    assert node.is_idle()


@pytest.mark.covers("S02")
def test_a_chunk_that_does_not_fit_ends_the_step_and_holds_up_the_queue() -> None:
    sizes = replace(TIGHT, max_batched_tokens=8)
    node = node_with((40,), sizes, max_new_tokens=4)
    node.plan()
    node.submit(make_spec("tiny", [1], 1, sizes))
    held = node.pool.lease(node.pool.num_available - 1)
    node.complete()
    assert node.plan() is None and phase_of(node, "tiny") is Phase.WAITING
    node.pool.release_lease(held)
    node.run_to_the_end()
    assert node.finished == {"a": "length", "tiny": "length"}


@pytest.mark.covers("S02")
@pytest.mark.parametrize("max_batched_tokens", [4, 7, 24, 64])
def test_prompts_that_together_exceed_the_pool_cannot_deadlock(max_batched_tokens: int) -> None:
    """The second is begun when the first has its last block: neither holds what the other lacks."""
    sizes = replace(TIGHT, max_batched_tokens=max_batched_tokens)
    node = node_with((60, 60, 60), sizes, max_new_tokens=3)
    while len(node.finished) < 3:
        while len(node.unread) < 2 and (plan := node.plan()) is not None:
            unfinished = [chunk for chunk in plan.chunks if not chunk.samples]
            assert len(unfinished) < 2
        assert node.unread, "nothing can advance"
        node.complete()
    assert node.is_idle()


@pytest.mark.covers("Q01")
def test_a_storm_of_no_token_requeues_nothing() -> None:
    sizes = replace(TIGHT, max_batched_tokens=4)
    node = node_with((60,), sizes, max_new_tokens=1)
    for _ in range(14):
        node.plan()
        progress = node.complete()
        assert [item.token_id for item in progress] == [None] and phase_of(node, "a") is Phase.RUNNING_PREFILL
    assert node.scheduler.num_preempted == 0


@pytest.mark.covers("Q01", "Q06")
@pytest.mark.parametrize(("of_row", "of_mark"), [(PREEMPTED_TOKEN_ID, NO_TOKEN), (3, NO_TOKEN), (3, 4), (3, None)])
def test_an_answer_that_does_not_belong_is_refused_at_once_so_no_slot_waits_for_one_that_was_lost(
    of_row: int, of_mark: int | None
) -> None:
    node = node_with((18,))  # in five blocks of four: two more rows find room
    node.plan()
    node.complete()
    held = node.pool.lease(node.pool.num_available)
    plan = node.plan()
    assert plan is not None and not plan.marks
    while plan is not None and not plan.marks:
        result = StepResult.of(plan.step_id, (SlotResult(0, 1, of_row),))
        if of_row == PREEMPTED_TOKEN_ID:
            with pytest.raises(ValueError, match="a mark that it was not given"):
                node.scheduler.complete(result)
            return
        node.scheduler.complete(result)
        plan = node.scheduler.plan()
    assert plan is not None
    answers = () if of_mark is None else (SlotResult(0, 1, of_mark),)
    with pytest.raises(ValueError, match=r"answered|not those of its rows and marks"):
        node.scheduler.complete(StepResult.of(plan.step_id, answers))
    node.pool.release_lease(held)


@pytest.mark.covers("Q06")
def test_who_is_aborted_while_giving_way_is_gone_and_not_requeued() -> None:
    node = node_with((16, 16, 16))
    until_marked(node)
    node.abort("c")
    node.run_to_the_end()
    assert set(node.finished) == {"a", "b"} and node.is_idle()


@pytest.mark.covers("Q02")
def test_where_nobody_resumes_the_owner_is_told_after_the_last_token() -> None:
    sizes = replace(TIGHT, resumes=False)
    node = node_with((16, 16, 16), sizes)
    node.run_to_the_end()
    assert node.finished["c"] == "preempted" and node.finished["a"] == "length"
    said = len(node.token_ids["c"])
    assert 0 < said < 32 and node.is_idle()


@pytest.mark.covers("S07")
def test_a_prompt_that_is_still_in_chunks_counts_in_the_reserve() -> None:
    sizes = Sizes(num_blocks=32, num_slots=4, max_batched_tokens=8, policy="ratio", max_model_len=64)
    node = CheckedNode(sizes)
    node.submit(make_spec("a", [1] * 30, 34, sizes))
    node.plan()
    # 32 blocks; a holds 2 of its 8 and will say 34 tokens: ceil(34 * 0.7 / 4) = 6. A newcomer of 20 tokens adds 4.
    assert node.scheduler.snapshot()["reserve"] == pytest.approx(0.7, abs=0.002)
    assert node.scheduler.admits(32 - 8 - 6 - 4, (20,)) and not node.scheduler.admits(32 - 8 - 6 - 4 + 1, (20,))
    assert node.scheduler.admits(32 - 2, (20,), reserves=False)
    assert not node.scheduler.admits(32 - 2 + 1, (20,), reserves=False)


@pytest.mark.covers("S12")
def test_an_allocation_behind_a_match_never_evicts_what_was_matched_however_full_the_pool() -> None:
    node = node_with((16,), replace(TIGHT, policy="ratio"), max_new_tokens=16)
    node.run_to_the_end()
    held = node.pool.lease(node.pool.counts().free)
    before = node.pool.counts().cached
    node.submit(make_spec("again", [ord("a") % 7] * 16, 1, TIGHT))
    plan = node.plan()
    assert plan is not None and plan.chunks[0].start == 12, "three blocks of four are found, the last token is computed"
    assert node.pool.counts().cached == before - 4, "and one that was not matched is evicted for it"
    node.pool.release_lease(held)
    node.run_to_the_end()
    assert node.is_idle()


@pytest.mark.covers("S09", "S10", "S16", "Q02", "Q03")
@pytest.mark.parametrize("policy", ["ratio", "fixed", "none"])
@pytest.mark.parametrize("depth", [1, pytest.param(2, marks=only_thorough), 3])
def test_in_half_the_pool_everybody_ends_with_the_right_tokens_and_nobody_thrashes(
    policy: ReservePolicy, depth: int
) -> None:
    random = Random(f"{policy} {depth}")
    sizes = Sizes(num_blocks=64, num_slots=8, max_batched_tokens=32, max_model_len=128, policy=policy)
    node = CheckedNode(sizes)
    for number in range(60):
        prompt = [random.randrange(7) for _ in range(random.randint(1, 40))]
        seed = random.choice((None, random.getrandbits(53)))
        node.submit(make_spec(number, prompt, random.randint(1, 80), sizes, seed=seed))
    num_steps = 0
    while True:
        while len(node.unread) < depth and node.plan() is not None:
            num_steps += 1
        if not node.unread:
            break
        node.complete()
    assert len(node.finished) == 60 and node.is_idle()
    for name, spec in node.specs.items():
        assert node.token_ids[name] == right_answer(spec, sizes.vocab_size)
    assert node.scheduler.num_preempted > 0 or policy == "ratio"
    assert node.scheduler.num_preempted * 1000 < 200 * num_steps


@pytest.mark.covers("S16")
def test_short_ones_that_keep_coming_do_not_starve_a_long_one() -> None:
    sizes = Sizes(num_blocks=32, num_slots=8, max_batched_tokens=32, max_model_len=128, policy="none")
    node = CheckedNode(sizes)
    node.submit(make_spec("long", [1] * 40, 80, sizes))
    for number in range(400):
        node.submit(make_spec(number, [number % 7] * 9, 6, sizes))
        if node.plan() is None or len(node.unread) == 2:
            node.complete()
        if "long" in node.finished:
            break
    assert node.finished["long"] == "length" and len(node.specs) < 200
