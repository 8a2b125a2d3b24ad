"""Whoever leaves in the middle of an answer is found, also with requests sent ahead of it; a body that is none is answered."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import uvloop
from starlette.types import Receive, Scope, Send

from runtime.http_protocol import DIRECT, DirectWay
from runtime.http_server import HttpServer

BOUND_S = 100.0
BODY = b"POST /receive HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n"


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: a\r\n\r\n".encode()


@dataclass
class Patient:
    """An application that says nothing until its client has gone: by `receive` or, at /direct, by what goes around ASGI."""

    port: int = 0
    paths: list[str] = field(default_factory=list)
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope["path"])
        self.has_begun.set()
        if scope["path"] == "/direct":
            way: DirectWay = scope["extensions"][DIRECT]
            gone = asyncio.Event()
            way.when_lost(gone.set)
            await gone.wait()
        else:
            while (await receive())["type"] != "http.disconnect":
                pass
        self.has_ended.set()


@asynccontextmanager
async def serving() -> AsyncIterator[Patient]:
    app, listener = Patient(), socket.create_server(("127.0.0.1", 0))
    app.port = listener.getsockname()[1]
    http = HttpServer(app, listener)
    task = asyncio.create_task(http.run())
    try:
        async with asyncio.timeout(BOUND_S):
            yield app
    finally:
        http.stop()
        await task


@pytest.mark.covers("A10", "X05")
@pytest.mark.parametrize("path", ["/receive", "/direct"])
@pytest.mark.parametrize("num_ahead", [0, 1, 3])
def test_who_leaves_is_found_whatever_was_sent_ahead_of_the_answer(
    path: str, num_ahead: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with serving() as app:
            _, writer = await asyncio.open_connection("127.0.0.1", app.port)
            writer.write(get(path))
            await app.has_begun.wait()
            for _ in range(num_ahead):
                writer.write(get("/later"))
                await asyncio.sleep(0.02)
            writer.close()
            await app.has_ended.wait()
            assert app.paths == [path], "what was sent ahead is for nobody"

    uvloop.run(run())
    assert not caplog.records, "who leaves is no error"


@pytest.mark.covers("X05")
def test_a_body_that_breaks_off_in_nonsense_is_answered_before_the_connection_ends() -> None:
    async def run() -> None:
        async with serving() as app:
            reader, writer = await asyncio.open_connection("127.0.0.1", app.port)
            writer.write(BODY)
            await app.has_begun.wait()
            writer.write(b"zz\r\n")
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400 ") and json.loads(body)["error"]["code"] == "malformed"
            await app.has_ended.wait()
            writer.close()

    uvloop.run(run())


@pytest.mark.covers("X05")
def test_nonsense_behind_a_request_that_waits_is_no_answer_to_the_one_ahead() -> None:
    async def run() -> None:
        async with serving() as app:
            reader, writer = await asyncio.open_connection("127.0.0.1", app.port)
            writer.write(get("/receive"))
            await app.has_begun.wait()
            writer.write(BODY + b"zz\r\n")
            assert await reader.read() == b""
            await app.has_ended.wait()
            writer.close()

    uvloop.run(run())
