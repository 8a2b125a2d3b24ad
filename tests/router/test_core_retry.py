"""Attempts that end without a finish, by example: another follows where one may help, and then the branch's end."""

from __future__ import annotations

from itertools import pairwise

import pytest

from proto import baton_pb2 as pb
from router.events import Finished, SessionLost, SessionUp
from router.requests import LiveBranch
from router.waiting import WaitingBranches
from tests.router.core_world import CoreWorld, node_entry, ref

BROKEN = [pb.CHECKSUM, pb.TRANSFER_FAILED, pb.LEASE_EXPIRED]
RETRIED = [*BROKEN, pb.INTERNAL]
REFUSED = [pb.NO_BLOCKS, pb.BUSY]


@pytest.mark.parametrize("code", BROKEN)
def test_a_broken_handoff_costs_a_retry_goes_elsewhere_and_takes_the_tokens_along(code: pb.ErrorCode.ValueType) -> None:
    world = CoreWorld.with_nodes("p1", "p2", "d1", "d2")
    world.submit("a")
    world.tokens_from(world.dispatches("a")[0][0], "a", 0, [7])
    world.error_from(world.dispatches("a")[0][0], "a", code, completion_token_ids=[7, 8])
    [(first_prefill, first), (second_prefill, second)] = world.dispatches("a")
    assert second_prefill == first_prefill, "its prefix cache holds the prompt"
    assert second.target.node.name != first.target.node.name
    assert list(second.branches[0].generated_token_ids) == [7, 8] == world.tokens["a"]
    assert (second.attempt, second.branches[0].seed) == (1, first.branches[0].seed)


def test_a_node_that_failed_a_request_is_its_last_resort_even_if_it_is_the_least_loaded() -> None:
    world = CoreWorld.with_nodes("p1", "d1", "d2")
    world.submit("other")
    busy = world.dispatches("other")[0][1].target.node.name
    world.submit("a")
    idle = world.dispatches("a")[0][1].target.node.name
    assert idle != busy
    world.submit("third")
    world.abort("third" if world.dispatches("third")[0][1].target.node.name == idle else "never heard of")
    world.error_from("p1", "a", pb.CHECKSUM)
    assert world.dispatches("a")[1][1].target.node.name == busy
    world.error_from("p1", "a", pb.CHECKSUM, 1)
    world.pass_time(0.2)
    assert world.dispatches("a")[2][1].target.node.name in (idle, busy), "both failed it: either is better than none"


@pytest.mark.covers("R03", "R08")
@pytest.mark.parametrize("code", RETRIED)
def test_when_retries_run_out_with_nothing_generated_the_client_may_come_back(code: pb.ErrorCode.ValueType) -> None:
    world = CoreWorld.with_nodes("p1", "d1", preempt_retry_count=2)
    world.submit("a")
    for attempt in range(3):
        assert "a" not in world.ends
        world.error_from("p1", "a", code, attempt)
        world.pass_time(0.2)  # the second failure in a row rests for a while
    failure = world.failure("a")
    assert (failure.status, failure.code) == (503, pb.ErrorCode.Name(code)) and failure.retry_after_s
    assert failure.message == f"PD Error {pb.ErrorCode.Name(code)}"
    assert len(world.dispatches("a")) == 3
    world.assert_nothing_is_left()


@pytest.mark.covers("R03", "R05", "R08")
@pytest.mark.parametrize("phase", ["prefilling", "decoding"])
@pytest.mark.parametrize("code", RETRIED)
def test_when_retries_run_out_what_was_generated_is_handed_up(code: pb.ErrorCode.ValueType, phase: str) -> None:
    world = CoreWorld.with_nodes("p1", "d1", preempt_retry_count=2)
    world.submit("a")
    for attempt in range(3):
        assert "a" not in world.ends
        speaker = "p1" if phase == "prefilling" else "d1"
        world.tokens_from(speaker, "a", attempt, [attempt], attempt=attempt)
        world.error_from(speaker, "a", code, attempt, completion_token_ids=range(attempt + 1))
        world.pass_time(0.2)
    assert world.ends["a"] == Finished("a", "pd_reschedule", (0, 1, 2))
    assert [list(dispatch.branches[0].generated_token_ids) for _, dispatch in world.dispatches("a")] == [
        [],
        [0],
        [0, 1],
    ]
    world.assert_nothing_is_left()


@pytest.mark.covers("R08")
def test_what_was_resubmitted_is_handed_up_again() -> None:
    world = CoreWorld.with_nodes("p1", "d1", preempt_retry_count=0)
    world.submit("a", generated=[7, 8])
    world.error_from("p1", "a", pb.CHECKSUM, completion_token_ids=[7, 8])
    assert world.ends["a"] == Finished("a", "pd_reschedule", (7, 8))


