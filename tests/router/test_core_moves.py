"""The router's part of a move, by example: where to, under which number, whose words count, and what is left when it fails."""

from __future__ import annotations

from typing import Any

import pytest

from proto import baton_pb2 as pb
from router.events import Finished, LoadReported, NodeListed, NodeUnlisted, SessionBroken, SessionLost, SessionUp
from tests.router.core_world import CoreWorld, node_entry, ref


def decoding_world(*others: str, prefill: str = "p1", **config: Any) -> CoreWorld:
    """Request a decodes on d1, attempt 0, and has said 7 and 8; `others` join then."""
    world = CoreWorld.with_nodes(prefill, "d1", **config)
    world.submit("a")
    world.tokens_from("d1", "a", 0, [7, 8])
    world.join_all(*others)
    return world


def moving_world(*others: str, reason: pb.MoveReason.ValueType = pb.MOVE_DRAINING, **config: Any) -> CoreWorld:
    """And it is to move to d2 under number 1."""
    world = decoding_world("d2", *others, **config)
    move = world.ask_to_move("d1", "a", reason=reason)
    assert move is not None and (move.next_attempt, move.target.node.name) == (1, "d2")
    world.sent.clear()
    return world


@pytest.mark.covers("R04", "R19", "D08")
def test_a_branch_moves_and_its_stream_has_neither_gap_nor_repeat() -> None:
    world = decoding_world("d2", preempt_retry_count=0)
    move = world.ask_to_move("d1", "a")
    assert move == pb.Move(
        key=pb.AttemptKey(request_id="a", attempt=0),
        next_attempt=1,
        target=pb.Target(node=pb.PeerId(name="d2", incarnation=1), grpc_address="host:d2"),
    )
    assert (world.load("d1"), world.load("d2")) == ((0, 1), (0, 1)), "it takes room at both"
    world.tokens_from("d1", "a", 2, [9])
    world.tokens_from("d2", "a", 0, [7, 8, 9, 10], attempt=1, from_receiver=True)  # all of the holder's, and one more
    assert (world.load("d1"), world.load("d2")) == ((0, 0), (0, 1))
    world.tokens_from("d1", "a", 2, [9])  # late: the sessions have no common order
    world.tokens_from("d2", "a", 4, [11], pb.FINISH_STOP, attempt=1, from_receiver=True)
    assert world.ends["a"] == Finished("a", "stop", (7, 8, 9, 10, 11))
    assert [what for name, what in world.counts if name == "moves"] == ["begun", "done"]
    assert not [what for name, what in world.counts if name == "retries"]
    assert {node for node, _ in world.cancels("a")} == {"d1"}, "and nothing else was stopped"
    world.assert_nothing_is_left()


@pytest.mark.covers("D08")
def test_until_the_targets_first_batch_the_holder_has_the_branch_to_its_end() -> None:
    world = moving_world()
    world.tokens_from("d1", "a", 2, [9], pb.FINISH_STOP)
    assert world.ends["a"] == Finished("a", "stop", (7, 8, 9))
    assert world.cancels("a") == [("d2", 1)], "a lease may be there"
    world.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, "there is no other"),
        ({"weights": "others"}, "it may not exchange KV"),
        ({"max_model_len": 10}, "it is too small"),
        ({"draining": True}, "it is about to end, too"),
        ({"broken": True}, "it is not there"),
        ({"full": True}, "it has no room"),
        ({"slots": True}, "it has no slot"),
    ],
)
@pytest.mark.covers("D08")
def test_nobody_is_named_who_cannot_take_it(change: dict[str, Any], why: str) -> None:
    world = decoding_world()
    kinds = {name: change[name] for name in ("weights", "max_model_len") if name in change}
    if change:
        entry = node_entry("d2", pb.ROLE_DECODE, **kinds, max_num_seqs=1 if "slots" in change else 4)
        entry.draining = "draining" in change
        world.join(entry)
    if "broken" in change:
        world.feed(SessionBroken(ref("d2")))
    if "full" in change:
        world.feed(LoadReported(ref("d2"), pb.LoadReport(blocks_used=10, blocks_leased=6)))
    if "slots" in change:
        world.submit("b")
    move = world.ask_to_move("d1", "a")
    assert move is not None and not move.HasField("target") and move.next_attempt == 0, why
    assert move.retry_after_ms > 0
    world.tokens_from("d1", "a", 2, [9], pb.FINISH_STOP)
    assert world.ends["a"] == Finished("a", "stop", (7, 8, 9))


