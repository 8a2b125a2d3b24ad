"""The choices of one request: each has its own attempts, retries, cancels and end; and what logprobs add to a branch."""

from __future__ import annotations

from typing import Any

import pytest

from proto import baton_pb2 as pb
from router.events import Finished, NodeListed, SessionLost
from router.seeds import branch_seed
from tests.router.core_world import CoreWorld, node_entry, ref

SCORE = [pb.TokenLogprobs(logprob=-value) for value in range(9)]


def scored(*values: int) -> dict[str, Any]:
    """Logprobs of tokens."""
    return {"logprobs": [SCORE[value] for value in values]}


@pytest.mark.covers("A02")
def test_the_choices_of_a_request_are_branches_of_one_dispatch_each_with_its_own_seed() -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a", num_choices=3)
    ((_, dispatch),) = world.dispatches("a")
    branches = dispatch.branches
    assert [branch.choice for branch in branches] == [0, 1, 2]
    assert [branch.seed for branch in branches] == [5, branch_seed(5, 1), branch_seed(5, 2)]
    assert len({branch.seed for branch in branches}) == 3
    assert (world.load("p1"), world.load("d1")) == ((3, 0), (0, 3))


@pytest.mark.covers("A02", "D01")
@pytest.mark.parametrize(
    ("num_tokens", "groups"), [(49, [4]), (64, [4]), (65, [4]), (66, [3, 1]), (97, [2, 2]), (256, [1] * 4)]
)
def test_no_more_choices_go_together_than_the_decode_node_could_ever_hold(num_tokens: int, groups: list[int]) -> None:
    """It has 16 blocks of 16 tokens; KV of all tokens but the last is written. Else each such request is refused once first."""
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a", num_choices=4, max_tokens=num_tokens - 3)
    assert [len(dispatch.branches) for _, dispatch in world.dispatches("a")] == groups


@pytest.mark.covers("A02", "D01")
@pytest.mark.parametrize(
    ("num_full", "max_tokens", "groups"), [(8, 33, [4]), (9, 33, [3, 1]), (12, 9, [4]), (13, 9, [3, 1])]
)
def test_full_blocks_of_the_prompt_count_once_for_all_choices(
    num_full: int, max_tokens: int, groups: list[int]
) -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a", num_choices=4, prompt=[1] * (16 * num_full), max_tokens=max_tokens)
    assert [len(dispatch.branches) for _, dispatch in world.dispatches("a")] == groups


def test_the_seeds_of_choices_are_what_the_documentation_says() -> None:
    assert branch_seed(41, 0) == 41
    assert branch_seed(41, 1) == 5661272362756940  # printf 'baton choice 41 1' | sha256sum
    assert all(branch_seed(2**63 - 1, choice) < 2**53 for choice in range(1, 16))


@pytest.mark.covers("A02", "A07")
def test_choices_finish_by_themselves_and_the_request_with_the_last() -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a", num_choices=2)
    world.tokens_from("d1", "a", 0, [7, 8], pb.FINISH_LENGTH, choice=1)
    assert world.ends == {"a/1": Finished("a", "length", (7, 8), 1)}
    assert world.load("d1") == (0, 1)
    world.tokens_from("d1", "a", 0, [9, 99], pb.FINISH_STOP)
    assert world.ends["a"] == Finished("a", "stop", (9, 99), 0)
    assert not world.cancels("a")
    world.assert_nothing_is_left()


@pytest.mark.covers("R20")
def test_a_retry_carries_only_the_branch_that_was_lost() -> None:
    world = CoreWorld.with_nodes("p1", "d1", "d2", preempt_retry_count=1)
    world.submit("a", num_choices=2)
    world.tokens_from("p1", "a", 0, [7], choice=1)
    world.error_from("p1", "a", pb.CHECKSUM, choice=1, completion_token_ids=[7])
    *_, (_, again) = world.dispatches("a")
    assert (again.attempt, again.branches[0].choice) == (1, 1)
    assert list(again.branches[0].generated_token_ids) == [7]
    cancelled = [message.cancel.key for _, message in world.sent if message.HasField("cancel")]
    assert {(key.choice, key.attempt) for key in cancelled} == {(1, 0)}
    world.tokens_from(world.dispatches("a")[0][1].target.node.name, "a", 0, [8], pb.FINISH_LENGTH)
    world.tokens_from(again.target.node.name, "a", 0, [7, 9], pb.FINISH_LENGTH, attempt=1, choice=1)
    assert world.ends["a"] == Finished("a", "length", (8,), 0)
    assert world.ends["a/1"] == Finished("a", "length", (7, 9), 1)
    world.assert_nothing_is_left()