@pytest.mark.parametrize("code", REFUSED)
def test_a_refusal_costs_no_retry_and_the_same_node_is_asked_again_after_a_while(code: pb.ErrorCode.ValueType) -> None:
    world = CoreWorld.with_nodes("p1", "d1", preempt_retry_count=0)
    world.submit("a")
    for attempt, wait_s in enumerate(
        (0.2, 0.2, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0)
    ):  # what the node asks, then ever less often
        world.error_from("p1", "a", code, attempt, retry_after_ms=200, node_id="d1")
        world.pass_time(wait_s - 0.01)
        assert len(world.dispatches("a")) == attempt + 1
        world.pass_time(0.02)
        assert len(world.dispatches("a")) == attempt + 2
    assert not world.ends


def test_a_refused_request_keeps_its_place_in_the_queue() -> None:
    world = CoreWorld.with_nodes("p1", "d1", max_inflight_prefills=1)
    for name in "abc":
        world.submit(name)
    world.error_from("p1", "a", pb.NO_BLOCKS, node_id="d1")
    assert not world.dispatches("b"), "what the large one finds no room for is not given to those behind it"
    world.pass_time(0.06)
    assert [len(world.dispatches(name)) for name in "abc"] == [2, 0, 0]


def test_a_refused_request_goes_to_another_decode_node_at_once() -> None:
    world = CoreWorld.with_nodes("p1", "d1", "d2")
    world.submit("a")
    world.error_from("p1", "a", pb.NO_BLOCKS, node_id=world.dispatches("a")[0][1].target.node.name)
    targets = [dispatch.target.node.name for _, dispatch in world.dispatches("a")]
    assert sorted(targets) == ["d1", "d2"]


def test_a_busy_prefill_node_is_held_off_rather_than_the_decode_node() -> None:
    world = CoreWorld.with_nodes("p1", "p2", "d1")
    world.submit("a")
    [(busy, _)] = world.dispatches("a")
    world.error_from(busy, "a", pb.BUSY, node_id=busy)
    assert sorted(name for name, _ in world.dispatches("a")) == ["p1", "p2"]


@pytest.mark.covers("R05", "Q02")
def test_a_preempted_branch_goes_on_in_a_new_attempt_with_all_that_it_said() -> None:
    world = CoreWorld.with_nodes("p1", "d1", "d2")
    world.submit("a", max_tokens=9)
    holder = world.dispatches("a")[0][1].target.node.name
    world.tokens_from(holder, "a", 0, [7, 8])
    world.error_from(holder, "a", pb.PREEMPTED, completion_token_ids=[7, 8, 9], retry_after_ms=50)
    second = world.dispatches("a")[1][1]
    assert second.attempt == 1 and list(second.branches[0].generated_token_ids) == [7, 8, 9]
    assert second.target.node.name != holder, "the other one may have room"
    world.tokens_from(second.target.node.name, "a", 3, [4], pb.FINISH_STOP, attempt=1)
    end = world.ends["a"]
    assert isinstance(end, Finished) and end.token_ids == (7, 8, 9, 4)


@pytest.mark.covers("R08", "R19")
@pytest.mark.parametrize(("retries", "num_attempts"), [(0, 1), (1, 33)])
def test_a_preemption_costs_a_small_part_of_a_retry_and_then_what_there_is_is_handed_up(
    retries: int, num_attempts: int
) -> None:
    world = CoreWorld.with_nodes("p1", "d1", preempt_retry_count=retries)
    world.submit("a")
    for attempt in range(num_attempts):
        assert "a" not in world.ends
        world.tokens_from("d1", "a", 0, [7], attempt=attempt)
        world.error_from("d1", "a", pb.PREEMPTED, attempt, completion_token_ids=[7])
        world.pass_time(2.1)
    assert world.ends["a"] == Finished("a", "pd_reschedule", (7,))
    world.assert_nothing_is_left()


@pytest.mark.covers("R10", "R05", "R19")
def test_a_lost_decode_nodes_streams_go_on_elsewhere_at_once_from_the_token_log() -> None:
    world = CoreWorld.with_nodes("p1", "p2", "d1", "d2")
    world.submit("a")
    ((prefill, first),) = world.dispatches("a")
    holder = first.target.node.name
    world.tokens_from(prefill, "a", 0, [7])
    world.tokens_from(holder, "a", 0, [7, 8, 9])
    world.feed(SessionLost(ref(holder)))
    _, (name, second) = world.dispatches("a")
    assert name == prefill, "its prefix cache holds the prompt"
    assert second.target.node.name != holder
    assert (second.attempt, list(second.branches[0].generated_token_ids)) == (1, [7, 8, 9])
    assert world.cancels("a") == [(prefill, 0)]
    world.tokens_from(holder, "a", 3, [66])  # said before it was lost, heard late
    world.tokens_from(second.target.node.name, "a", 3, [10], pb.FINISH_LENGTH, attempt=1)
    assert world.ends["a"] == Finished("a", "length", (7, 8, 9, 10))
    assert world.counts.count(("nodes_lost", "")) == 1
    world.assert_nothing_is_left()


