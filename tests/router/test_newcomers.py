"""New requests step aside for tokens that are here, one in a turn, and never for long."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router import newcomers
from router.core import RouterCore
from router.newcomers import MOST_S, Newcomers
from router.shell import RouterShell
from runtime.session import Peer, SessionTiming
from tests.router.test_written_at_once import SilentCore


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=60))
def test_they_begin_in_their_order_when_nothing_waits_or_they_have_waited_long_enough(
    turns: list[tuple[bool, bool]],
) -> None:
    known, aside, now = Newcomers[int](), list[tuple[int, float]](), 0.0
    for number, (comes, is_busy) in enumerate(turns):
        now += MOST_S / 4
        if comes:
            known.add(number, now)
            aside.append((number, now))
        may = aside and (not is_busy or now >= aside[0][1] + MOST_S)
        assert known.next(now, is_busy) == (aside.pop(0)[0] if may else None)
        assert len(known) == len(aside)


def test_every_event_that_waits_goes_before_a_new_request_and_one_that_has_gone_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(newcomers, "MOST_S", 60.0)  # a turn of the loop may take longer than the true one

    async def scenario() -> None:
        core, order = SilentCore(), list[str]()
        shell = RouterShell(cast(RouterCore, core), Peer("router", 1), SessionTiming())

        async def begin(name: str) -> None:
            await shell.step_aside()
            order.append(f"{name} behind {len(core.received)}")

        aside = [asyncio.create_task(begin(name)) for name in "abc"]
        for node in ("d", "e", "f"):
            shell.on_broken(Peer(node, 1))
        await asyncio.sleep(0)
        aside[1].cancel()
        for _ in range(8):
            await asyncio.sleep(0)
        assert order == ["a behind 3", "c behind 3"]
        await shell.close()

    asyncio.run(scenario())


def test_a_router_that_is_never_idle_takes_new_requests() -> None:
    async def scenario() -> None:
        core = SilentCore()
        shell = RouterShell(cast(RouterCore, core), Peer("router", 1), SessionTiming())
        newcomer, loop = asyncio.create_task(shell.step_aside()), asyncio.get_running_loop()
        began_at = loop.time()
        while not newcomer.done() and loop.time() < began_at + 60:
            for _ in range(2):  # one is taken in a turn
                shell.on_broken(Peer("d", 1))
            await asyncio.sleep(0)
        assert newcomer.done() and loop.time() >= began_at + MOST_S
        await shell.close()

    asyncio.run(scenario())
