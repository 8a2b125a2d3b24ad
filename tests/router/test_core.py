"""The router's decisions by example: whom it asks, whom it believes, and how each request ends."""

from __future__ import annotations

import pytest

from proto import baton_pb2 as pb
from router.events import (
    Finished,
    FromNode,
    NodeListed,
    NodeMissed,
    NodeUnlisted,
    SessionBroken,
    SessionLost,
    SessionUp,
)
from tests.router.core_world import CoreWorld, node_entry, ref


@pytest.mark.covers("R15")
def test_prefill_load_is_released_when_the_receiver_speaks_and_the_branch_at_the_end() -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a")
    assert (world.load("p1"), world.load("d1")) == ((1, 0), (0, 1))
    assert world.node("p1")["prefill_tokens"] == 3
    world.tokens_from("p1", "a", 0, [7])
    assert world.load("p1") == (1, 0)
    world.tokens_from("d1", "a", 0, [7, 8])
    assert (world.load("p1"), world.load("d1")) == ((0, 0), (0, 1))
    world.tokens_from("d1", "a", 2, [99], pb.FINISH_STOP)
    assert world.ends["a"] == Finished("a", "stop", (7, 8, 99))
    assert not world.cancels("a")
    world.assert_nothing_is_left()


def test_a_branch_that_ends_at_the_prefill_node_needs_no_receiver() -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a", max_tokens=1)
    world.tokens_from("p1", "a", 0, [7], pb.FINISH_LENGTH)
    assert world.ends["a"] == Finished("a", "length", (7,))
    world.assert_nothing_is_left()


@pytest.mark.covers("R15")
def test_prefills_in_flight_are_capped_per_node_and_wait_in_order_of_arrival() -> None:
    world = CoreWorld.with_nodes("p1", "d1", max_inflight_prefills=1)
    for name in "abc":
        world.submit(name)
    assert [len(world.dispatches(name)) for name in "abc"] == [1, 0, 0]
    world.tokens_from("d1", "a", 0, [7])
    assert [len(world.dispatches(name)) for name in "abc"] == [1, 1, 0]
    world.error_from("p1", "b", pb.INTERNAL, retryable=False)
    assert [len(world.dispatches(name)) for name in "abc"] == [1, 1, 1]


def test_a_decode_node_gets_no_more_branches_than_it_has_sequences() -> None:
    world = CoreWorld()
    world.join(node_entry("p1", pb.ROLE_PREFILL))
    world.join(node_entry("d1", pb.ROLE_DECODE, max_num_seqs=1))
    world.submit("a")
    world.tokens_from("d1", "a", 0, [7])
    world.submit("b")
    assert not world.dispatches("b")
    world.abort("a")
    assert len(world.dispatches("b")) == 1


def test_a_full_queue_turns_requests_away_with_429_and_a_waiting_time() -> None:
    world = CoreWorld.with_nodes("p1", "d1", max_inflight_prefills=1, max_queue=2)
    for name in "abcd":
        world.submit(name)
    assert (world.failure("d").status, world.failure("d").code) == (429, "OVERLOADED")
    assert world.failure("d").retry_after_s
    assert world.core.snapshot()["queued"] == 2


def test_without_a_pair_that_could_ever_serve_it_a_request_is_refused_at_once() -> None:
    world = CoreWorld.with_nodes("p1")
    world.submit("a")
    assert (world.failure("a").status, world.failure("a").code) == (503, "NO_NODES")
    world.join(node_entry("d1", pb.ROLE_DECODE, weights="others"))
    world.submit("b")
    assert world.failure("b").code == "NO_NODES"
    assert world.core.missing() == ["no prefill node has the fingerprint of a decode node"]
    world.join(node_entry("d2", pb.ROLE_DECODE))
    world.submit("c")
    [(_, dispatch)] = world.dispatches("c")
    assert dispatch.target.node.name == "d2"


