"""Dispatches that wait for their grammars: nothing is overtaken, nothing is lost, whatever comes meanwhile."""

from __future__ import annotations

import random

import pytest

from node.events import FromRouter, RouterId
from node.held import HeldDispatches
from proto import baton_pb2 as pb

ROUTERS = [RouterId("a", 1), RouterId("b", 2)]


def dispatch(router: RouterId, request_id: str, attempt: int, choices: list[int]) -> FromRouter:
    branches = [pb.Branch(choice=choice) for choice in choices]
    return FromRouter(
        router, pb.RouterMessage(dispatch=pb.Dispatch(request_id=request_id, attempt=attempt, branches=branches))
    )


def cancel(router: RouterId, request_id: str, choice: int, attempt: int) -> FromRouter:
    key = pb.AttemptKey(request_id=request_id, choice=choice, attempt=attempt)
    return FromRouter(router, pb.RouterMessage(cancel=pb.Cancel(key=key)))


@pytest.mark.covers("A14")
@pytest.mark.parametrize("seed", range(30))
def test_an_attempts_messages_keep_their_order_and_a_lost_routers_are_dropped(seed: int) -> None:
    """Against a list of all that came: of each attempt what is let in is what came, from its Dispatch on, in order."""
    draw = random.Random(seed)
    held = HeldDispatches()
    came: dict[tuple[RouterId, str], list[FromRouter]] = {}  # of each request
    let_in: dict[tuple[RouterId, str], list[FromRouter]] = {}
    waiting: dict[int, tuple[RouterId, str]] = {}
    for step in range(120):
        router = draw.choice(ROUTERS)
        match draw.choice(["dispatch", "cancel", "cancel", "release", "forget" if draw.random() < 0.2 else "release"]):
            case "dispatch":
                name = (router, f"r{step}")
                event = dispatch(router, name[1], 3, [0, 1])
                came[name], let_in[name] = [event], []
                waiting[held.hold(event)] = name
            case "cancel" if came:
                name = draw.choice([*came])
                event = cancel(name[0], name[1], draw.randrange(3), draw.choice([2, 3, 4]))
                key = event.message.cancel.key
                is_meant = name in waiting.values() and key.choice < 2 and key.attempt >= 3
                assert held.defers(event) == is_meant
                if is_meant:
                    came[name].append(event)
            case "release" if waiting:
                number = draw.choice([*waiting])
                name = waiting.pop(number)
                let_in[name] += held.release(number)
                assert let_in[name] == came[name]
                assert held.release(number) == []
            case "forget":
                held.forget(router)
                gone = [number for number, name in waiting.items() if name[0] == router]
                assert all(held.release(number) == [] for number in gone)
                waiting = {number: name for number, name in waiting.items() if number not in gone}
        assert len(held) == len(waiting)


def test_another_routers_cancel_waits_for_nobody() -> None:
    held = HeldDispatches()
    held.hold(dispatch(ROUTERS[0], "r", 0, [0]))
    assert not held.defers(cancel(ROUTERS[1], "r", 0, 0))
    assert not held.defers(FromRouter(ROUTERS[0], pb.RouterMessage(cache=pb.CacheAsk())))
    assert held.defers(cancel(ROUTERS[0], "r", 0, 0))


def test_a_cancel_stays_behind_every_attempt_that_it_ends() -> None:
    held = HeldDispatches()
    older, newer, newest = (dispatch(ROUTERS[0], "r", attempt, [0]) for attempt in (0, 1, 2))
    numbers = [held.hold(each) for each in (older, newer, newest)]
    ending = cancel(ROUTERS[0], "r", 0, 1)
    assert held.defers(ending)
    assert [held.release(number) for number in numbers] == [[older, ending], [newer, ending], [newest]]