@pytest.mark.covers("D08", "R18")
def test_a_target_that_is_left_alone_for_its_failures_is_better_than_none_and_worse_than_one_without_room() -> None:
    world = decoding_world(breaker_failures=1)
    for name in ("d2", "d3"):  # each has died once, and is back
        world.join_all(name)
        world.feed(SessionLost(ref(name)))
        world.feed(SessionUp(ref(name)))
        world.now += 0.1
    world.join(node_entry("d4", pb.ROLE_DECODE))
    world.feed(LoadReported(ref("d4"), pb.LoadReport(blocks_used=16)))
    waits = world.ask_to_move("d1", "a")
    assert waits is not None and not waits.HasField("target"), "d4 may have room in a moment"
    world.feed(NodeUnlisted(ref("d4")))
    move = world.ask_to_move("d1", "a")
    assert move is not None and move.target.node.name == "d2", "whose time is over first: else all is computed again"
    world.tokens_from("d2", "a", 0, [7, 8, 9], pb.FINISH_LENGTH, attempt=1, from_receiver=True)
    assert world.ends["a"] == Finished("a", "length", (7, 8, 9))
    world.assert_nothing_is_left()


@pytest.mark.covers("R04", "D08")
def test_who_asks_again_is_told_of_another_node_and_under_another_number() -> None:
    world = moving_world("d3")
    again = world.ask_to_move("d1", "a")
    assert again is not None and (again.next_attempt, again.target.node.name) == (2, "d3")
    assert world.cancels("a") == [("d2", 1)]
    assert (world.load("d1"), world.load("d2"), world.load("d3")) == ((0, 1), (0, 0), (0, 1))
    world.tokens_from("d2", "a", 0, [66], attempt=1, from_receiver=True)
    assert world.tokens["a"] == [7, 8], "that move came to nothing"
    third = world.ask_to_move("d1", "a")
    assert third is not None and not third.HasField("target"), "both have just failed"
    world.pass_time(0.6)
    fourth = world.ask_to_move("d1", "a")
    assert fourth is not None and fourth.next_attempt == 3
    world.abort("a")
    assert set(world.cancels("a")[-3:]) == {("p1", 3), ("d1", 3), (fourth.target.node.name, 3)}
    world.assert_nothing_is_left()


@pytest.mark.covers("R04")
def test_after_moves_that_came_to_nothing_the_next_attempt_has_a_number_of_its_own() -> None:
    world = moving_world()
    world.error_from("d1", "a", pb.PREEMPTED, completion_token_ids=[7, 8, 9])
    assert sorted(world.cancels("a")) == [("d1", 1), ("d2", 1), ("p1", 1)]
    ((_, dispatch),) = world.dispatches("a")
    assert (dispatch.attempt, list(dispatch.branches[0].generated_token_ids)) == (2, [7, 8, 9])
    world.tokens_from("d2", "a", 0, [7], attempt=1, from_receiver=True)
    world.tokens_from(dispatch.target.node.name, "a", 3, [10], pb.FINISH_LENGTH, attempt=2)
    assert world.ends["a"] == Finished("a", "length", (7, 8, 9, 10))
    world.assert_nothing_is_left()


@pytest.mark.covers("R19")
def test_a_branch_moves_so_often_and_then_stays() -> None:
    world = decoding_world("d2", max_moves=2)
    holder, other = "d1", "d2"
    for attempt in range(2):
        move = world.ask_to_move(holder, "a", attempt, reason=pb.MOVE_PREEMPTED)
        assert move is not None and move.target.node.name == other
        world.tokens_from(other, "a", 0, [7, 8], attempt=attempt + 1, from_receiver=True)
        holder, other = other, holder
    move = world.ask_to_move(holder, "a", 2)
    assert move is not None and not move.HasField("target")


@pytest.mark.covers("R19", "D08")
def test_moves_that_came_to_nothing_are_none_and_who_could_not_take_it_is_asked_in_turn() -> None:
    world = decoding_world("d2", max_moves=1, move_retry_s=0.5)
    for _ in range(3):
        move = world.ask_to_move("d1", "a")
        assert move is not None and move.target.node.name == "d2"
        world.pass_time(0.1)
        refused = world.ask_to_move("d1", "a")
        assert refused is not None and not refused.HasField("target"), "not named again before half a second"
        world.pass_time(0.5)
    move = world.ask_to_move("d1", "a")
    assert move is not None
    world.tokens_from("d2", "a", 0, [7, 8], attempt=move.next_attempt, from_receiver=True)
    move = world.ask_to_move("d2", "a", move.next_attempt)
    assert move is not None and not move.HasField("target"), "it has moved once, and stays"


