"""Servers that share a socket, as workers of one router do: clients that come at once are not all one server's."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter

from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.http_server import BACKLOG, HttpServer

NUM_CLIENTS = 60
ASK = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
Counted = Counter[int]


def test_clients_that_come_at_once_are_shared_and_none_is_lost() -> None:
    answered_by = asyncio.run(_ask_all(num_servers=3))
    assert answered_by.total() == NUM_CLIENTS
    assert min(answered_by[server] for server in range(3)) >= NUM_CLIENTS // 6, answered_by


async def _ask_all(num_servers: int) -> Counted:
    listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    answered_by = Counted()

    def app_of(server: int) -> ASGIApp:
        async def answer(_scope: Scope, _receive: Receive, send: Send) -> None:
            answered_by[server] += 1
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body"})

        return answer

    with contextlib.ExitStack() as clients:
        # All wait in the kernel before anybody takes one.
        connections = [
            clients.enter_context(socket.create_connection(listener.getsockname())) for _ in range(NUM_CLIENTS)
        ]
        servers = [HttpServer(app_of(server), listener.dup()) for server in range(num_servers)]
        tasks = [asyncio.create_task(server.run()) for server in servers]
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(60):
            for connection in connections:
                connection.setblocking(False)
                await loop.sock_sendall(connection, ASK)
            for connection in connections:
                assert (await loop.sock_recv(connection, 100)).startswith(b"HTTP/1.1 204")
        for server in servers:
            server.stop()
        await asyncio.gather(*tasks)
    listener.close()
    return answered_by
