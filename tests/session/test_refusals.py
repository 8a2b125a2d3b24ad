"""What a node says in its log of a router that it refuses, and that dials twice a second while the registry names the node."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest

from runtime.session import Peer
from tests.session.ends import ROUTER, running_node, running_router, until
from tests.session.tcp_proxy import TcpProxy


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records]
    return [line for line in lines if "session_refused" in line and f"router={ROUTER.name}" in line]


@pytest.mark.covers("R12", "C06")
def test_a_router_that_dials_a_process_which_is_gone_is_told_of_once_and_again_behind_a_session(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        async with running_node() as node, TcpProxy(node.port) as proxy, running_router() as (dialer, router):
            older = Peer(node.peer.name, node.peer.incarnation - 1)
            for times in (1, 2):
                before = proxy.num_connections
                dialer.dial(replace(node, peer=older).entry(proxy.address))
                await until(lambda before=before: proxy.num_connections >= before + 4)  # type: ignore[misc]
                assert len(told(caplog)) == times
                dialer.dial(node.entry(proxy.address))
                await until(lambda times=times: router.count("up") == times)  # type: ignore[misc]

    with caplog.at_level(logging.INFO):
        asyncio.run(scenario())
