"""Circuit breaking: every row of the machine, and what the router does with it."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from proto import baton_pb2 as pb
from proto.attempt_key import BranchKey
from router.breaker import (
    CLOSED,
    Breakers,
    BreakerTiming,
    Circuit,
    Closed,
    Open,
    Probing,
    after_failure,
    after_leaving,
    after_placing,
    is_avoided,
)
from router.events import SessionLost
from tests.router.core_world import CoreWorld, node_entry, ref

TIMING = BreakerTiming(num_failures=2, first_s=1.0, longest_s=4.0)
KEY, OTHER = BranchKey("a", 0), BranchKey("b", 0)

# Each row of the machine, at time 10: what it was, what happens, what it is then, and whether the node is avoided then.
ROWS: list[tuple[Circuit, str, Circuit, bool]] = [
    (CLOSED, "a fails", Closed(frozenset("a")), False),
    (Closed(frozenset("a")), "a fails", Closed(frozenset("a")), False),
    (Closed(frozenset("b")), "a fails", Open(11.0, 1), True),
    (CLOSED, "a is placed", CLOSED, False),
    (CLOSED, "a leaves", CLOSED, False),
    (Open(11.0, 1), "a fails", Open(11.0, 1), True),
    (Open(11.0, 1), "a is placed", Open(11.0, 1), True),
    (Open(11.0, 1), "a leaves", Open(11.0, 1), True),
    (Open(10.0, 1), "a is placed", Probing(KEY, 1), True),
    (Probing(KEY, 1), "a fails", Open(12.0, 2), True),
    (Probing(KEY, 2), "a fails", Open(14.0, 3), True),
    (Probing(KEY, 9), "a fails", Open(14.0, 10), True),
    (Probing(OTHER, 1), "a fails", Open(12.0, 2), True),
    (Probing(KEY, 1), "a is placed", Probing(KEY, 1), True),
    (Probing(KEY, 1), "a leaves", Open(10.0, 1), False),
    (Probing(OTHER, 1), "a leaves", Probing(OTHER, 1), True),
]
STEPS: dict[str, Callable[[Circuit], Circuit]] = {
    "a fails": lambda circuit: after_failure(circuit, "a", 10.0, TIMING),
    "a is placed": lambda circuit: after_placing(circuit, KEY, 10.0),
    "a leaves": lambda circuit: after_leaving(circuit, KEY, 10.0),
}


@pytest.mark.covers("R18")
@pytest.mark.parametrize(("before", "what", "after", "avoided"), ROWS)
def test_every_row(before: Circuit, what: str, after: Circuit, avoided: bool) -> None:
    assert STEPS[what](before) == after
    assert is_avoided(after, 10.0) == avoided


@pytest.mark.covers("R18")
def test_whatever_happens_a_node_is_tried_again_by_one_at_a_time_and_one_success_takes_it_back() -> None:
    """Every history of six steps."""
    for history in itertools.product(("fails", "again", "placed", "leaves", "waits", "succeeds"), repeat=6):
        breakers, now, num_placed = Breakers(TIMING), 0.0, 0
        for step, what in enumerate(history):
            if what == "fails":
                breakers.failed("d", f"r{step}", now)
            elif what == "again":
                breakers.failed("d", "r", now)
            elif what == "placed":
                may_be_tried = breakers.state("d") == "open" and "d" not in breakers.avoided(now)
                breakers.placed("d", BranchKey(f"r{num_placed}", 0), now)
                num_placed += 1
                assert not may_be_tried or "d" in breakers.avoided(now), "a second one may try it"
            elif what == "leaves":
                breakers.left("d", BranchKey(f"r{num_placed - 1}", 0), now)
            elif what == "waits":
                now += TIMING.longest_s
                assert breakers.state("d") == "probing" or "d" not in breakers.avoided(now)
            else:
                breakers.succeeded("d")
                assert (breakers.state("d"), breakers.avoided(now)) == ("closed", [])
    assert breakers.state("never heard of") == "closed"


def test_the_least_bad_comes_first_and_names_that_never_return_are_forgotten() -> None:
    breakers = Breakers(BreakerTiming(1, 1.0, 4.0))
    for number, name in enumerate(("x", "y")):
        breakers.failed(name, "a", float(number))
    breakers.placed("x", KEY, 1.0)
    breakers.failed("x", "a", 1.0)
    assert breakers.avoided(1.5) == ["y", "x"], "x has failed twice"
    for number in range(3000):
        breakers.failed(f"n{number}", "a", 1.0)
    assert len(breakers.avoided(1.5)) == 1024


def test_names_that_failed_once_crowd_out_none_that_are_left_alone() -> None:
    breakers = Breakers(BreakerTiming(2, 1.0, 4.0))
    for what in ("a", "b"):
        breakers.failed("x", what, 0.0)
    for number in range(3000):
        breakers.failed(f"n{number}", "loss", 0.0)
    assert (breakers.avoided(0.5), breakers.first_rest_end(0.5)) == (["x"], 1.0)
    breakers.failed("n2999", "b", 0.5)
    assert breakers.avoided(0.6) == ["x", "n2999"], "its first failure is remembered"


@pytest.mark.covers("R18", "C11")
def test_what_a_node_failed_at_in_another_role_is_not_held_against_it() -> None:
    breakers = Breakers(BreakerTiming(1, 1.0, 4.0))
    for role, state in ((1, "open"), (1, "open"), (2, "closed"), (1, "closed")):
        breakers.listed("x", role)
        if role == 1 and state == "open":
            breakers.failed("x", "a", 1.0)
        assert breakers.state("x") == state
    for number in range(3000):
        breakers.listed(f"n{number}", 1)
    breakers.failed("x", "a", 1.0)
    breakers.listed("x", 2)
    assert breakers.state("x") == "open", "in which role it was is forgotten with those that never return"

    world = CoreWorld.with_nodes("p1", "d1", breaker_failures=1, preempt_retry_count=9)
    world.submit("a")
    world.error_from("d1", "a", pb.INTERNAL)
    assert world.counts.count(("circuits_opened", "")) == 1
    for role, state in ((pb.ROLE_DECODE, "open"), (pb.ROLE_MIXED, "closed")):
        world.feed(SessionLost(ref("d1")))
        world.join(node_entry("d1", role, incarnation=1 + role))
        assert world.core.snapshot()["circuits"] == {"p1": "closed", "d1": state}


@pytest.mark.covers("R18")
def test_a_node_that_fails_request_after_request_is_avoided_probed_and_taken_back() -> None:
    world = CoreWorld.with_nodes("p1", "d1", breaker_failures=3, preempt_retry_count=9)
    for number in range(3):
        world.submit(f"r{number}")
        world.error_from("d1", f"r{number}", pb.INTERNAL)
        world.abort(f"r{number}")
    assert world.counts.count(("circuits_opened", "")) == 1
    world.submit("alone")
    assert len(world.dispatches("alone")) == 1, "there is no other: better the least bad than none"
    world.abort("alone")
    world.join_all("d2")
    for number in range(3, 7):
        world.submit(f"r{number}")
        assert world.dispatches(f"r{number}")[0][1].target.node.name == "d2"
    world.submit("waits")
    assert not world.dispatches("waits"), "who works is full; that is no reason to go where requests fail"
    world.pass_time(1.1)
    world.abort("waits")
    world.submit("probe")
    assert world.dispatches("probe")[0][1].target.node.name == "d1"
    world.submit("another")
    assert not world.dispatches("another"), "one at a time"
    world.abort("probe")
    assert world.dispatches("another")[0][1].target.node.name == "d1", "its place is free again"
    world.submit("third")
    assert not world.dispatches("third")
    world.tokens_from("d1", "another", 0, [7])
    assert world.dispatches("third")[0][1].target.node.name == "d1"


@pytest.mark.covers("R18")
def test_one_request_that_no_node_can_serve_opens_no_circuit() -> None:
    world = CoreWorld.with_nodes("p1", "d1", breaker_failures=2, preempt_retry_count=9)
    world.submit("a")
    for attempt in range(10):
        world.error_from("d1", "a", pb.INTERNAL, attempt)
        world.pass_time(10.0)
    assert world.has_ended("a")
    assert ("circuits_opened", "") not in world.counts


@pytest.mark.covers("R18")
def test_a_node_that_dies_at_each_start_is_left_alone_and_several_branches_on_it_count_as_one_death() -> None:
    world = CoreWorld.with_nodes("p1", "d1", "d2", breaker_failures=2)
    for incarnation in range(1, 3):
        world.join_all("d1", incarnation=incarnation)
        for number in range(4):
            world.submit(f"r{incarnation}{number}")
        assert ("circuits_opened", "") not in world.counts
        world.feed(SessionLost(ref("d1", incarnation)))
    assert world.counts.count(("circuits_opened", "")) == 1


@pytest.mark.covers("R18")
def test_a_node_that_nobody_needs_stays_alone_though_one_of_another_role_is_needed() -> None:
    """The least bad of all comes first, and it is of no help: who decodes is what is lacking."""
    world = CoreWorld.with_nodes("p1", "p2", breaker_failures=1, preempt_retry_count=9)
    world.join(node_entry("d1", pb.ROLE_DECODE, max_num_seqs=100))
    for name in ("d1", "d1", "p1"):
        for number in range(100):
            request_id = f"{name} {world.now} {number}"
            world.submit(request_id)
            prefill = world.dispatches(request_id)[0][0]
            if name in (prefill, "d1"):
                world.error_from(name, request_id, pb.INTERNAL)
                world.abort(request_id)
                break
            world.abort(request_id)
        world.pass_time(1.1 if name == "d1" and world.counts.count(("circuits_opened", "")) == 1 else 0.0)
    circuits = world.core.snapshot()["circuits"]
    assert circuits == {"p1": "open", "p2": "closed", "d1": "open"}
    for number in range(6):
        world.submit(f"r{number}")
    assert {world.dispatches(f"r{number}")[0][0] for number in range(6)} == {"p2"}
