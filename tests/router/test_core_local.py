"""Who computes a prompt where decode nodes may: a prefill node while there is one, but for short prompts; counted and said."""

from __future__ import annotations

from itertools import product

import pytest

from proto import baton_pb2 as pb
from router.events import (
    Failed,
    Finished,
    LoadReported,
    NodeListed,
    NodeUnlisted,
    SessionBroken,
    SessionLost,
    SessionUp,
)
from tests.router.core_world import CoreWorld, node_entry, ref

SHORT, LONG = [1] * 4, [1] * 100
PREFILL_NODES = ("none", "not up yet", "up", "full", "broken", "lost", "unlisted", "of other weights")
HERE = {"none", "not up yet", "lost", "unlisted", "of other weights"}  # there is no prefill node


def world_with(prefill: str, may_prefill: bool, max_tokens: int) -> CoreWorld:
    """One decode node, and a prefill node in this state."""
    world = CoreWorld(max_inflight_prefills=1, local_prefill_max_tokens=max_tokens)
    entry = node_entry("p1", pb.ROLE_PREFILL, weights="others" if prefill == "of other weights" else "w")
    match prefill:
        case "none":
            pass
        case "not up yet":
            world.feed(NodeListed(entry))
        case _:
            world.join(entry)
    world.join(node_entry("l1", pb.ROLE_DECODE, local_prefill=may_prefill))
    match prefill:
        case "full":
            world.submit("first", prompt=LONG)
        case "broken":
            world.feed(SessionBroken(ref("p1")))
        case "lost":
            world.feed(SessionLost(ref("p1")))
        case "unlisted":
            world.feed(NodeUnlisted(ref("p1")))
    return world


@pytest.mark.covers("R22")
@pytest.mark.parametrize(
    ("prefill", "may_prefill", "max_tokens", "is_short"),
    list(product(PREFILL_NODES, (True, False), (0, 8), (True, False))),
)
def test_a_decode_node_computes_prompts_that_are_short_or_that_nobody_else_would(
    prefill: str, may_prefill: bool, max_tokens: int, is_short: bool
) -> None:
    world = world_with(prefill, may_prefill, max_tokens)
    world.submit("a", prompt=SHORT if is_short else LONG)
    expected = {"up": ["handoff"], "full": [], "broken": []}.get(prefill, [])
    if may_prefill and prefill in HERE:
        expected = ["local_absent"]
    if may_prefill and is_short and max_tokens:
        expected = ["local_short"]
    skipped = 1 if prefill == "full" else 0
    assert [label for name, label in world.counts if name == "dispatches"][skipped:] == expected
    is_refused = prefill in HERE and not may_prefill
    if is_refused:
        world.pass_time(11.0)  # a prefill node that was there a moment ago is waited for
    assert isinstance(world.ends.get("a"), Failed) == is_refused
    for name, dispatch in world.dispatches("a"):
        assert (name, dispatch.target.node.name) == ("p1" if expected == ["handoff"] else "l1", "l1")
    is_served = may_prefill or prefill not in HERE
    assert bool(world.core.degraded()) == (may_prefill and prefill in HERE)
    if prefill != "broken":
        assert (world.core.missing() == []) == is_served
        assert world.core.max_total_tokens is not None or not is_served
    assert (len(world.degraded) % 2 == 1) == (may_prefill and prefill in HERE), "every change is told"


@pytest.mark.covers("R22")
def test_when_the_last_node_goes_too_nothing_has_become_better() -> None:
    world = CoreWorld.with_nodes("l1")
    world.feed(SessionLost(ref("l1")))
    assert world.degraded == [True] and world.core.missing()
    world.join(node_entry("l1", pb.ROLE_DECODE, incarnation=2, local_prefill=True))
    assert world.degraded == [True], "it was told"
    world.join(node_entry("p1", pb.ROLE_PREFILL))
    assert world.degraded == [True, False]


@pytest.mark.covers("R22", "R15")
def test_it_is_heard_as_the_receiver_and_a_prefill_node_that_comes_gets_the_next() -> None:
    world = CoreWorld.with_nodes("l1")
    world.submit("a", prompt=LONG, max_tokens=2)
    assert world.load("l1") == (1, 1)
    world.tokens_from("l1", "a", 0, [7])
    assert world.load("l1") == (0, 1), "its prompt is done"
    world.join(node_entry("p1", pb.ROLE_PREFILL))
    assert world.degraded == [True, False] and world.core.degraded() == []
    world.submit("b", prompt=LONG)
    assert [(name, each.target.node.name) for name, each in world.dispatches("b")] == [("p1", "l1")]
    world.tokens_from("l1", "a", 1, [8], pb.FINISH_LENGTH)
    end = world.ends["a"]
    assert isinstance(end, Finished) and end.token_ids == (7, 8)
    world.abort("b")
    world.assert_nothing_is_left()


