"""The router's core and nodes that do both: one node is the whole pair, or half of one."""

from __future__ import annotations

import pytest

from proto import baton_pb2 as pb
from router.events import Finished, NodeListed, SessionLost
from tests.router.core_world import CoreWorld, node_entry, ref


@pytest.mark.covers("R01", "R04")
def test_one_mixed_node_is_a_cluster_and_the_target_of_its_own_dispatches() -> None:
    world = CoreWorld.with_nodes("m1")
    assert world.core.missing() == [] and world.core.max_total_tokens == 256
    world.submit("a", max_tokens=2)
    ((name, dispatch),) = world.dispatches("a")
    assert (name, dispatch.target.node.name, dispatch.target.grpc_address) == ("m1", "m1", "host:m1")
    assert world.load("m1") == (1, 1)
    world.tokens_from("m1", "a", 0, [7], from_receiver=True)
    assert world.load("m1") == (0, 1), "its prompt is done"
    world.tokens_from("m1", "a", 1, [8], pb.FINISH_LENGTH, from_receiver=True)
    end = world.ends["a"]
    assert isinstance(end, Finished) and end.token_ids == (7, 8)
    world.assert_nothing_is_left()


@pytest.mark.covers("R04", "A10")
def test_a_mixed_node_hears_of_an_abort_once() -> None:
    world = CoreWorld.with_nodes("m1")
    world.submit("a")
    world.abort("a")
    assert world.cancels("a") == [("m1", 0)]
    world.assert_nothing_is_left()


@pytest.mark.covers("R12")
@pytest.mark.parametrize("num_tokens", [0, 1])
def test_a_lost_mixed_nodes_requests_go_on_before_and_behind_their_first_token(num_tokens: int) -> None:
    """As the receiver it owned the attempt: that it was the sender as well must not make its loss count for nothing."""
    world = CoreWorld.with_nodes("m1")
    world.submit("a")
    if num_tokens:
        world.tokens_from("m1", "a", 0, [7], from_receiver=True)
    world.feed(SessionLost(ref("m1")))
    world.join(node_entry("m2", pb.ROLE_MIXED))
    (_, (name, again)) = world.dispatches("a")
    assert (name, again.attempt, list(again.branches[0].generated_token_ids)) == ("m2", 1, [7] * num_tokens)


def test_a_busy_mixed_node_is_asked_again_and_then_decodes_for_itself() -> None:
    world = CoreWorld.with_nodes("m1")
    world.submit("a")
    world.error_from("m1", "a", pb.BUSY, retry_after_ms=100)
    assert len(world.dispatches("a")) == 1
    world.pass_time(1.0)
    (_, second) = world.dispatches("a")
    assert (second[0], second[1].attempt, second[1].target.node.name) == ("m1", 1, "m1")


@pytest.mark.covers("R01")
def test_mixed_nodes_go_together_with_nodes_of_either_role() -> None:
    world = CoreWorld.with_nodes("p1", "m1")
    world.submit("a")
    world.submit("b")
    pairs = {(name, d.target.node.name) for request in "ab" for name, d in world.dispatches(request)}
    assert pairs == {("p1", "m1"), ("m1", "m1")}
    world = CoreWorld.with_nodes("m1")
    world.join(node_entry("d1", pb.ROLE_DECODE, max_num_seqs=9))
    for number in range(6):  # four fill the mixed node's slots, so that it prefills for the other
        world.submit(f"r{number}")
    targets = [world.dispatches(f"r{number}")[0][1].target.node.name for number in range(6)]
    assert targets == ["m1"] * 4 + ["d1"] * 2
    assert world.load("m1") == (6, 4) and world.load("d1") == (0, 2)


def test_of_nodes_with_equal_prompts_the_one_that_decodes_less_gets_the_next() -> None:
    world = CoreWorld.with_nodes("m1")
    world.submit("a")
    world.tokens_from("m1", "a", 0, [7], from_receiver=True)
    world.join(node_entry("m2", pb.ROLE_MIXED))
    for request_id in "bcd":
        world.submit(request_id)
        world.tokens_from("m2", request_id, 0, [7], pb.FINISH_STOP, from_receiver=True)
        assert world.dispatches(request_id)[0][0] == "m2"


def test_what_is_missing_is_a_role_or_a_common_fingerprint() -> None:
    world = CoreWorld.with_nodes("p1")
    assert world.core.missing() == ["no decode node can take work"]
    world.feed(NodeListed(node_entry("m1", pb.ROLE_MIXED)))
    assert world.core.missing() == ["no decode node can take work"], "it is not up yet"
    world.join(node_entry("m2", pb.ROLE_MIXED, weights="others", max_model_len=100))
    assert world.core.missing() == [] and world.core.max_total_tokens == 100