def test_an_error_that_cannot_be_retried_ends_all_choices_and_cancels_them() -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a", num_choices=3)
    world.tokens_from("d1", "a", 0, [7], pb.FINISH_LENGTH, choice=2)
    world.error_from("p1", "a", pb.INTERNAL, retryable=False, choice=1)
    assert world.failure("a").code == "INTERNAL"
    keys = [message.cancel.key.choice for _, message in world.sent if message.HasField("cancel")]
    assert sorted(keys) == [0, 0, 1, 1]
    world.assert_nothing_is_left()


@pytest.mark.covers("R20")
@pytest.mark.parametrize("max_nodes_lost", [1, 2])
def test_of_a_lost_node_each_choice_comes_back_by_itself_or_the_request_ends_once(max_nodes_lost: int) -> None:
    world = CoreWorld.with_nodes("p1", "d1", "d2", max_nodes_lost=max_nodes_lost)
    world.submit("a", num_choices=3)
    ((_, dispatch),) = world.dispatches("a")
    world.feed(SessionLost(ref(dispatch.target.node.name), has_died=True))
    if max_nodes_lost == 1:
        assert world.failure("a").code == "NODE_LOST"
        world.assert_nothing_is_left()
    else:
        again = world.dispatches("a")[1:]
        assert [(d.attempt, [branch.choice for branch in d.branches]) for _, d in again] == [
            (1, [choice]) for choice in range(3)
        ]


def test_an_abort_ends_every_choice() -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a", num_choices=3)
    assert len(world.dispatches("a")) == 1
    world.abort("a")
    assert sorted(world.cancels("a")) == [("d1", 0)] * 3 + [("p1", 0)] * 3
    world.assert_nothing_is_left()


@pytest.mark.covers("A02", "P07")
def test_an_attempt_of_several_branches_counts_as_one_prefill_and_takes_a_slot_for_each() -> None:
    world = CoreWorld.with_nodes("p1", "d1", max_inflight_prefills=3)
    world.submit("a", num_choices=3, prompt=(1, 2, 3, 4))
    node = world.node("p1")
    assert (node["attempts"], node["prefill_tokens"]) == (1, 4)
    world.submit("b", num_choices=3)  # the node has four slots: the second choice waits for one
    ((_, dispatch),) = world.dispatches("b")
    assert [branch.choice for branch in dispatch.branches] == [0]
    world.tokens_from("d1", "a", 0, [7], pb.FINISH_LENGTH, choice=1)
    _, (_, dispatch) = world.dispatches("b")
    assert (dispatch.attempt, [branch.choice for branch in dispatch.branches]) == (0, [1])
    for request_id in "ab":
        world.abort(request_id)
    world.assert_nothing_is_left()


@pytest.mark.covers("A02", "P09")
def test_branches_that_were_refused_together_come_back_one_by_one_to_the_prefill_node_that_has_their_kv() -> None:
    world = CoreWorld.with_nodes("p1", "p2", "d1")
    world.submit("a", num_choices=3)
    ((first, dispatch),) = world.dispatches("a")
    assert len(dispatch.branches) == 3
    for choice in range(3):
        world.error_from(first, "a", pb.NO_BLOCKS, choice=choice, node_id="d1")
    assert len(world.dispatches("a")) == 1, "asked again before the patience was over"
    world.pass_time(0.1)
    again = world.dispatches("a")[1:]
    assert [(node, each.attempt, [b.choice for b in each.branches]) for node, each in again] == [
        (first, 1, [choice]) for choice in range(3)
    ]


def test_a_branch_with_tokens_or_with_prompt_logprobs_to_tell_goes_alone() -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a", num_choices=2, num_logprobs=0, wants_prompt_logprobs=True)
    assert [len(dispatch.branches) for _, dispatch in world.dispatches("a")] == [1, 1]
    world.submit("b", num_choices=2)
    world.tokens_from("p1", "b", 0, [7], choice=0)
    for choice in range(2):
        world.error_from("p1", "b", pb.CHECKSUM, choice=choice, completion_token_ids=[7] if choice == 0 else [])
    again = [dispatch.branches for _, dispatch in world.dispatches("b")[1:]]
    assert [[(b.choice, list(b.generated_token_ids)) for b in each] for each in again] == [[(0, [7])], [(1, [])]]


