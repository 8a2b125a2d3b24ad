"""The bell of a task that waits: no ring is lost, and none wakes it twice."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from runtime.bell import Bell


def run(test: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(10):
            await test

    asyncio.run(limited())


async def turn() -> None:
    """Let everybody who can go on do so."""
    for _ in range(3):
        await asyncio.sleep(0)


def test_rings_while_nobody_waits_are_kept_as_one() -> None:
    async def test() -> None:
        bell = Bell()
        bell.ring()
        bell.ring()
        await bell.wait()
        waiting = asyncio.create_task(bell.wait())
        await turn()
        assert not waiting.done()
        bell.ring()
        await waiting

    run(test())


def test_a_ring_wakes_who_waits_once_however_often_it_comes_before_it_has_its_turn() -> None:
    async def test() -> None:
        bell = Bell()
        waiting = asyncio.create_task(bell.wait())
        await turn()
        bell.ring()
        bell.ring()
        await waiting
        assert not bell.is_rung

    run(test())


def test_a_ring_that_came_to_nobody_any_more_is_the_next_ones() -> None:
    async def test() -> None:
        bell = Bell()
        waiting = asyncio.create_task(bell.wait())
        await turn()
        waiting.cancel()
        await asyncio.wait((waiting,))
        bell.ring()
        await bell.wait()

    run(test())
