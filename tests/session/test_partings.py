"""Sessions that one end closes in good order: what was said last arrives, and the other end knows."""

from __future__ import annotations

import asyncio
import time

import pytest

from runtime import session_dialer
from runtime.session_dialer import PARTING_S
from runtime.session_events import Loss
from tests.session.ends import FOUND_S, NODE, PATIENT, ROUTER, TIMING, connected, to_node, until


@pytest.mark.covers("R12", "C10")
def test_a_router_that_goes_silent_or_hangs_up_is_lost_to_the_node() -> None:
    async def scenario() -> None:
        async with connected(TIMING, PATIENT) as (node, _, dialer, router):
            dialer.send(*NODE, to_node(0))
            await until(lambda: node.handler.got == [0])
            dialer.hang_up(*NODE)
            assert await until(lambda: node.handler.lost == [ROUTER]) < 2 * FOUND_S
            assert [what for what, _ in router.happened] == ["up"], "who hangs up wants to hear no more"
            node.send(1)  # dropped

    asyncio.run(scenario())


@pytest.mark.covers("R12", "C03")
def test_what_a_router_says_last_arrives_before_it_hangs_up_and_who_does_not_answer_holds_it_up_for_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        async with connected() as (node, proxy, dialer, _):
            proxy.black_hole()
            dialer.send(*NODE, to_node(0))
            began = time.monotonic()
            closing = asyncio.create_task(dialer.close())
            took_s = await until(closing.done)
            assert time.monotonic() - began >= PARTING_S and took_s < FOUND_S
            assert not node.handler.got
        monkeypatch.setattr(session_dialer, "PARTING_S", 60.0)  # this process may be held up for longer than a moment
        async with connected() as (node, _, dialer, _):
            for number in range(100):
                dialer.send(*NODE, to_node(number))
            await dialer.close()
            assert node.handler.got == list(range(100))

    asyncio.run(scenario())


@pytest.mark.covers("R12")
def test_a_session_that_the_node_ends_is_lost_to_the_router_at_once() -> None:
    async def scenario() -> None:
        async with connected() as (node, _, _, router):
            await node.sessions.close()
            await until(lambda: router.count("lost") == 1, PATIENT.grace_s / 2)
            assert router.losses == [Loss.HUNG_UP]

    asyncio.run(scenario())