@pytest.mark.covers("R11")
def test_a_lost_prefill_nodes_prompts_are_computed_by_another_and_what_it_had_handed_over_is_left_alone() -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a")
    world.submit("b")
    world.tokens_from("d1", "b", 0, [7])
    world.join(node_entry("p2", pb.ROLE_PREFILL))
    world.feed(SessionLost(ref("p1")))
    assert [name for name, _ in world.dispatches("a")] == ["p1", "p2"]
    assert world.cancels("a") == [("d1", 0)], "or the half-written lease would live on"
    assert len(world.dispatches("b")) == 1 and not world.cancels("b")
    assert world.load("d1") == (0, 2)


@pytest.mark.covers("R06")
def test_the_only_node_left_is_used_again_when_its_time_is_over() -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a")
    world.error_from("p1", "a", pb.CHECKSUM, retry_after_ms=300)
    world.pass_time(0.29)
    assert len(world.dispatches("a")) == 1
    world.pass_time(0.02)
    assert len(world.dispatches("a")) == 2


@pytest.mark.covers("R06")
def test_exclusion_is_of_a_process_not_of_a_name() -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a")
    world.error_from("p1", "a", pb.CHECKSUM, retry_after_ms=2000)
    world.join(node_entry("d1", pb.ROLE_DECODE, incarnation=2))
    assert world.dispatches("a")[1][1].target.node.incarnation == 2


@pytest.mark.covers("R06")
@pytest.mark.parametrize("code", [pb.CHECKSUM, pb.PREEMPTED])
def test_without_exclusion_the_node_may_be_taken_again_at_once(code: pb.ErrorCode.ValueType) -> None:
    world = CoreWorld.with_nodes("p1", "d1", preempt_retry_exclude_decode=False)
    world.submit("a")
    world.error_from("p1" if code == pb.CHECKSUM else "d1", "a", code, retry_after_ms=2000)
    assert len(world.dispatches("a")) == 2


@pytest.mark.covers("R03")
def test_the_first_retry_follows_at_once_and_those_that_follow_failures_in_a_row_wait() -> None:
    world = CoreWorld.with_nodes("p1", "d1", preempt_retry_count=9)
    world.submit("a")
    at = [0.0]
    for attempt in range(5):
        world.error_from("p1", "a", pb.INTERNAL, attempt, node_id="d1")
        while len(world.dispatches("a")) == attempt + 1:
            world.pass_time(0.01)
        at.append(world.now)
    waits = [later - earlier for earlier, later in pairwise(at)]
    assert waits[0] == 0
    for number, wait_s in enumerate(waits[1:]):
        assert 0.05 * 2**number <= wait_s <= 0.1 * 2**number + 0.02
    world.tokens_from("d1", "a", 0, [7], attempt=5)
    world.error_from("d1", "a", pb.INTERNAL, 5)
    assert len(world.dispatches("a")) == 7, "it had got through: this is a first failure again"


def test_a_branch_that_rests_holds_up_nobody() -> None:
    world = CoreWorld.with_nodes("p1", "d1", max_inflight_prefills=1)
    world.submit("a")
    world.submit("b")
    world.error_from("p1", "a", pb.INTERNAL, node_id="d1")
    world.error_from("p1", "a", pb.INTERNAL, 1, node_id="d1")
    assert (len(world.dispatches("a")), len(world.dispatches("b"))) == (2, 1)
    world.tokens_from("d1", "b", 0, [7])
    world.pass_time(0.2)
    assert len(world.dispatches("a")) == 3


def test_who_has_rested_takes_its_own_place_and_brings_no_other_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """With many at rest each one's timer would otherwise look at all of them."""
    world = CoreWorld.with_nodes("p1", "d1", breaker_failures=100)
    for name in "abcd":
        world.submit(name)
    for attempt in (0, 1):
        for name in "abcd":
            world.error_from("p1", name, pb.INTERNAL, attempt, node_id="d1")
    returned: list[str] = []
    put = WaitingBranches.put

    def noted(waiting: WaitingBranches, branch: LiveBranch) -> None:
        returned.append(branch.key.request_id)
        put(waiting, branch)

    monkeypatch.setattr(WaitingBranches, "put", noted)
    world.pass_time(0.2)
    assert [len(world.dispatches(name)) for name in "abcd"] == [3, 3, 3, 3]
    assert sorted(returned) == ["a", "b", "c", "d"]