@pytest.mark.covers("R21", "D08")
@pytest.mark.parametrize("is_heard", [True, False])
def test_after_an_unanswered_commit_the_targets_batch_decides_or_the_grace(is_heard: bool) -> None:
    world = moving_world(commit_unknown_grace_s=2.0)
    world.error_from("d1", "a", pb.TRANSFER_FAILED, commit_unanswered=True, completion_token_ids=[7, 8])
    assert (world.load("d1"), world.load("d2")) == ((0, 0), (0, 1))
    world.feed(SessionLost(ref("d1")))
    world.pass_time(1.9)
    assert not world.dispatches("a") and not world.cancels("a")
    world.join_all("d3")
    if is_heard:
        world.tokens_from("d2", "a", 0, [7, 8, 9], pb.FINISH_LENGTH, attempt=1, from_receiver=True)
        assert world.ends["a"] == Finished("a", "length", (7, 8, 9))
    else:
        world.pass_time(0.2)
        ((_, dispatch),) = world.dispatches("a")
        assert (dispatch.attempt, dispatch.target.node.name) == (2, "d3")
        assert sorted(world.cancels("a")) == [("d2", 1), ("p1", 1)]
        world.abort("a")
    world.assert_nothing_is_left()


@pytest.mark.covers("R10", "D08")
def test_a_lost_holders_branch_is_retried_at_once_though_the_target_may_have_it() -> None:
    world = moving_world("d3", reason=pb.MOVE_PREEMPTED)
    world.feed(SessionLost(ref("d1")))
    ((_, dispatch),) = world.dispatches("a")
    assert (dispatch.attempt, list(dispatch.branches[0].generated_token_ids)) == (2, [7, 8])
    assert sorted(world.cancels("a")) == [("d2", 1), ("p1", 1)]
    world.tokens_from("d2", "a", 0, [7, 8, 9], attempt=1, from_receiver=True)
    assert world.tokens["a"] == [7, 8]
    world.abort("a")
    world.assert_nothing_is_left()


@pytest.mark.covers("D08", "R21")
@pytest.mark.parametrize("is_taken", [True, False])
def test_a_holder_that_has_drained_and_gone_has_handed_over_what_its_target_is_about_to_say(is_taken: bool) -> None:
    world = moving_world("d3", preempt_retry_count=0, commit_unknown_grace_s=2.0)
    entry = node_entry("d1", pb.ROLE_DECODE)
    entry.draining = True
    world.feed(NodeListed(entry))
    world.feed(SessionLost(ref("d1")))
    world.pass_time(1.9)
    assert not world.dispatches("a") and not world.cancels("a")
    if is_taken:
        world.tokens_from("d2", "a", 0, [7, 8, 9], pb.FINISH_LENGTH, attempt=1, from_receiver=True)
        assert world.ends["a"] == Finished("a", "length", (7, 8, 9))
    else:  # it was killed meanwhile
        world.pass_time(0.2)
        ((_, dispatch),) = world.dispatches("a")
        assert (dispatch.attempt, list(dispatch.branches[0].generated_token_ids)) == (2, [7, 8])
        world.abort("a")
    world.assert_nothing_is_left()


@pytest.mark.covers("R10", "D08")
def test_a_lost_target_is_nothing_to_a_holder_that_goes_on() -> None:
    world = moving_world("d3", commit_unknown_grace_s=2.0)
    world.feed(SessionLost(ref("d2")))
    assert world.load("d2") == (0, 0)
    for index in range(2, 5):
        world.pass_time(1.9)
        world.tokens_from("d1", "a", index, [index])
    assert not world.dispatches("a") and not world.cancels("a")
    again = world.ask_to_move("d1", "a")
    assert again is not None and (again.next_attempt, again.target.node.name) == (2, "d3")
    world.tokens_from("d3", "a", 0, [7, 8, 2, 3, 4, 5], pb.FINISH_LENGTH, attempt=2, from_receiver=True)
    assert world.ends["a"] == Finished("a", "length", (7, 8, 2, 3, 4, 5))
    world.assert_nothing_is_left()


@pytest.mark.covers("R10", "R19", "D08")
def test_a_target_that_died_with_the_branch_is_known_by_the_holders_silence() -> None:
    world = moving_world("d3", commit_unknown_grace_s=2.0, max_nodes_lost=2)
    world.feed(SessionLost(ref("d2"), has_died=True))
    world.pass_time(1.9)
    assert not world.dispatches("a")
    world.pass_time(0.2)
    ((_, dispatch),) = world.dispatches("a")
    assert (dispatch.attempt, list(dispatch.branches[0].generated_token_ids)) == (2, [7, 8])
    world.tokens_from(dispatch.target.node.name, "a", 2, [9], attempt=2)
    world.pass_time(3.0)
    world.feed(SessionLost(ref(dispatch.target.node.name), has_died=True))
    assert world.ends["a"] == Finished("a", "pd_reschedule", (7, 8, 9)), "it was on two that died"
    world.assert_nothing_is_left()


