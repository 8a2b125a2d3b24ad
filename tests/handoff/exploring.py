"""What every exhaustive check of a machine does: find all worlds that can be reached, and each pair in one place of its table."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import TypeVar

import pytest

from connector.handoff import IllegalTransition

World = TypeVar("World", bound=Hashable)
State = TypeVar("State")
Event = TypeVar("Event")


def reachable(start: World, steps: Callable[[World], Iterable[World]]) -> set[World]:
    """`start`, and whatever some steps lead to."""
    seen, queue = {start}, deque([start])
    while queue:
        for world in steps(queue.popleft()):
            if world not in seen:
                seen.add(world)
                queue.append(world)
    return seen


def assert_in_one_place(
    pair: tuple[State, Event],
    table: Collection[tuple[State, Event]],
    ignored: Collection[tuple[State, Event]],
    step: Callable[[State, Event], object],
) -> None:
    """The pair is a row, an ignored race, or an error."""
    places = (pair in table) + (pair in ignored)
    assert places <= 1
    if places == 0:
        with pytest.raises(IllegalTransition):
            step(*pair)