@pytest.mark.covers("R22")
def test_prefill_nodes_that_are_all_full_do_not_spill_over_decode_nodes() -> None:
    world = CoreWorld.with_nodes("p1", "l1", "l2", max_inflight_prefills=2, local_prefill_max_tokens=8)
    for name in "abcd":
        world.submit(name, prompt=LONG)
    assert [len(world.dispatches(name)) for name in "abcd"] == [1, 1, 0, 0]
    world.feed(SessionLost(ref("p1")))
    world.pass_time(5.0)
    assert world.counts.count(("dispatches", "local_absent")) == 4, "those that waited, and those that were lost"
    assert [world.dispatches(name)[-1][0] for name in "cd"] == ["l1", "l2"], "with equal load they take turns"


@pytest.mark.covers("R22", "R18")
def test_where_every_prefill_node_is_left_alone_decode_nodes_compute_prompts() -> None:
    world = CoreWorld.with_nodes("p1", "l1", breaker_failures=1)
    world.submit("a", prompt=LONG)
    world.error_from("p1", "a", pb.INTERNAL)
    world.pass_time(0.5)
    world.submit("b", prompt=LONG)
    assert [(name, each.target.node.name) for name, each in world.dispatches("b")] == [("l1", "l1")]
    assert world.core.degraded() == [], "it is there, and tried again soon"


@pytest.mark.covers("R22")
def test_a_decode_node_computes_no_more_of_short_prompts_at_once_than_the_bound_and_none_where_somebody_waits() -> None:
    world = CoreWorld.with_nodes("p1", "l1", local_prefill_max_tokens=8)
    for name in "abc":
        world.submit(name, prompt=SHORT)
    assert [world.dispatches(name)[0][0] for name in "abc"] == ["l1", "l1", "p1"], "eight tokens are there"
    world.tokens_from("l1", "a", 0, [7])
    world.submit("d", prompt=SHORT)
    assert world.dispatches("d")[0][0] == "l1", "four are done"
    world.tokens_from("l1", "b", 0, [7])
    world.tokens_from("l1", "d", 0, [7])
    world.abort("a")
    world.feed(LoadReported(ref("l1"), pb.LoadReport(waiting=1)))
    world.submit("e", prompt=SHORT)
    assert world.dispatches("e")[0][0] == "p1", "a Reserve waits there: it is not overtaken"


@pytest.mark.covers("R22")
def test_short_counts_every_choice_and_all_that_a_branch_has_said() -> None:
    world = CoreWorld.with_nodes("p1", "l1", local_prefill_max_tokens=8)
    world.submit("two", prompt=SHORT, num_choices=2)
    world.submit("three", prompt=SHORT, num_choices=3)
    assert [world.dispatches(name)[0][0] for name in ("two", "three")] == ["l1", "p1"]
    world.abort("two")
    world.submit("more", prompt=SHORT, generated=[5] * 5, max_tokens=9)
    assert world.dispatches("more")[0][0] == "p1"


@pytest.mark.covers("R22", "R06")
def test_what_gave_way_on_a_decode_node_goes_on_elsewhere_with_all_that_it_said() -> None:
    world = CoreWorld.with_nodes("l1", "l2")
    world.submit("a", prompt=LONG)
    ((first, _),) = world.dispatches("a")
    world.tokens_from(first, "a", 0, [7])
    world.error_from(first, "a", pb.PREEMPTED, completion_token_ids=[7, 8])
    (_, (second, dispatch)) = world.dispatches("a")
    assert {first, second} == {"l1", "l2"} and dispatch.target.node.name == second
    assert list(dispatch.branches[0].generated_token_ids) == [7, 8] and dispatch.attempt == 1
    assert world.tokens["a"] == [7, 8]
    world.feed(SessionUp(ref("l1")))


@pytest.mark.covers("R22")
def test_who_has_no_room_for_a_prompt_of_its_own_is_not_asked_again_at_once() -> None:
    world = CoreWorld.with_nodes("l1")
    world.submit("a", prompt=LONG)
    world.error_from("l1", "a", pb.NO_BLOCKS, node_id="l1", retry_after_ms=1000)
    assert len(world.dispatches("a")) == 1
    world.pass_time(1.1)
    assert len(world.dispatches("a")) == 2
