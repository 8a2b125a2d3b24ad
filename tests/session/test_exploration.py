"""Exhaustive check of a session over streams that are cut, swallowed, overtaken and half open, with a node that restarts.

The joint machine is finite (tests/session/world.py), so every reachable state is visited instead of sampled. That nothing is
delivered after LOST, and that what is unacknowledged stays within its bound, is asserted there, at each step.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from functools import cache

import pytest

from runtime.session import State
from runtime.session_events import Broken, Lost, OpenStream, Refused, Up
from tests.copied import Copier
from tests.session.clocks import tick_on_time
from tests.session.real_ends import TIMING
from tests.session.world import Budget, Cluster, World
from tests.thorough import IS_THOROUGH

# And how many worlds each has at least, and frames that are sent again in them.
SIZES = (
    {
        # Overflow, and a restarted node's sessions; a stream that is overtaken twice.
        Budget(streams=2, sessions=3, from_router=3, from_node=1): (75_000, 60),
        Budget(streams=3, sessions=2, from_router=1, from_node=1): (75_000, 40),
    }
    if IS_THOROUGH
    else {
        Budget(streams=2, sessions=3, from_router=2, from_node=1): (30_000, 40),  # the same, one at a time
        Budget(streams=2, sessions=3, from_router=3, from_node=0): (15_000, 20),
        Budget(streams=3, sessions=2, from_router=1, from_node=0): (15_000, 5),
    }
)
BUDGETS = tuple(SIZES)


@dataclass(frozen=True)
class Explored:
    cluster: Cluster
    moves: dict[World, tuple[World, ...]]  # without faults; has every reachable world


@cache
def explore(budget: Budget) -> Explored:
    cluster = Cluster(budget)
    queue = deque([cluster.start()])
    seen = set(queue)
    moves: dict[World, tuple[World, ...]] = {}
    while queue:
        world = queue.popleft()
        moves[world] = tuple(cluster.moves(world))
        for after in (*moves[world], *cluster.faults(world)):
            if after not in seen:
                seen.add(after)
                queue.append(after)
    return Explored(cluster, moves)


def of_session(messages: tuple[tuple[int, int], ...], session_id: int) -> list[int]:
    return [number for owner, number in messages if owner == session_id]


def is_settled(cluster: Cluster, world: World) -> bool:
    """Both ends agree: the same open session with everything delivered and acknowledged, or none at all."""
    if world.node is None:
        return False
    router = cluster.ends.router(world.router).end
    node = cluster.ends.node(world.node).book.sessions()
    if router is None or router.state is State.CONNECTING:
        return not node
    if router.state is not State.OPEN or len(node) != 1 or node[0].state is not State.ATTACHED:
        return False
    session_id = router.session_id
    return (
        node[0].session_id == session_id
        and of_session(world.got_up, session_id) == of_session(world.given_up, session_id)
        and of_session(world.got_down, session_id) == of_session(world.given_down, session_id)
        and router.snapshot()["unacknowledged"] == node[0].snapshot()["unacknowledged"] == 0
    )


@pytest.mark.covers("R12", "C06")
@pytest.mark.parametrize("budget", BUDGETS)
def test_every_message_is_delivered_at_most_once_and_in_order_in_every_reachable_world(budget: Budget) -> None:
    explored = explore(budget)
    for world in explored.moves:
        for given, got in ((world.given_up, world.got_up), (world.given_down, world.got_down)):
            for session_id in {owner for owner, _ in got}:
                delivered = of_session(got, session_id)
                assert delivered == of_session(given, session_id)[: len(delivered)]
    num_worlds, num_resent = SIZES[budget]
    assert len(explored.moves) > num_worlds
    ends = explored.cluster.ends
    assert ends.num_resent > num_resent, "frames were really sent again"
    assert {OpenStream, Up, Broken, Refused, Lost} <= ends.outputs_seen


@pytest.mark.covers("R12")
@pytest.mark.parametrize("budget", BUDGETS)
def test_from_every_reachable_world_both_ends_can_still_come_to_agree(budget: Budget) -> None:
    """Without a further fault: everything is delivered and acknowledged on one session, or both ends have lost it."""
    explored = explore(budget)
    befores: dict[World, list[World]] = defaultdict(list)
    for world, afters in explored.moves.items():
        for after in afters:
            befores[after].append(world)
    queue = deque(world for world in explored.moves if is_settled(explored.cluster, world))
    can_settle = set(queue)
    while queue:
        for before in befores[queue.popleft()]:
            if before not in can_settle:
                can_settle.add(before)
                queue.append(before)
    assert can_settle == set(explored.moves)


@pytest.mark.covers("R12", "C10")
@pytest.mark.parametrize("budget", BUDGETS)
def test_each_end_alone_loses_a_silent_session_within_the_grace(budget: Budget) -> None:
    explored, copier = explore(budget), Copier()
    for router_key in {world.router for world in explored.moves}:
        router = copier.copied(explored.cluster.ends.router(router_key))
        if router.end is not None and router.end.state is not State.CONNECTING:
            tick_on_time(router.end, router.now + TIMING.grace_s)
            assert router.end.state is State.LOST
    for node_key in {world.node for world in explored.moves if world.node is not None}:
        node = copier.copied(explored.cluster.ends.node(node_key))
        for end in node.book.sessions():
            tick_on_time(end, node.now + TIMING.grace_s)
            assert end.state is State.LOST


@pytest.mark.covers("C06")
def test_a_restarted_node_never_hears_what_was_sent_to_the_old_one() -> None:
    explored = explore(BUDGETS[0])
    num_seen = 0
    for world in explored.moves:
        if (
            world.incarnation == 2
            and world.node is not None
            and explored.cluster.ends.router(world.router).incarnation == 1
        ):
            num_seen += 1  # the router has not heard of the restart yet, and may be dialing
            assert not explored.cluster.ends.node(world.node).book.sessions()
    assert num_seen > 1_000