def test_a_request_longer_than_every_node_is_refused_by_its_length() -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a", max_tokens=253)
    world.submit("b", max_tokens=254)
    assert len(world.dispatches("a")) == 1
    assert world.failure("b").status == 400
    assert "257" in world.failure("b").message
    assert "256" in world.failure("b").message


def test_while_a_session_is_broken_its_node_gets_no_work_and_requests_wait() -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.feed(SessionBroken(ref("d1")))
    world.submit("a")
    assert not world.dispatches("a")
    world.feed(SessionUp(ref("d1")))
    assert len(world.dispatches("a")) == 1


@pytest.mark.covers("R13", "C08")
def test_a_node_that_the_registry_misses_works_on_while_its_session_is_up_and_is_forgotten_with_it() -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    for name in ("p1", "d1"):
        world.feed(NodeMissed(ref(name)))
    assert not world.core.missing() and world.core.max_total_tokens == 256
    world.submit("a")
    assert len(world.dispatches("a")) == 1
    world.feed(SessionBroken(ref("d1")))
    world.submit("b")
    assert not world.dispatches("b")
    world.feed(SessionUp(ref("d1")))
    assert len(world.dispatches("b")) == 1 and not world.hung_up
    world.feed(SessionLost(ref("d1")))
    assert world.hung_up == [ref("d1")], "nobody says where it is"
    world.feed(NodeUnlisted(ref("p1")))
    world.join_all("d2")
    world.submit("c")
    assert not world.dispatches("c"), "it has gone by its own word"


@pytest.mark.covers("D08", "R13")
@pytest.mark.parametrize("said", ["refusal", "at the sender", "move"])
def test_a_node_that_says_that_it_drains_gets_no_more_though_the_registry_has_not_heard(said: str) -> None:
    world = CoreWorld.with_nodes("p1", "d1", "d2")
    world.submit("a")
    node = world.dispatches("a")[0][1].target.node.name
    match said:
        case "refusal":
            world.error_from(node, "a", pb.DRAINING)
        case "at the sender":
            world.error_from("p1", "a", pb.DRAINING, node_id=node)
        case _:
            world.tokens_from(node, "a", 0, [7])
            world.ask_to_move(node, "a")
    for name in "bcd":
        world.submit(name)
        assert world.dispatches(name)[0][1].target.node.name != node
    world.feed(NodeUnlisted(ref(node)))
    world.feed(SessionLost(ref(node)))
    assert ("nodes_lost", "") not in world.counts, "it has ended as it said"


def test_an_unlisted_node_keeps_its_work_and_gets_no_more() -> None:
    world = CoreWorld.with_nodes("p1", "d1", "d2")
    world.submit("a")
    target = world.dispatches("a")[0][1].target.node.name
    world.feed(NodeUnlisted(ref(target)))
    for name in "bcd":
        world.submit(name)
        assert world.dispatches(name)[0][1].target.node.name != target
    world.tokens_from(target, "a", 0, [7], pb.FINISH_LENGTH)
    assert isinstance(world.ends["a"], Finished)
    assert not world.hung_up
    world.feed(SessionLost(ref(target)))
    assert world.hung_up == [ref(target)]


@pytest.mark.covers("C06")
@pytest.mark.parametrize("name", ["d1", "d9"])
def test_a_restarted_node_takes_the_place_of_the_process_before_it(name: str) -> None:
    """Under the same name, or under another at the same address."""
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a")
    world.feed(NodeListed(node_entry(name, pb.ROLE_DECODE, incarnation=2, address="host:d1")))
    assert world.hung_up == [ref("d1")]
    assert world.dialed == ["p1", "d1", name]
    world.tokens_from("d1", "a", 0, [7])  # of the dead incarnation
    world.feed(SessionUp(ref("d1")))
    assert not world.tokens and len(world.dispatches("a")) == 1, "nobody is there yet"
    world.feed(SessionUp(ref(name, 2)))
    (_, again) = world.dispatches("a")
    assert (again[1].target.node.incarnation, again[1].attempt) == (2, 1)


