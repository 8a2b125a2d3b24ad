"""A sequence on its way to another node: stopped in order, resumed where it was or dropped, and what a link may read of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.fake_runner import expected_tokens
from engine.plan import NO_TOKEN, PREEMPTED_TOKEN_ID, SamplingParams, StepResult
from engine.sequence import Phase, SequenceSpec
from tests.engine_pure.checked_node import SIZES, CheckedNode, Sizes, make_spec, phase_of

PENALTIES = SamplingParams(1.0, 5, presence_penalty=0.5, min_tokens=7, stop_token_ids=frozenset({3}))


def decoding(sizes: Sizes = SIZES, max_new_tokens: int = 20, num_steps: int = 4) -> CheckedNode:
    """A node whose sequence "s" has said some tokens; two steps are launched."""
    node = CheckedNode(sizes)
    node.submit(make_spec("s", [0, 1, 2, 3, 4], max_new_tokens, sizes))
    node.plan()
    for _ in range(num_steps):
        node.plan()
        node.complete()
    node.plan()
    return node


def drain(node: CheckedNode) -> list[str | None]:
    """Read what is launched; how each of it ended."""
    return [item.finish for _ in range(len(node.unread)) for item in node.complete()]


@pytest.mark.covers("Q02", "D10")
@pytest.mark.parametrize("num_steps", range(1, 12))
def test_a_paused_sequence_goes_on_where_it_was_with_the_tokens_of_one_that_never_paused(num_steps: int) -> None:
    """At every length, also where a block has just become full."""
    node = decoding(num_steps=num_steps)
    assert node.pause("s")
    plan = node.plan()
    assert plan is not None and len(plan.marks) == 1 and not plan.num_tokens
    said = len(node.token_ids["s"]) + len(node.unread) - 1
    assert drain(node)[-1] == "paused"
    assert len(node.token_ids["s"]) == said, "everything that it said came before the word that it is paused"
    assert phase_of(node, "s") is Phase.PAUSED and node.plan() is None, "it does not go on by itself"
    assert node.scheduler.num_free_slots == SIZES.num_slots - 1
    node.resume("s")
    node.run_to_the_end()
    assert node.finished == {"s": "length"} and len(node.token_ids["s"]) == 20
    assert node.is_idle()


@pytest.mark.covers("D10")
def test_penalties_and_min_tokens_count_on_over_a_pause() -> None:
    right = expected_tokens((0, 1, 2), (3, 4), PENALTIES, 20, SIZES.vocab_size)
    node = CheckedNode(SIZES)
    node.scheduler.submit(SequenceSpec("s", (0, 1, 2, 3, 4), 2, PENALTIES, 20, frozenset(), ()))
    said: list[int] = []
    for _ in range(4):
        for _ in range(3):
            plan = node.scheduler.plan()
            assert plan is not None
            said += [item.token_id or 0 for item in node.scheduler.complete(node.runner.run(plan))]
        assert node.scheduler.pause("s")
        plan = node.scheduler.plan()
        assert plan is not None
        assert [item.finish for item in node.scheduler.complete(node.runner.run(plan))] == ["paused"]
        node.scheduler.resume("s")
    assert said == right[:12]


@pytest.mark.covers("Q02")
def test_a_sequence_that_ends_before_its_mark_is_answered_just_ends() -> None:
    node = decoding(max_new_tokens=6, num_steps=5)
    assert node.pause("s")
    node.plan()
    assert "length" in drain(node) and node.finished == {"s": "length"}
    assert node.is_idle()


def test_what_does_not_decode_is_not_paused() -> None:
    node = CheckedNode(replace(SIZES, max_batched_tokens=4))
    node.submit(make_spec("prompt", [0, 1, 2, 3, 4, 5], 3, node.sizes))
    assert not node.scheduler.pause("prompt"), "it waits"
    node.plan()
    assert not node.scheduler.pause("prompt"), "its prompt is being computed"
    assert not node.scheduler.pause("nobody")
    node.run_to_the_end()
    assert node.finished == {"prompt": "length"}


@pytest.mark.covers("Q02", "Q06")
def test_aborted_before_the_mark_is_planned_it_gets_none() -> None:
    node = decoding()
    drain(node)
    assert node.scheduler.pause("s")
    node.abort("s")
    assert node.plan() is None and node.is_idle()


def test_a_paused_sequence_is_dropped_with_all_that_it_had() -> None:
    node = decoding()
    node.pause("s")
    node.plan()
    drain(node)
    node.abort("s")
    assert node.is_idle()


@pytest.mark.covers("P08")
def test_blocks_become_readable_when_the_step_that_shows_them_is_read_and_the_last_one_with_the_pause() -> None:
    node = decoding(num_steps=5)
    node.scheduler.lend("s")
    assert node.scheduler.num_readable("s") == 0 and not node.scheduler.can_move("s"), "one link at a time"
    drain(node)  # of 5 + 6 tokens and more the KV is computed
    plan = node.plan()
    assert plan is not None and plan.leaving_block_ids == node.scheduler.block_ids("s")[:2]
    assert node.scheduler.num_readable("s") == 0, "a runner with a memory of its own has not copied it yet"
    node.complete()
    assert node.scheduler.num_readable("s") == 2
    node.pause("s")
    marking = node.plan()
    assert marking is not None and marking.leaving_block_ids == node.scheduler.block_ids("s")[2:]
    drain(node)
    assert node.scheduler.num_readable("s") == len(node.scheduler.block_ids("s")) == 3
    node.abort("s")
    assert not node.is_idle() and node.scheduler.knows("s"), "a link still reads its blocks"
    assert node.scheduler.release("s") and node.is_idle()


@pytest.mark.covers("P08")
def test_what_is_lent_once_it_is_paused_is_shown_by_a_step_of_its_own() -> None:
    node = decoding(num_steps=3)
    node.pause("s")
    node.plan()
    drain(node)
    node.scheduler.lend("s")
    plan = node.plan()
    assert plan is not None and plan.leaving_block_ids == node.scheduler.block_ids("s") and not plan.num_tokens
    drain(node)
    assert node.scheduler.num_readable("s") == len(plan.leaving_block_ids)


def lease_all(node: CheckedNode) -> set[int]:
    """What anybody who asks now would get, and write into."""
    return {*node.pool.lease(node.pool.num_available)}


@pytest.mark.covers("P08", "Q08")
def test_what_a_launched_step_copies_to_the_host_is_leased_to_nobody_before_it_is_read() -> None:
    """It would overwrite what arrives there in the meantime."""
    node = decoding(num_steps=3)
    node.pause("s")
    node.plan()
    drain(node)
    node.scheduler.lend("s")
    plan = node.plan()
    assert plan is not None and plan.leaving_block_ids == node.scheduler.block_ids("s")
    node.abort("s")
    assert node.scheduler.release("s") and not node.scheduler.knows("s"), (
        "its move was refused, and its request cancelled"
    )
    assert node.scheduler.snapshot()["references_of_shown"] == len(plan.leaving_block_ids)
    leased = lease_all(node)
    assert not leased & {*plan.leaving_block_ids} and len(leased) == SIZES.num_blocks - len(plan.leaving_block_ids)
    node.pool.release_lease([*leased])
    node.complete()
    assert node.is_idle() and not node.scheduler.has_sequences
    assert node.scheduler.snapshot()["references_of_shown"] == 0


@pytest.mark.covers("P08", "Q08")
def test_so_is_what_a_step_copies_that_was_launched_behind_the_last_row_of_its_sequence() -> None:
    node = decoding(max_new_tokens=6, num_steps=5)
    assert len(node.unread) == 1
    node.scheduler.lend("s")
    plan = node.plan()
    assert plan is not None and len(plan.leaving_block_ids) == 2 and not plan.num_tokens
    assert [item.finish for item in node.complete()] == ["length"]
    assert node.scheduler.release("s")
    assert not lease_all(node) & {*plan.leaving_block_ids}
    node.complete()
    assert lease_all(node) == {*plan.leaving_block_ids}


@pytest.mark.covers("P08", "Q08")
def test_what_a_step_keeps_stays_its_own_when_results_are_refused_and_the_right_ones_are_read_afterwards() -> None:
    node = decoding(num_steps=3)
    drain(node)
    node.scheduler.lend("s")
    plan = node.scheduler.plan()
    assert plan is not None and plan.leaving_block_ids
    first, *_ = node.runner.run(plan)
    before = node.scheduler.snapshot(), node.pool.snapshot(), node.scheduler.num_prompt_tokens
    for wrong in ((), (first._replace(slot=first.slot + 1),), (first._replace(token_id=NO_TOKEN),)):
        with pytest.raises(ValueError, match=r"not those of its rows|the row samples"):
            node.scheduler.complete(StepResult.of(plan.step_id, wrong))
        assert (node.scheduler.snapshot(), node.pool.snapshot(), node.scheduler.num_prompt_tokens) == before
    (progress,) = node.scheduler.complete(StepResult.of(plan.step_id, (first,)))
    assert progress.token_id == first.token_id and node.scheduler.num_readable("s") == len(plan.leaving_block_ids)


@pytest.mark.covers("P08", "Q01", "Q08")
def test_nothing_of_a_step_is_read_whose_last_answer_is_not_one() -> None:
    """Not the tokens of the rows before it either, nor are their blocks found."""
    node = decoding(num_steps=4)
    drain(node)
    node.submit(make_spec("moves", [3, 3, 3], 9, SIZES))
    node.plan()
    drain(node)
    node.scheduler.lend("s")
    node.pause("moves")
    plan = node.scheduler.plan()
    assert plan is not None and len(plan.decodes) == len(plan.marks) == 1 and plan.leaving_block_ids
    row, mark = node.runner.run(plan)
    before = node.scheduler.snapshot(), node.pool.snapshot(), node.scheduler.num_planned("s")
    with pytest.raises(ValueError, match="to its mark"):
        node.scheduler.complete(StepResult.of(plan.step_id, (row, mark._replace(token_id=4))))
    assert (node.scheduler.snapshot(), node.pool.snapshot(), node.scheduler.num_planned("s")) == before
    said = node.scheduler.complete(StepResult.of(plan.step_id, (row, mark)))
    assert [(item.sequence_id, item.token_id, item.finish) for item in said] == [
        ("s", row.token_id, None),
        ("moves", None, "paused"),
    ]


PRESSED = Sizes(num_blocks=8, num_slots=2, max_model_len=32, policy="none", resumes=False, keeps=True)


def press(sizes: Sizes) -> CheckedNode:
    """Two sequences, which together outgrow the pool."""
    node = CheckedNode(sizes)
    for name in ("old", "young"):
        node.submit(make_spec(name, [0, 1, 2, 3, 4], 20, sizes, seed=ord(name[0])))
    return node


@pytest.mark.covers("S17", "Q02")
def test_who_gave_way_is_kept_with_its_blocks_which_count_as_coming() -> None:
    node = press(PRESSED)
    while not node.paused:
        while len(node.unread) < 2 and node.plan() is not None:
            pass
        node.complete()
    assert node.paused == {"young": "preempted"} and node.scheduler.num_preempted == 1
    while node.unread or node.plan() is not None:
        node.complete()
    assert node.scheduler.num_preempted == 1 and "old" not in node.finished, "who needs the blocks waits for them"
    with pytest.raises(ValueError, match="does not go on here"):
        node.scheduler.resume("young")
    node.abort("young")
    node.run_to_the_end()
    assert node.finished == {"old": "length"} and node.is_idle()


@pytest.mark.covers("S17", "Q02")
def test_blocks_that_only_a_launched_step_keeps_count_as_coming() -> None:
    node = press(PRESSED)
    while not node.paused:
        while len(node.unread) < 2 and node.plan() is not None:
            pass
        node.complete()
    while node.unread:
        node.complete()
    node.scheduler.lend("young")
    plan = node.plan()
    assert plan is not None and plan.leaving_block_ids == node.scheduler.block_ids("young")
    node.abort("young")
    node.scheduler.release("young")
    assert node.plan() is None and node.scheduler.num_preempted == 1, "who needs the blocks waits for the step"
    node.run_to_the_end()
    assert node.finished == {"old": "length"} and node.scheduler.num_preempted == 1 and node.is_idle()


@pytest.mark.covers("S10")
def test_who_gave_way_while_it_moves_is_not_queued_behind_its_movers_back() -> None:
    """On a node that resumes who gave way."""
    node = press(replace(PRESSED, resumes=True))
    while not node.scheduler.num_in(Phase.PREEMPTING):
        if len(node.unread) > 1 or node.plan() is None:
            node.complete()
    node.scheduler.lend("young")
    while not node.paused:
        node.complete()
    assert node.paused == {"young": "preempted"}
    node.resume("young")
    assert phase_of(node, "young") is Phase.WAITING
    node.scheduler.release("young")
    node.run_to_the_end()
    assert {*node.finished} == {"old", "young"} and node.is_idle()


def test_the_mark_of_a_pause_is_answered_like_any_other() -> None:
    node = decoding(num_steps=1)
    drain(node)
    node.pause("s")
    assert node.plan() is not None
    assert [answer.token_id for answer in node.runner.run(node.unread.popleft())] == [PREEMPTED_TOKEN_ID]
