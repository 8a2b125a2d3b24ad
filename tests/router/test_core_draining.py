"""What a node that said that it will end leaves behind when it has: nothing failed, so nothing is paid for it."""

from __future__ import annotations

import pytest

from proto import baton_pb2 as pb
from router.events import NodeDrains, NodeListed, NodeUnlisted, SessionLost
from tests.router.core_world import ROLES, CoreWorld, node_entry, ref


def drain(world: CoreWorld, name: str, incarnation: int = 1) -> None:
    """The node says that it will end."""
    entry = node_entry(name, ROLES[name[0]], incarnation=incarnation)
    entry.draining = True
    world.feed(NodeListed(entry))


def end(world: CoreWorld, name: str, incarnation: int = 1) -> None:
    """Its process has gone."""
    world.feed(NodeUnlisted(ref(name, incarnation)))
    world.feed(SessionLost(ref(name, incarnation)))


def costs(world: CoreWorld) -> list[str]:
    """What was paid, or put down to a node."""
    return [name for name, _ in world.counts if name in ("retries", "nodes_lost", "circuits_opened")]


@pytest.mark.covers("D08", "R19", "C07")
@pytest.mark.parametrize("which", ["prefill", "decode"])
def test_who_was_on_its_way_to_a_node_that_has_drained_goes_elsewhere_at_no_cost_as_often_as_that_happens(
    which: str,
) -> None:
    """A retry budget of none, and no node may be lost: both would end the request."""
    world = CoreWorld.with_nodes("p1", "d1", preempt_retry_count=0, max_nodes_lost=1, breaker_failures=1)
    world.submit("a")
    name = {"prefill": "p1", "decode": "d1"}[which]
    for incarnation in range(1, 4):
        drain(world, name, incarnation)
        end(world, name, incarnation)
        assert not world.ends
        world.join_all(name, incarnation=incarnation + 1)
        world.pass_time(1.0)
        assert len(world.dispatches("a")) == incarnation + 1, "placed anew, on the process that is there now"
    assert costs(world) == []
    world.abort("a")
    world.assert_nothing_is_left()


@pytest.mark.covers("D08")
def test_what_a_node_had_to_give_up_at_its_deadline_goes_on_from_the_log_at_no_cost() -> None:
    world = CoreWorld.with_nodes("p1", "d1", preempt_retry_count=0, max_nodes_lost=1)
    world.submit("a")
    world.tokens_from("d1", "a", 0, [7, 8])
    drain(world, "d1")
    end(world, "d1")
    world.join_all("d2")
    world.pass_time(1.0)
    (_, first), (_, second) = world.dispatches("a")
    assert (second.attempt, list(second.branches[0].generated_token_ids)) == (first.attempt + 1, [7, 8])
    assert costs(world) == []


@pytest.mark.covers("R03", "D08")
def test_a_node_that_dies_without_having_said_so_costs_a_retry() -> None:
    world = CoreWorld.with_nodes("p1", "d1", "d2")
    world.submit("a")
    holder = world.dispatches("a")[0][1].target.node.name
    drain(world, {"d1": "d2", "d2": "d1"}[holder])
    end(world, holder)
    assert costs(world) == ["nodes_lost", "retries"]


@pytest.mark.covers("D08", "R04")
@pytest.mark.parametrize(
    ("speaker", "named", "drains"),
    [
        ("d1", "d1", "d1"),
        ("d1", "p1", "d1"),
        ("d1", "d2", "d1"),
        ("p1", "p1", "p1"),
        ("p1", "", "p1"),
        ("p1", "d2", "p1"),
        ("p1", "d1", "d1"),
    ],
    ids=lambda name: name or "nobody",
)
def test_a_node_says_for_itself_that_it_drains_and_passes_on_what_its_receiver_says(
    speaker: str, named: str, drains: str
) -> None:
    """Who is put down as draining gets no work until the registry says something new of it: a broken node must not do that."""
    world = CoreWorld.with_nodes("p1", "d1")
    world.submit("a")
    if speaker == "d1":
        world.tokens_from("d1", "a", 0, [7])
    world.join_all("d2")
    world.error_from(speaker, "a", pb.DRAINING, node_id=named)
    assert [node.ref.name for node, _ in world.core.nodes() if node.drains] == [drains]


@pytest.mark.covers("D08")
@pytest.mark.parametrize("says", ["by its errors", "in its entry"])
def test_that_a_node_drains_is_news_once_though_each_attempt_that_it_gives_back_says_so(
    says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each news all who are put aside are looked at again: hundreds, where a node with long contexts has gone."""
    world = CoreWorld.with_nodes("p1", "p2", "d1", "d2")
    for number in range(3):
        world.submit(f"r{number}")
    held = [name for name in ("r0", "r1", "r2") if world.dispatches(name)[0][1].target.node.name == "d1"]
    assert len(held) > 1
    looks = list[float]()
    waiting = world.core._waiting
    recall = waiting.recall

    def looked() -> None:
        looks.append(world.now)
        recall()

    monkeypatch.setattr(waiting, "recall", looked)
    if says == "in its entry":
        drain(world, "d1")
        assert looks
        looks.clear()
    for name in held:
        world.error_from("d1", name, pb.DRAINING)
    assert len(looks) == (says == "by its errors")
    assert [world.dispatches(name)[-1][1].target.node.name for name in held] == ["d2"] * len(held)
    world.feed(NodeListed(node_entry("d1", pb.ROLE_DECODE)))
    looks.clear()
    assert world.core._nodes.receive(NodeDrains(ref("d1"))).is_news, "it had come back to work"
