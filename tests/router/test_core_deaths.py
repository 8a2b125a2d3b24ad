"""Requests whose nodes die under them, by example: what may kill nodes is sent to few; who is only silent is no dead node."""

from __future__ import annotations

import pytest

from proto import baton_pb2 as pb
from router.events import Finished, NodeListed, SessionLost, SessionUp
from tests.router.core_world import CoreWorld, node_entry, ref


@pytest.mark.covers("R19", "R10")
@pytest.mark.parametrize("tokens", [[7, 8], []])
def test_a_request_that_was_on_two_nodes_when_they_died_is_handed_up_and_kills_no_third(tokens: list[int]) -> None:
    world = CoreWorld.with_nodes("p1", "d1", "d2", "d3")
    world.submit("a")
    for attempt in range(2):
        assert "a" not in world.ends
        holder = world.dispatches("a")[attempt][1].target.node.name
        if tokens:
            world.tokens_from(holder, "a", 0, tokens[: attempt + 1], attempt=attempt)
        world.feed(SessionLost(ref(holder), has_died=True))
        world.pass_time(3.0)
    if tokens:
        assert world.ends["a"] == Finished("a", "pd_reschedule", (7, 8))
    else:
        failure = world.failure("a")
        assert (failure.status, failure.code) == (503, "NODE_LOST") and failure.retry_after_s
    assert len(world.dispatches("a")) == 2
    world.assert_nothing_is_left()


@pytest.mark.covers("R19", "R10", "R08")
def test_nodes_that_are_silent_are_not_dead_and_cost_what_any_failure_does() -> None:
    world = CoreWorld.with_nodes("p1", "d1", "d2", max_nodes_lost=1, preempt_retry_count=3)
    world.submit("a")
    for attempt in range(4):
        assert "a" not in world.ends
        holder = world.dispatches("a")[attempt][1].target.node.name
        world.tokens_from(holder, "a", attempt, [attempt], attempt=attempt)
        world.feed(SessionLost(ref(holder)))
        world.pass_time(3.0)
        world.feed(SessionUp(ref(holder)))
    assert world.ends["a"] == Finished("a", "pd_reschedule", (0, 1, 2, 3))
    world.assert_nothing_is_left()


@pytest.mark.covers("R19", "C06")
@pytest.mark.parametrize("comes_as", ["d9", "d1"])
def test_a_process_that_another_has_replaced_by_name_or_address_has_died(comes_as: str) -> None:
    world = CoreWorld.with_nodes("p1", "d1", max_nodes_lost=1)
    world.submit("a")
    world.tokens_from("d1", "a", 0, [7])
    world.feed(NodeListed(node_entry(comes_as, pb.ROLE_DECODE, incarnation=2, address="host:d1")))
    assert world.ends["a"] == Finished("a", "pd_reschedule", (7,))


@pytest.mark.covers("R19")
def test_a_process_that_has_moved_to_another_address_has_not_died() -> None:
    world = CoreWorld.with_nodes("p1", "d1", max_nodes_lost=1)
    world.submit("a")
    world.tokens_from("d1", "a", 0, [7])
    world.join(node_entry("d1", pb.ROLE_DECODE, address="elsewhere:1"))
    assert "a" not in world.ends and len(world.dispatches("a")) == 2


@pytest.mark.covers("R19", "R10", "R11")
@pytest.mark.parametrize("found_apart_s", [0.0, 2.0])
def test_a_request_outlives_one_event_that_kills_its_pair_and_a_third_node_that_dies_of_it_is_the_last(
    found_apart_s: float,
) -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a")
    world.join_all("p2")
    world.feed(SessionLost(ref("p1"), has_died=True))
    assert [name for name, _ in world.dispatches("a")] == ["p1", "p2"], "d1 is dead as well, and nobody knows"
    world.pass_time(found_apart_s)
    world.join_all("d2", "d3")
    world.feed(SessionLost(ref("d1"), has_died=True))
    assert "a" not in world.ends
    world.pass_time(0.2)
    third = world.dispatches("a")[2][1].target.node.name
    world.tokens_from(third, "a", 0, [7], attempt=2)
    world.feed(SessionLost(ref(third), has_died=True))
    assert world.ends["a"] == Finished("a", "pd_reschedule", (7,))
    world.assert_nothing_is_left()
