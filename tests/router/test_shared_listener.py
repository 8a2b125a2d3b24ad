"""A listener that several processes take from: who are idle get as many, and closing it leaves nothing open."""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import ExitStack

import pytest
import uvloop

from runtime.shared_listener import SharedListener


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_of_connections_that_come_at_once_each_takes_one_in_a_turn(new_loop: type[asyncio.AbstractEventLoop]) -> None:
    taken = [0, 0]

    async def run() -> None:
        with ExitStack() as opened:
            listener = opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64))
            for _ in range(24):
                opened.enter_context(socket.create_connection(listener.getsockname()))
            ends = [opened.enter_context(listener.dup()) for _ in taken]

            def count(index: int) -> asyncio.Protocol:
                taken[index] += 1
                return asyncio.Protocol()

            servers = [SharedListener(lambda index=index: count(index), end) for index, end in enumerate(ends)]  # type: ignore[misc]
            async with asyncio.timeout(60):
                while sum(taken) < 24:  # noqa: ASYNC110 - turns are what counts here
                    await asyncio.sleep(0)
            for server in servers:
                server.close()
                await server.wait_closed()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())
    assert taken == [12, 12]


def test_closing_it_ends_handshakes_under_way_and_leaves_the_listener_to_others() -> None:
    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = SharedListener(
                asyncio.Protocol, listener, ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), 60.0
            )
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            async with asyncio.timeout(30):
                while not server._opening:  # noqa: ASYNC110 - no longer than until it is taken
                    await asyncio.sleep(0)
                server.close()
                await server.wait_closed()
                assert await reader.read() == b""
            writer.close()
            with socket.create_connection(listener.getsockname()):
                listener.settimeout(30)
                listener.accept()[0].close()

    uvloop.run(run())
