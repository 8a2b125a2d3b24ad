"""The fence: a message of another attempt, branch or node changes nothing, and is cancelled where something may still run."""

from __future__ import annotations

import pytest

from proto import baton_pb2 as pb
from router.events import Finished
from tests.router.core_world import CoreWorld, node_entry


@pytest.mark.covers("R04")
def test_messages_of_older_attempts_change_nothing_are_counted_and_cancelled() -> None:
    world = CoreWorld.with_nodes("p1", "d1", "d2")
    world.submit("a")
    first = world.dispatches("a")[0][1].target.node.name
    world.error_from("p1", "a", pb.CHECKSUM)
    assert sorted(world.cancels("a")) == sorted([("p1", 0), (first, 0)])
    [_, (_, second)] = world.dispatches("a")
    assert second.attempt == 1
    world.sent.clear()
    world.tokens_from(first, "a", 0, [55])
    world.error_from(first, "a", pb.INTERNAL)
    assert world.cancels("a") == [(first, 0)]
    assert world.counts.count(("stale_messages", "tokens")) == 1
    assert world.counts.count(("stale_messages", "error")) == 1
    world.tokens_from(second.target.node.name, "a", 0, [7], pb.FINISH_LENGTH, attempt=1)
    assert world.ends["a"] == Finished("a", "length", (7,))
    world.tokens_from(first, "a", 1, [56])
    assert world.cancels("a") == [(first, 0), (first, 0)]


@pytest.mark.covers("R04")
@pytest.mark.parametrize("speaker", ["p2", "d2"])
def test_a_node_that_is_not_the_attempts_is_not_believed(speaker: str) -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a")
    world.join(node_entry("p2", pb.ROLE_PREFILL))
    world.join(node_entry("d2", pb.ROLE_DECODE))
    world.tokens_from(speaker, "a", 0, [55], pb.FINISH_LENGTH)
    world.error_from(speaker, "a", pb.INTERNAL)
    assert not world.ends
    assert not world.tokens
    assert len(world.dispatches("a")) == 1


@pytest.mark.covers("R04")
def test_on_the_same_nodes_an_older_attempt_is_told_from_the_newer_by_its_number_alone() -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a")
    world.error_from("p1", "a", pb.CHECKSUM)
    assert len(world.dispatches("a")) == 2
    world.sent.clear()
    world.tokens_from("p1", "a", 0, [55], attempt=0)
    world.tokens_from("d1", "a", 0, [55], pb.FINISH_LENGTH, attempt=0)
    world.tokens_from("d1", "a", 0, [55], attempt=2)
    world.error_from("p1", "a", pb.INTERNAL, attempt=0, retryable=False)
    assert not world.tokens
    assert not world.ends
    assert world.load("p1") == (1, 0)
    assert world.cancels("a") == [("p1", 0), ("d1", 0), ("d1", 2)]


@pytest.mark.covers("R04")
@pytest.mark.parametrize("attempt", [0, 2])
def test_who_decodes_is_believed_for_its_own_attempt_alone(attempt: int) -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a")
    world.error_from("p1", "a", pb.CHECKSUM)
    world.tokens_from("d1", "a", 0, [55], attempt=1)
    world.tokens_from("d1", "a", 1, [66], pb.FINISH_LENGTH, attempt=attempt)
    assert world.tokens == {"a": [55]} and not world.ends
    assert ("d1", attempt) in world.cancels("a")


@pytest.mark.covers("R04")
def test_a_branch_that_nobody_asked_for_is_not_believed() -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a")
    world.tokens_from("d1", "a", 0, [55], choice=1)
    assert not world.tokens


@pytest.mark.covers("R04", "R21")
@pytest.mark.parametrize(("name", "from_receiver"), [("p1", True), ("d1", False)])
def test_neither_node_of_a_pair_can_speak_for_the_other(name: str, from_receiver: bool) -> None:
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a")
    world.tokens_from(name, "a", 0, [55], from_receiver=from_receiver)
    assert not world.tokens
    assert world.load("p1") == (1, 0)