def test_a_process_that_moves_to_another_address_is_dialed_there_and_its_old_session_is_lost() -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a")
    world.feed(NodeListed(node_entry("d1", pb.ROLE_DECODE, address="elsewhere:1")))
    assert (world.hung_up, world.dialed) == ([ref("d1")], ["p1", "d1", "d1"])
    assert len(world.dispatches("a")) == 1
    world.feed(SessionUp(ref("d1")))
    assert world.dispatches("a")[1][1].target.grpc_address == "elsewhere:1"


@pytest.mark.covers("R07")
@pytest.mark.parametrize(("code", "status"), [(pb.INCOMPATIBLE, 502), (pb.DEADLINE, 504), (pb.INTERNAL, 500)])
def test_what_cannot_be_retried_fails_at_once(code: pb.ErrorCode.ValueType, status: int) -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a")
    world.error_from("p1", "a", code, retryable=False)
    assert world.failure("a").status == status
    world.assert_nothing_is_left()


@pytest.mark.covers("R21")
def test_after_an_unanswered_commit_the_receivers_batch_decides() -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a")
    world.tokens_from("p1", "a", 0, [7])
    world.error_from("p1", "a", pb.TRANSFER_FAILED, commit_unanswered=True)
    assert world.load("p1") == (0, 0)
    world.pass_time(1.9)
    world.tokens_from("d1", "a", 0, [7, 8])
    world.pass_time(10)
    world.tokens_from("d1", "a", 2, [9], pb.FINISH_LENGTH)
    assert world.ends["a"] == Finished("a", "length", (7, 8, 9))
    assert len(world.dispatches("a")) == 1


@pytest.mark.covers("R21")
def test_an_unanswered_commit_without_a_batch_is_retried_after_the_grace_and_not_before() -> None:
    world = CoreWorld.with_nodes("p1", "d1", "d2", commit_unknown_grace_s=2.0)
    world.submit("a")
    holder = world.dispatches("a")[0][1].target.node.name
    world.error_from("p1", "a", pb.TRANSFER_FAILED, commit_unanswered=True)
    world.feed(SessionLost(ref("p1")))
    world.join(node_entry("p2", pb.ROLE_PREFILL))
    world.pass_time(1.9)
    assert len(world.dispatches("a")) == 1 and not world.cancels("a")
    world.pass_time(0.2)
    assert world.cancels("a") == [(holder, 0)]
    assert [name for name, _ in world.dispatches("a")] == ["p1", "p2"]
    assert world.counts.count(("retries", "TRANSFER_FAILED")) == 1
    world.tokens_from(holder, "a", 0, [55])  # it ran after all: too late
    assert not world.tokens


@pytest.mark.covers("R21")
def test_once_the_receiver_has_spoken_the_sender_is_not_heard() -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a")
    world.tokens_from("d1", "a", 0, [7])
    world.error_from("p1", "a", pb.TRANSFER_FAILED, commit_unanswered=True)
    world.error_from("p1", "a", pb.CHECKSUM)
    world.feed(SessionLost(ref("p1")))
    assert not world.ends
    world.tokens_from("d1", "a", 1, [8], pb.FINISH_LENGTH)
    assert isinstance(world.ends["a"], Finished)


@pytest.mark.covers("A10")
def test_an_abort_cancels_at_both_nodes_and_is_final() -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a", timeout_s=9.0)
    world.tokens_from("d1", "a", 0, [7])
    world.pass_time(4.0)
    world.abort("a")
    assert sorted(world.cancels("a")) == [("d1", 0), ("p1", 0)]
    assert {message.cancel.ms_left for _, message in world.sent if message.HasField("cancel")} == {5000}
    world.error_from("d1", "a", pb.CANCELLED, retryable=False)
    world.abort("a")
    world.abort("never heard of")
    assert not world.ends
    world.assert_nothing_is_left()