def test_a_prefill_node_that_breaks_one_handoff_after_another_is_left() -> None:
    world = CoreWorld.with_nodes("p1", "p2", "d1", "d2", "d3")
    world.submit("a")
    for attempt in range(2):
        world.error_from(world.dispatches("a")[-1][0], "a", pb.TRANSFER_FAILED, attempt)
        world.pass_time(0.2)
    first, second, third = (name for name, _ in world.dispatches("a"))
    assert first == second != third


def test_an_internal_error_of_the_prefill_node_is_put_down_to_it() -> None:
    world = CoreWorld.with_nodes("p1", "p2", "d1")
    world.submit("a")
    ((first, _),) = world.dispatches("a")
    world.error_from(first, "a", pb.INTERNAL)
    assert world.dispatches("a")[1][0] != first


@pytest.mark.covers("R20")
def test_a_choice_that_is_given_up_takes_no_other_with_it() -> None:
    world = CoreWorld.with_nodes("p1", "d1", preempt_retry_count=0)
    world.submit("a", num_choices=2)
    world.tokens_from("d1", "a", 0, [7])
    world.error_from("p1", "a", pb.CHECKSUM, choice=1)
    assert world.ends == {"a/1": Finished("a", "pd_reschedule", (), 1)}
    world.tokens_from("d1", "a", 1, [8], pb.FINISH_LENGTH)
    assert world.ends["a"] == Finished("a", "length", (7, 8), 0)
    world.assert_nothing_is_left()


def test_an_attempt_that_nobody_meant_to_cancel_is_retried() -> None:
    """A decode node that has lost its session refuses the sender, before the router knows of it."""
    world = CoreWorld.with_nodes("p1", "d1", "d2")
    world.submit("a")
    world.error_from("p1", "a", pb.CANCELLED, retryable=False)
    assert len(world.dispatches("a")) == 2


@pytest.mark.covers("R07")
def test_an_abort_is_final_whatever_a_node_says_then() -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a")
    world.tokens_from("d1", "a", 0, [7])
    world.abort("a")
    world.error_from("d1", "a", pb.INTERNAL)
    world.feed(SessionLost(ref("d1")))
    assert len(world.dispatches("a")) == 1 and not world.ends
    world.assert_nothing_is_left()


# ---------------------------------------------------------------- no nodes


def test_while_the_last_node_of_a_role_restarts_requests_wait_and_new_ones_are_let_in() -> None:
    world = CoreWorld.with_nodes("p1", "d1", no_nodes_grace_s=10.0)
    world.submit("a")
    world.feed(SessionLost(ref("p1")))
    world.submit("b")
    world.submit("long", max_tokens=300)
    assert world.failure("long").status == 400, "no node of before could hold it"
    world.pass_time(9.9)
    assert world.ends.keys() == {"long"}
    world.join(node_entry("p1", pb.ROLE_PREFILL, incarnation=2))
    assert [len(world.dispatches(name)) for name in "ab"] == [2, 1]


def test_when_nobody_comes_back_who_has_got_nothing_is_told_and_streams_wait_on() -> None:
    world = CoreWorld.with_nodes("p1", "d1", no_nodes_grace_s=10.0)
    world.submit("a")
    world.submit("b")
    world.tokens_from("d1", "b", 0, [7])
    world.feed(SessionLost(ref("d1")))
    world.pass_time(5.0)
    world.submit("c")
    world.pass_time(4.9)
    assert not world.ends
    world.pass_time(0.2)
    assert {name: world.failure(name).code for name in world.ends} == {"a": "NO_NODES", "c": "NO_NODES"}
    world.submit("d")
    assert (world.failure("d").status, world.failure("d").code) == (503, "NO_NODES")
    world.pass_time(100.0)
    world.join(node_entry("d1", pb.ROLE_DECODE, incarnation=2))
    assert list(world.dispatches("b")[1][1].branches[0].generated_token_ids) == [7]
    world.submit("e")
    assert len(world.dispatches("e")) == 1


def test_a_draining_node_keeps_what_it_has_and_gets_no_more() -> None:
    world = CoreWorld.with_nodes("p1", "d1", "d2")
    world.submit("a")
    holder = world.dispatches("a")[0][1].target.node.name
    entry = node_entry(holder, pb.ROLE_DECODE)
    entry.draining = True
    world.join(entry)
    for name in "bcd":
        world.submit(name)
        assert world.dispatches(name)[0][1].target.node.name != holder
    world.tokens_from(holder, "a", 0, [7], pb.FINISH_LENGTH)
    assert isinstance(world.ends["a"], Finished)
    (other,) = {"d1", "d2"} - {holder}
    world.feed(SessionLost(ref(other)))
    assert world.core.missing() == ["no decode node can take work"]
    world.feed(SessionUp(ref(other)))
    assert world.core.missing() == []
