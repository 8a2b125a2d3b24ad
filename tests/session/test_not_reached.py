"""What a router's log says of a node that it does not reach: nothing else says why the session with it is still dialing."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest

from runtime.session_dialer import SessionDialer
from tests.session.ends import NODE, PATIENT, running_node, running_router, until
from tests.session.tcp_proxy import TcpProxy


def told(caplog: pytest.LogCaptureFixture, event: str) -> list[str]:
    return [text for record in caplog.records if event in (text := record.getMessage())]


async def until_it_has_tried_often(dialer: SessionDialer) -> None:
    def has() -> bool:
        peers = dialer.snapshot()["peers"]
        assert isinstance(peers, dict)
        return float(peers[NODE.name]["backoff_s"]) >= PATIENT.backoff_max_s

    await until(has)


@pytest.mark.covers("R12")
def test_why_a_node_was_never_reached_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with running_node() as node, running_router() as (dialer, _):
            await node.server.stop(None)
            dialer.dial(node.entry())
            await until_it_has_tried_often(dialer)
            (line,) = told(caplog, "node_not_reached")
            assert f"node={NODE.name} " in line
            assert f"{node.entry().grpc_address} refuses connections" in line

    with caplog.at_level(logging.INFO):
        asyncio.run(scenario())


@pytest.mark.covers("R12")
def test_a_node_that_never_answers_is_told_of_and_once_it_was_up_its_losses_tell(
    caplog: pytest.LogCaptureFixture,
) -> None:
    timing = replace(PATIENT, dial_timeout_s=0.2)

    async def scenario() -> None:
        async with running_node() as node, TcpProxy(node.port) as proxy, running_router(timing) as (dialer, router):
            proxy.black_hole()
            dialer.dial(node.entry(proxy.address))
            await until(lambda: bool(told(caplog, "node_not_reached")))
            dialer.dial(node.entry())
            await until(lambda: router.count("up") == 1)
            await node.server.stop(None)
            await until(lambda: router.count("lost") == 1)
            await until_it_has_tried_often(dialer)
            (line,) = told(caplog, "node_not_reached")
            assert "no Hello within 0.2 s" in line
            assert "refuses connections" in told(caplog, "session_lost")[0]

    with caplog.at_level(logging.INFO):
        asyncio.run(scenario())