@pytest.mark.covers("R17")
@pytest.mark.parametrize("phase", ["waiting", "prefilling", "decoding"])
def test_a_deadline_ends_a_request_in_every_phase_with_no_traffic(phase: str) -> None:
    world = CoreWorld.with_nodes("p1", "d1", max_inflight_prefills=1)
    if phase == "waiting":
        world.submit("before")
    world.submit("a", timeout_s=5.0)
    if phase == "decoding":
        world.tokens_from("d1", "a", 0, [7])
    world.pass_time(4.9)
    assert "a" not in world.ends
    world.pass_time(0.2)
    assert (world.failure("a").status, world.failure("a").code) == (504, "DEADLINE")
    assert len(world.cancels("a")) == (0 if phase == "waiting" else 2)


@pytest.mark.covers("R17")
def test_a_retry_gets_what_is_left_of_the_deadline() -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a", timeout_s=5.0)
    world.pass_time(2.0)
    world.error_from("p1", "a", pb.CHECKSUM)
    assert [dispatch.ms_left for _, dispatch in world.dispatches("a")] == [5000, 3000]


@pytest.mark.parametrize(
    ("first_index", "token_ids", "words"),
    [(2, [9], "index 2"), (0, [8], "reported as 7 and as 8"), (1, [1] * 8, "max_tokens")],
)
def test_tokens_that_cannot_be_right_end_the_request_and_its_attempt(
    first_index: int, token_ids: list[int], words: str
) -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a", max_tokens=8)
    world.tokens_from("p1", "a", 0, [7])
    world.tokens_from("d1", "a", first_index, token_ids)
    assert (world.failure("a").status, world.failure("a").code) == (500, "INTERNAL")
    assert words in world.failure("a").message
    assert sorted(world.cancels("a")) == [("d1", 0), ("p1", 0)]
    world.assert_nothing_is_left()


@pytest.mark.parametrize(("last", "reason"), [(99, "stop"), (5, "length")])
def test_an_error_that_brings_the_last_token_is_a_finish(last: int, reason: str) -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a", max_tokens=2)
    world.tokens_from("p1", "a", 0, [7])
    world.error_from("p1", "a", pb.CHECKSUM, completion_token_ids=[7, last])
    assert world.ends["a"] == Finished("a", reason, (7, last))
    world.assert_nothing_is_left()


def test_a_request_id_in_use_is_a_bug() -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a")
    with pytest.raises(ValueError, match="in use"):
        world.submit("a")


@pytest.mark.covers("X05", "H13")
def test_a_batch_of_more_branches_than_a_node_has_is_not_answered_one_by_one() -> None:
    """Each of them would be answered with a Cancel: four megabytes of empty ones made gigabytes of those."""
    world = CoreWorld.with_nodes("p", "d")
    strangers = [pb.BranchTokens(key=pb.AttemptKey(request_id="x", choice=i)) for i in range(2)]
    sent = pb.NodeMessage(tokens=pb.TokenBatch(branches=strangers * (1 << 15)))
    num_before = len(world.sent)
    world.feed(FromNode(ref("d"), sent))
    assert len(world.sent) > num_before
    num_before = len(world.sent)
    sent.tokens.branches.add()
    world.feed(FromNode(ref("d"), sent))
    assert len(world.sent) == num_before
    assert world.counts[-1] == ("stale_messages", "oversized")


def test_logprobs_that_are_kept_do_not_keep_the_message_that_they_came_in() -> None:
    """It has all branches' tokens of a step: of each token kilobytes would stay until its answer is whole."""
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a", num_logprobs=0)
    key = pb.AttemptKey(request_id="a")
    tokens = pb.BranchTokens(key=key, token_ids=[5], logprobs=[pb.TokenLogprobs(logprob=-1.5)])
    message = pb.NodeMessage(tokens=pb.TokenBatch(branches=[tokens], from_receiver=True))
    world.feed(FromNode(ref("d1"), message))
    message.tokens.branches[0].logprobs[0].logprob = 1.0
    assert [each.logprob for each in world.logprobs["a"]] == [-1.5]
