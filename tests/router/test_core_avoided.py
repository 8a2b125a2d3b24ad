"""Who has just failed a request is its last resort in every role, however much of the prompt it has cached, however idle it is."""

from __future__ import annotations

import pytest

from proto import baton_pb2 as pb
from router.events import LoadReported
from tests.router.core_world import CoreWorld, ref
from tests.router.test_core_caches import PROMPT, asked, following, holds


def homes_until(world: CoreWorld, failing: str, code: pb.ErrorCode.ValueType, said_of: str) -> list[str]:
    """Which nodes compute the prompt, one after the other, while one of them fails it."""
    homes: list[str] = []
    for attempt in range(6):
        dispatches = world.dispatches("a")
        if len(dispatches) == attempt:
            return homes  # given up
        home, dispatch = dispatches[-1]
        homes.append(home)
        if home != failing:
            return homes
        world.error_from(failing, "a", code, dispatch.attempt, node_id=said_of or dispatch.target.node.name)
        world.pass_time(6.0)
    return homes


@pytest.mark.covers("R02", "R03")
@pytest.mark.parametrize("num_cached", [0, 1, 3])
@pytest.mark.parametrize(
    ("code", "said_of", "expected"),
    [
        (pb.INTERNAL, "p1", ["p1", "p2"]),
        (pb.TRANSFER_FAILED, "", ["p1", "p1", "p2"]),  # first the decode node is blamed, which it says
    ],
)
def test_a_prefill_node_that_fails_gets_no_retry_while_another_is_there_whatever_it_has_cached(
    code: pb.ErrorCode.ValueType, said_of: str, expected: list[str], num_cached: int
) -> None:
    world = following("p1", "p2", "d1", "d2")
    asked(world)
    if num_cached:
        holds(world, "p1", num_cached)
    world.submit("a", prompt=PROMPT)
    assert homes_until(world, "p1", code, said_of) == expected
    assert "a" not in world.ends


@pytest.mark.covers("R02")
def test_a_prefill_node_that_failed_is_used_again_where_it_is_the_only_one() -> None:
    world = CoreWorld.with_nodes("p1", "d1", "d2")
    world.submit("a")
    assert homes_until(world, "p1", pb.INTERNAL, "p1")[:2] == ["p1", "p1"]


@pytest.mark.covers("R02", "R03")
@pytest.mark.parametrize(("nodes", "next_home"), [(("p1", "l1", "d2"), "p1"), (("p1", "l1", "l2"), "l2")])
def test_a_decode_node_that_fails_short_prompts_of_its_own_gets_no_retry(
    nodes: tuple[str, ...], next_home: str
) -> None:
    world = CoreWorld.with_nodes(*nodes, local_prefill_max_tokens=32)
    if "l2" in nodes:
        world.feed(LoadReported(ref("l2"), pb.LoadReport(waiting=1)))  # l1 is the one to take
        world.submit("a")
        assert world.dispatches("a")[0][0] == "l1"
        world.feed(LoadReported(ref("l2"), pb.LoadReport(waiting=0)))
    else:
        world.submit("a")
    assert homes_until(world, "l1", pb.INTERNAL, "l1") == ["l1", next_home]