@pytest.mark.covers("A09")
def test_a_stop_string_cancels_its_branch_at_both_nodes_and_leaves_the_others() -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a", num_choices=2)
    world.tokens_from("d1", "a", 0, [1, 2, 3])
    world.stop("a", 2)
    assert world.ends["a"] == Finished("a", "stop", (1, 2), 0)
    assert sorted(world.cancels("a")) == [("d1", 0), ("p1", 0)]
    world.tokens_from("d1", "a", 3, [4])
    world.stop("a", 2)
    assert sorted(world.cancels("a")) == [("d1", 0), ("d1", 0), ("p1", 0)], "what still runs is told again"
    world.tokens_from("d1", "a", 0, [5], pb.FINISH_LENGTH, choice=1)
    assert world.ends["a/1"] == Finished("a", "length", (5,), 1)
    world.assert_nothing_is_left()


@pytest.mark.covers("A05")
def test_a_resubmission_starts_from_its_tokens_and_counts_them_towards_max_tokens() -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a", max_tokens=4, generated=[7, 8])
    [(_, dispatch)] = world.dispatches("a")
    assert list(dispatch.branches[0].generated_token_ids) == [7, 8]
    assert world.node("p1")["prefill_tokens"] == 5
    world.tokens_from("d1", "a", 2, [9, 10], pb.FINISH_LENGTH)
    assert world.ends["a"] == Finished("a", "length", (7, 8, 9, 10), 0)
    assert world.tokens["a"] == [7, 8, 9, 10]


def test_how_long_each_attempt_waited_is_observed() -> None:
    world = CoreWorld.with_nodes("p1", "d1", max_inflight_prefills=1)
    world.submit("a")
    world.submit("b")
    world.pass_time(2.0)
    world.tokens_from("d1", "a", 0, [7])
    assert world.observed == [("queue", 0.0), ("queue", 2.0)]


@pytest.mark.covers("A02")
def test_logprobs_go_with_their_tokens_and_a_repeat_brings_none_twice() -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a", num_logprobs=0)
    world.tokens_from("p1", "a", 0, [7], **scored(1))
    world.tokens_from("d1", "a", 0, [7, 8], **scored(1, 2))
    world.tokens_from("d1", "a", 2, [9], pb.FINISH_LENGTH, **scored(3))
    assert world.logprobs["a"] == SCORE[1:4]


def test_logprobs_that_nobody_asked_for_are_not_passed_on() -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a")
    world.tokens_from("p1", "a", 0, [7], **scored(1), prompt_logprobs=SCORE[:2])
    assert (world.logprobs["a"], world.prompt_logprobs) == ([], {})


@pytest.mark.parametrize("wrong", [{}, scored(1, 2), {**scored(1), "prompt_logprobs": SCORE[:1]}])
def test_logprobs_of_the_wrong_number_end_the_request(wrong: dict[str, Any]) -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a", num_logprobs=0, wants_prompt_logprobs=True)
    world.tokens_from("p1", "a", 0, [7], **wrong)
    assert world.failure("a").code == "INTERNAL"
    assert "logprobs" in world.failure("a").message
    world.assert_nothing_is_left()


@pytest.mark.covers("A07")
def test_tokens_of_an_error_whose_logprobs_nobody_told_are_generated_again() -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a", num_logprobs=0, max_tokens=3)
    world.tokens_from("p1", "a", 0, [7], **scored(1))
    world.error_from("p1", "a", pb.CHECKSUM, completion_token_ids=[7, 8, 9])
    assert list(world.dispatches("a")[1][1].branches[0].generated_token_ids) == [7]
    world.tokens_from("d1", "a", 1, [8, 9], pb.FINISH_LENGTH, attempt=1, **scored(2, 3))
    assert world.logprobs["a"] == SCORE[1:4]