@pytest.mark.covers("R04")
def test_what_the_prefill_node_says_during_a_move_is_late() -> None:
    """Its Commit was taken, or there would be nothing to move."""
    world = moving_world()
    world.error_from("p1", "a", pb.TRANSFER_FAILED, commit_unanswered=True)
    world.error_from("p1", "a", pb.CHECKSUM)
    world.tokens_from("p1", "a", 0, [66])
    world.feed(SessionLost(ref("p1")))
    assert not world.dispatches("a") and world.tokens["a"] == [7, 8]
    world.tokens_from("d2", "a", 0, [7, 8, 9], pb.FINISH_LENGTH, attempt=1, from_receiver=True)
    assert world.ends["a"] == Finished("a", "length", (7, 8, 9))


@pytest.mark.covers("R04")
@pytest.mark.parametrize(
    ("name", "attempt", "from_receiver"),
    [("d2", 0, True), ("d1", 1, True), ("d2", 2, True), ("d1", 0, False), ("d2", 1, False)],
)
def test_neither_end_of_a_move_can_speak_for_the_other(name: str, attempt: int, from_receiver: bool) -> None:
    world = moving_world()
    world.tokens_from(name, "a", 2, [55], attempt=attempt, from_receiver=from_receiver)
    assert world.tokens["a"] == [7, 8]


@pytest.mark.covers("R04", "D08")
def test_who_does_not_hold_a_branch_cannot_move_it() -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a")
    world.join_all("d2")
    assert world.ask_to_move("d1", "a") is None, "the receiver has said nothing yet"
    world.tokens_from("d1", "a", 0, [7])
    for name, attempt in (("p1", 0), ("d2", 0), ("d1", 1)):
        assert world.ask_to_move(name, "a", attempt) is None
        assert world.cancels("a")[-1] == (name, attempt), "what is not its work is not to go on"
    assert world.ask_to_move("d1", "a") is not None


def test_a_branch_stays_until_its_prompts_logprobs_are_there() -> None:
    """They come under its number."""
    score = [pb.TokenLogprobs(logprob=-1)]
    world = CoreWorld.with_nodes("p1", "d1", "d2")
    world.submit("a", num_logprobs=0, wants_prompt_logprobs=True)
    holder = world.dispatches("a")[0][1].target.node.name
    world.tokens_from(holder, "a", 0, [7], logprobs=score)
    move = world.ask_to_move(holder, "a")
    assert move is not None and not move.HasField("target")
    world.tokens_from("p1", "a", 0, [7], logprobs=score, prompt_logprobs=score * 2)
    move = world.ask_to_move(holder, "a")
    assert move is not None and move.HasField("target")


@pytest.mark.covers("D08")
def test_a_mixed_nodes_own_work_moves_to_another() -> None:
    world = CoreWorld.with_nodes("m1")
    world.submit("a")
    world.tokens_from("m1", "a", 0, [7], from_receiver=True)
    world.join_all("m2")
    move = world.ask_to_move("m1", "a")
    assert move is not None and move.target.node.name == "m2"
    world.tokens_from("m2", "a", 0, [7, 8], attempt=1, from_receiver=True)
    assert (world.load("m1"), world.load("m2")) == ((0, 0), (0, 1))
    world.feed(SessionLost(ref("m1")))
    world.tokens_from("m2", "a", 2, [9], pb.FINISH_LENGTH, attempt=1, from_receiver=True)
    assert world.ends["a"] == Finished("a", "length", (7, 8, 9))
    world.assert_nothing_is_left()


@pytest.mark.covers("A10", "R17")
@pytest.mark.parametrize("end", ["abort", "stop", "deadline"])
@pytest.mark.parametrize("phase", ["moving", "unknown", "doubted"])
def test_whatever_ends_a_branch_on_the_move_ends_it_wherever_it_may_be(end: str, phase: str) -> None:
    world = moving_world(commit_unknown_grace_s=2000.0)
    if phase == "unknown":
        world.error_from("d1", "a", pb.TRANSFER_FAILED, commit_unanswered=True)
    elif phase == "doubted":
        world.feed(SessionLost(ref("d2")))
    if end == "abort":
        world.abort("a")
    elif end == "stop":
        world.stop("a", 1)
    else:
        world.pass_time(601.0)
        assert world.failure("a").code == "DEADLINE"
    reached = {"p1", "d1"} if phase == "doubted" else {"p1", "d1", "d2"}
    assert {(name, 1) for name in reached} == set(world.cancels("a"))
    world.assert_nothing_is_left()