@pytest.mark.covers("A02")
def test_prompt_logprobs_are_passed_on_once_and_a_retry_does_not_ask_again() -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a", num_logprobs=0, wants_prompt_logprobs=True)
    world.tokens_from("p1", "a", 0, [7], **scored(1), prompt_logprobs=SCORE[:2])
    world.error_from("p1", "a", pb.CHECKSUM, completion_token_ids=[7])
    assert [dispatch.sampling.prompt_logprobs for _, dispatch in world.dispatches("a")] == [True, False]
    world.tokens_from("p1", "a", 1, [8], pb.FINISH_LENGTH, 1, **scored(2), prompt_logprobs=SCORE[:2])
    assert world.prompt_logprobs["a"] == (SCORE[0], SCORE[1])


def test_a_prompt_of_one_token_has_no_logprobs_to_wait_for() -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a", prompt=[1], num_logprobs=0, wants_prompt_logprobs=True)
    world.tokens_from("p1", "a", 0, [7], pb.FINISH_LENGTH, **scored(1))
    assert world.ends["a"] == Finished("a", "length", (7,), 0)


@pytest.mark.covers("A02")
def test_a_receiver_that_finishes_ahead_of_the_prompts_logprobs_waits_for_them() -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a", num_logprobs=0, wants_prompt_logprobs=True)
    world.tokens_from("d1", "a", 0, [7, 8], pb.FINISH_LENGTH, **scored(1, 2))
    assert not world.ends
    assert (world.load("p1"), world.load("d1")) == ((0, 0), (0, 0))
    world.pass_time(1.9)
    world.tokens_from("p1", "a", 0, [7], **scored(1), prompt_logprobs=SCORE[:2])
    assert world.ends["a"] == Finished("a", "length", (7, 8), 0)
    assert not world.cancels("a")
    world.assert_nothing_is_left()


@pytest.mark.covers("A02", "A09")
def test_a_stop_string_found_ahead_of_the_prompts_logprobs_waits_for_them() -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a", num_logprobs=0, wants_prompt_logprobs=True)
    world.tokens_from("d1", "a", 0, [7, 8, 9], **scored(1, 2, 3))
    world.stop("a", 2)
    assert sorted(world.cancels("a")) == [("d1", 0), ("p1", 0)]
    assert not world.ends
    world.tokens_from("p1", "a", 0, [7], **scored(1), prompt_logprobs=SCORE[:2])
    assert world.prompt_logprobs["a"] == (SCORE[0], SCORE[1])
    assert world.ends["a"] == Finished("a", "stop", (7, 8), 0)
    world.assert_nothing_is_left()


@pytest.mark.covers("A02", "R08")
@pytest.mark.parametrize("is_scored", [True, False])
def test_a_choice_given_up_ahead_of_its_prompts_logprobs_is_handed_up_with_them(is_scored: bool) -> None:
    world = CoreWorld.with_nodes("p1", "d1", preempt_retry_count=0, prompt_logprobs_grace_s=2.0)
    world.submit("a", num_logprobs=0, wants_prompt_logprobs=True)
    world.tokens_from("d1", "a", 0, [7, 8], **scored(1, 2))
    world.error_from("d1", "a", pb.PREEMPTED, completion_token_ids=[7, 8])
    assert not world.ends
    if is_scored:
        world.tokens_from("p1", "a", 0, [7], **scored(1), prompt_logprobs=SCORE[:2])
        assert (world.ends["a"], len(world.prompt_logprobs["a"])) == (Finished("a", "pd_reschedule", (7, 8)), 2)
    else:
        world.pass_time(2.1)
        assert world.failure("a").status == 503, "nothing of it was told"
    world.assert_nothing_is_left()


@pytest.mark.covers("A02")
@pytest.mark.parametrize("ended_by", ["itself", "a stop string"])
def test_prompt_logprobs_that_died_with_their_node_are_computed_by_another(ended_by: str) -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a", max_tokens=2, num_logprobs=0, wants_prompt_logprobs=True)
    if ended_by == "itself":
        world.tokens_from("d1", "a", 0, [7, 8], pb.FINISH_LENGTH, **scored(1, 2))
    else:
        world.tokens_from("d1", "a", 0, [7, 8], **scored(1, 2))
        world.stop("a", 1)
    world.feed(SessionLost(ref("p1")))
    assert not world.ends
    world.join_all("p2")
    _, (name, again) = world.dispatches("a")
    assert (name, list(again.branches[0].generated_token_ids)) == ("p2", [7]), "the last token is its excuse"
    assert again.sampling.prompt_logprobs
    world.tokens_from("d1", "a", 1, [8], pb.FINISH_LENGTH, 1, **scored(2))  # overtakes again
    world.tokens_from("p2", "a", 1, [8], attempt=1, **scored(2), prompt_logprobs=SCORE[:2])
    expected = Finished("a", "length", (7, 8)) if ended_by == "itself" else Finished("a", "stop", (7,))
    assert world.ends["a"] == expected
    assert world.prompt_logprobs["a"] == (SCORE[0], SCORE[1])
    world.assert_nothing_is_left()


@pytest.mark.covers("A02", "R11")
def test_a_request_all_of_whose_choices_lack_logprobs_that_died_ends_once() -> None:
    world = CoreWorld.with_nodes("p1", "d1", preempt_retry_count=0)
    world.submit("a", num_choices=3, num_logprobs=0, wants_prompt_logprobs=True)
    for choice in range(3):
        world.tokens_from("d1", "a", 0, [7], choice=choice, **scored(1))
    assert len(world.cancels("a")) == 0
    world.feed(SessionLost(ref("p1")))
    assert world.failure("a").code == "NODE_LOST"
    world.assert_nothing_is_left()


@pytest.mark.covers("A02", "R11")
@pytest.mark.parametrize("is_drained", [False, True])
def test_a_stream_whose_prompts_logprobs_died_is_begun_anew_at_once_and_not_at_its_end(is_drained: bool) -> None:
    world = CoreWorld.with_nodes("p1", "d1", "p2", preempt_retry_count=int(not is_drained))
    world.submit("a", num_logprobs=0, wants_prompt_logprobs=True)
    world.submit("b", num_logprobs=0, wants_prompt_logprobs=True)
    ((first, _),) = world.dispatches("a")
    world.tokens_from("d1", "a", 0, [7, 8], **scored(1, 2))
    if is_drained:
        entry = node_entry(first, pb.ROLE_PREFILL)
        entry.draining = True
        world.feed(NodeListed(entry))
    world.feed(SessionLost(ref(first)))
    _, (name, again) = world.dispatches("a")
    assert (name == first, list(again.branches[0].generated_token_ids)) == (False, [7, 8])
    assert again.sampling.prompt_logprobs and ("d1", 0) in world.cancels("a")
    world.tokens_from(name, "a", 2, [9], attempt=1, **scored(3), prompt_logprobs=SCORE[:2])
    world.tokens_from("d1", "a", 2, [9, 10], pb.FINISH_LENGTH, attempt=1, **scored(3, 4))
    assert world.ends["a"] == Finished("a", "length", (7, 8, 9, 10))
    assert world.prompt_logprobs["a"] == (SCORE[0], SCORE[1])
    assert len(world.dispatches("b")) == 1, "whose sender lives"


@pytest.mark.covers("A02", "R03")
def test_prompt_logprobs_that_never_come_end_the_request_with_an_error() -> None:
    world = CoreWorld.with_nodes("p1", "d1", preempt_retry_count=1, prompt_logprobs_grace_s=2.0)
    world.submit("a", num_logprobs=0, wants_prompt_logprobs=True)
    for attempt in range(2):
        assert not world.ends
        world.tokens_from("d1", "a", 0, [7, 99], pb.FINISH_STOP, attempt, **scored(1, 2))
        world.pass_time(2.1)
    assert (world.failure("a").status, world.failure("a").code) == (503, "NODE_LOST")
    world.assert_nothing_is_left()


@pytest.mark.covers("A09")
def test_a_stop_string_found_while_its_branch_waits_to_be_run_again_is_its_end() -> None:
    world = CoreWorld.with_nodes("p1", "d1", max_inflight_prefills=1)
    world.submit("a", num_logprobs=0, wants_prompt_logprobs=True)
    world.submit("b")
    world.tokens_from("d1", "a", 0, [7, 8], **scored(1, 2))
    world.error_from("d1", "a", pb.PREEMPTED)
    assert len(world.dispatches("a")) == 1
    world.stop("a", 1)
    world.tokens_from("d1", "b", 0, [7], pb.FINISH_LENGTH)
    world.pass_time(0.1)
    assert len(world.dispatches("a")) == 2
    world.tokens_from("p1", "a", 2, [9], attempt=1, **scored(3), prompt_logprobs=SCORE[:2])
    assert world.ends["a"] == Finished("a", "stop", (7,), 0)
    assert sorted(world.cancels("a")[-2:]) == [("d1", 1), ("p1", 1)]
    world.assert_nothing_is_left()
