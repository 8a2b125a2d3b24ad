"""What one connection may do to an HTTP server: heads, pipelines, trailers and waiting are bounded, and probes get through."""

from __future__ import annotations

import asyncio
import json
import socket
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import uvloop
from starlette.types import Receive, Scope, Send

from runtime.http_protocol import MAX_PIPELINED, SPARE_CONNECTIONS, HttpBounds
from runtime.http_server import HttpServer

BOUNDS = HttpBounds(max_connections=3, max_head_bytes=4096, head_timeout_s=30.0)
CLIENTS_KEEP_S = 5.5  # httpx and the OpenAI client: 5
GET = b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n"
HIDDEN = b"GET /hidden HTTP/1.1\r\nhost: a\r\n\r\n"  # a body that looks like a request
WISH = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"  # Java's HttpClient's
WISHING = b"POST / HTTP/1.1\r\nhost: a\r\nContent-Length: %d\r\n%b\r\n" % (len(HIDDEN), WISH)
LAST = GET.replace(b"host: a", b"host: a\r\nconnection: close")
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Served:
    """An application that answers with the size of the body, once it may."""

    port: int = 0
    refused: list[str] = field(default_factory=list)
    num_asked: int = 0
    paths: list[str] = field(default_factory=list)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    has_sent: asyncio.Event = field(default_factory=asyncio.Event)  # all that is long, or the connection has ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_asked += 1
        self.paths.append(scope["path"])
        await self.may_answer.wait()
        if scope["path"] == "/long":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(32):
                await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
            self.has_sent.set()
            return
        size = 0
        while scope["path"] != "/unread" and (message := await receive()) and message["type"] == "http.request":
            size += len(message["body"])
            if not message["more_body"]:
                break
        body = str(size).encode()
        length = str(len(body)).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
        await send({"type": "http.response.body", "body": body})

    async def connect(self, said: bytes = b"") -> Stream:
        """`said` is there before the server sees the connection, whose clock runs: this process may stand still between the two."""
        connection = socket.create_connection(("127.0.0.1", self.port))
        connection.sendall(said)
        return await asyncio.open_connection(sock=connection)

    async def say(self, *pieces: bytes) -> bytes:
        """What the server answers to these on a connection of their own, until it closes."""
        reader, writer = await self.connect(pieces[0] if pieces else b"")
        try:
            for piece in pieces[1:]:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            async with asyncio.timeout(100):
                return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.transport.abort()


@asynccontextmanager
async def served(bounds: HttpBounds = BOUNDS) -> AsyncIterator[Served]:
    app = Served()
    app.may_answer.set()
    listener = socket.create_server(("127.0.0.1", 0))
    app.port = listener.getsockname()[1]
    http = HttpServer(app, listener, bounds=bounds, on_refused=app.refused.append)
    serving = asyncio.create_task(http.run())
    try:
        yield app
    finally:
        http.stop()
        await serving


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def error(answer: bytes) -> dict[str, str]:
    told: dict[str, str] = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    return told


@pytest.mark.covers("X05")
@pytest.mark.parametrize(
    "pieces",
    [
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 5000 + b"\r\n\r\n",),  # whole, in one piece
        (b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\n\r\n",),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 1000 + b"\r\n",),
        (b"GET / HTTP/1.1\r\nx: ", *[b"y" * 1000] * 10),  # a header without end
        (b"GET / HTTP/1.1\r\n", *[b"a: b\r\n"] * 10_000),  # headers without end
        (b"GET /", *[b"a" * 1000] * 10),
    ],
)
def test_a_head_that_is_too_large_is_431_however_it_comes(pieces: tuple[bytes, ...]) -> None:
    async def run() -> None:
        async with served() as app:
            answer = await app.say(*pieces)
            if answer:  # else it was closed before all had been sent, and the answer went with it
                assert status(answer) == 431
                assert error(answer)["message"] == "The request's line and headers are larger than 4096 bytes."
            assert (app.refused, app.num_asked) == (["head"], 0)
            assert b"200 OK" in await app.say(LAST)

    uvloop.run(run())


@pytest.mark.covers("X05")
def test_a_head_that_does_not_come_is_closed_and_one_that_dawdles_is_408() -> None:
    async def run() -> None:
        async with served(HttpBounds(head_timeout_s=0.2)) as app:
            assert await app.say() == b""
            assert app.refused == []
            answer = await app.say(b"GET / HTTP/1.1\r\nx: y\r\n")
            assert status(answer) == 408
            assert error(answer)["message"] == "The request's line and headers took longer than 0.2 s."
            assert app.refused == ["slow"]
            reader, writer = await app.connect(GET + b"GET / HT")  # the second of a connection, too
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            assert b"408 Request Timeout" in await reader.read()
            writer.transport.abort()

    uvloop.run(run())


@pytest.mark.covers("X05")
def test_a_slow_answer_and_a_slow_body_are_no_slow_head() -> None:
    async def run() -> None:
        async with served(HttpBounds(head_timeout_s=0.2)) as app:
            app.may_answer.clear()
            head = b"POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 4\r\n\r\n"
            reader, writer = await app.connect(head + b"ab")
            await asyncio.sleep(0.4)
            writer.write(b"cd")
            await asyncio.sleep(0.4)
            app.may_answer.set()
            assert (await reader.read()).endswith(b"\r\n\r\n4")
            assert app.refused == []
            writer.transport.abort()

    uvloop.run(run())


@pytest.mark.covers("X05")
def test_a_body_that_nobody_waits_for_keeps_no_connection() -> None:
    """The answer came first, and one is enough."""

    async def run() -> None:
        async with served(HttpBounds(head_timeout_s=0.2)) as app:
            answer = await app.say(b"POST /unread HTTP/1.1\r\nhost: a\r\ncontent-length: 99\r\n\r\nab")
            assert answer.count(b"HTTP/1.1") == 1
            assert status(answer) == 200
            assert app.refused == []

    uvloop.run(run())


@pytest.mark.covers("X05")
def test_requests_sent_ahead_of_an_answer_are_bounded() -> None:
    async def run() -> None:
        async with served() as app:
            app.may_answer.clear()
            reader, writer = await app.connect()
            writer.write(GET * (MAX_PIPELINED + 2))
            assert await reader.read() == b""
            assert app.refused == ["pipelined"]
            writer.transport.abort()
            app.may_answer.set()
            reader, writer = await app.connect()
            writer.write(GET * 3)
            for _ in range(3):
                assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
                assert await reader.readexactly(1) == b"0"
            writer.transport.abort()

    uvloop.run(run())


@pytest.mark.covers("X05")
@pytest.mark.parametrize(
    "endless",
    [b"trailer-without-end: " + b"x" * 100_000, b"a: b\r\n" * 20_000, b"1;" + b"extension" * 10_000],
)
def test_chunks_bring_bodies_of_any_size_and_nothing_else_without_end(endless: bytes) -> None:
    head = b"POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"

    async def run() -> None:
        async with served() as app:
            body = b"1\r\nx\r\n" * 3000 + b"2710\r\n" + b"y" * 10_000 + b"\r\n"
            assert (await app.say(head, body, b"0\r\nchecksum: 1\r\n\r\n")).endswith(b"\r\n\r\n13000")
            ending = b"" if endless.startswith(b"1;") else b"0\r\n"
            pieces = [endless[start : start + 1000] for start in range(0, len(endless), 1000)]
            await app.say(head, body + ending, *pieces)
            assert app.refused == ["head"]

    uvloop.run(run())


@pytest.mark.covers("X05")
def test_over_the_bound_on_connections_requests_are_503_and_probes_are_answered() -> None:
    async def run() -> None:
        async with served() as app:
            held = [await app.connect() for _ in range(BOUNDS.max_connections)]
            for _, writer in held:
                writer.write(b"GET /")
            await asyncio.sleep(0.05)
            answer = await app.say(GET)
            assert (status(answer), app.num_asked) == (503, 0)
            assert b"retry-after: 1" in answer
            assert error(answer)["message"] == "The server has as many connections as it takes."
            probe = b"GET /health?x HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
            assert b"200 OK" in await app.say(probe)
            assert app.refused == ["connections"]
            held += [await app.connect() for _ in range(SPARE_CONNECTIONS)]
            assert await app.say(probe) == b""
            assert app.refused == ["connections"] * 2
            for _, writer in held:
                writer.transport.abort()
            async with asyncio.timeout(100):
                while status(await app.say(LAST) or b"x 503 ") != 200:  # noqa: ASYNC110 - they close one by one
                    await asyncio.sleep(0.01)

    uvloop.run(run())


@pytest.mark.covers("X05")
def test_what_is_no_http_is_400_in_the_apis_shape() -> None:
    async def run() -> None:
        async with served() as app:
            shake = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200
            nameless, twice = GET.replace(b"host: a", b"a: b"), GET.replace(b"host: a", b"host: a\r\nHost: b")
            for garbage in (shake, b"hello\r\n\r\n", nameless, twice):
                answer = await app.say(garbage)
                assert (status(answer), error(answer)["code"]) == (400, "malformed")
            assert (app.refused, app.num_asked) == (["malformed"] * 4, 0)
            assert b"200 OK" in await app.say(nameless.replace(b"/1.1", b"/1.0"))  # which knows of no Host

    uvloop.run(run())


@pytest.mark.covers("X05")
def test_a_hundred_hostile_connections_hold_no_more_than_their_heads() -> None:
    """Each says half a megabyte of what the parser could keep."""

    async def run() -> int:
        async with served(HttpBounds(max_connections=1000, max_head_bytes=4096)) as app:
            await app.say(GET.replace(b"host: a", b"connection: close"))
            tracemalloc.start()
            try:
                streams = [await app.connect() for _ in range(100)]
                for _, writer in streams:
                    writer.write(b"GET / HTTP/1.1\r\nx: " + b"y" * 4000)
                await asyncio.sleep(0.2)
                held, _ = tracemalloc.get_traced_memory()
                for _, writer in streams:
                    writer.write(b"y" * 500_000)
                async with asyncio.timeout(100):
                    while app.refused.count("head") < 100:  # noqa: ASYNC110 - a list has no event
                        await asyncio.sleep(0.01)
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            for _, writer in streams:
                writer.transport.abort()
            assert held < 10 << 20
            return peak

    # Ours, the clients' and the server's: what the clients have not sent yet is theirs.
    assert uvloop.run(run()) < 100 * 600_000 + (10 << 20)


@pytest.mark.covers("X05")
def test_a_client_that_takes_nothing_of_its_answer_loses_its_connection() -> None:
    """It is alive, and says so to the kernel: a connection that is closed waits for it as long as bytes are left."""

    async def run() -> None:
        async with served(HttpBounds(stuck_timeout_s=0.5)) as app:
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.connect(("127.0.0.1", app.port))
                client.sendall(GET.replace(b"/v1/models", b"/long"))
                async with asyncio.timeout(100):
                    await app.has_sent.wait()

    uvloop.run(run())


def test_a_connection_that_was_not_used_for_longer_than_clients_keep_one_still_serves() -> None:
    async def run() -> None:
        async with served() as app, asyncio.timeout(100):
            reader, writer = await app.connect()
            for idle_s in (0.0, CLIENTS_KEEP_S):
                await asyncio.sleep(idle_s)
                writer.write(GET)
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
                assert await reader.readexactly(1) == b"0"
            writer.transport.abort()

    uvloop.run(run())


@pytest.mark.covers("X05")
@pytest.mark.parametrize("before", [b"", GET], ids=["first", "behind-another"])
def test_who_asks_for_another_protocol_is_served_in_this_one_with_its_body_however_it_is_cut(before: bytes) -> None:
    """Were the body taken for the next request, whoever wrote it would have that one's answer be read as another's."""
    asking = before + WISHING
    whole = asking + HIDDEN
    cuts = [(whole,), (asking, HIDDEN), (asking, HIDDEN[:9], HIDDEN[9:])]
    cuts += [(whole[:at], whole[at:]) for at in range(1, len(whole))]
    cuts.append(tuple(whole[at : at + 1] for at in range(len(whole))))
    paths = ["/v1/models"] * bool(before) + ["/", "/v1/models"]
    sizes = [b"0"] * bool(before) + [b"%d" % len(HIDDEN), b"0"]

    async def run() -> None:
        async with served(HttpBounds(max_connections=1000)) as app:
            for pieces in cuts:
                app.paths.clear()
                answers = (await app.say(*pieces, LAST)).split(b"HTTP/1.1 200 OK")
                assert [each.rpartition(b"\r\n")[2] for each in answers] == [b"", *sizes], pieces
                assert app.paths == paths
            assert app.refused == []

    uvloop.run(run())


@pytest.mark.covers("X05")
def test_a_wish_for_another_protocol_changes_neither_chunks_nor_bounds() -> None:
    head = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n" + WISH

    async def run() -> None:
        async with served() as app:
            body = b"%x\r\n%b\r\n0\r\nUpgrade: h2c\r\n\r\n" % (len(HIDDEN), HIDDEN)
            answers = await app.say((head + b"\r\n" + body) * 3 + LAST)
            assert answers.count(b"\r\n\r\n%d" % len(HIDDEN)) == 3 and answers.endswith(b"\r\n\r\n0")
            assert app.paths == ["/"] * 3 + ["/v1/models"]
            large = await app.say(head + b"x: " + b"y" * BOUNDS.max_head_bytes + b"\r\n\r\n")
            assert status(large) == 431 and app.refused == ["head"]

    uvloop.run(run())


@pytest.mark.covers("X05")
@pytest.mark.parametrize(
    "head",
    [
        b"GET /a HTTP/1.1\r\nhost: a\r\nconnection: close, upgrade\r\nupgrade: x\r\n\r\n",
        b"GET /a HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nconnection: close\r\nupgrade: x\r\n\r\n",
        b"GET /a HTTP/1.0\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
        b"POST /a HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\nconnection: close, upgrade\r\nupgrade: x\r\n\r\nbody",
    ],
    ids=["close", "two lines", "1.0", "body"],
)
def test_who_asks_for_another_protocol_and_for_the_end_is_answered_and_let_go(head: bytes) -> None:
    """Such a connection must not stay for ever without a timer."""

    async def run() -> None:
        async with served() as app, asyncio.timeout(100):
            for pieces in ((head,), tuple(head[at : at + 1] for at in range(len(head)))):
                app.paths.clear()
                answer = await app.say(*pieces)
                assert status(answer) == 200 and app.paths == ["/a"]
                assert answer.endswith(b"4" if b"body" in head else b"0")

    uvloop.run(run())


@pytest.mark.covers("X05")
@pytest.mark.parametrize("wish", [b"", WISH])
def test_a_tunnel_is_refused_and_what_was_to_go_through_it_is_not_looked_at(wish: bytes) -> None:
    async def run() -> None:
        async with served() as app:
            answer = await app.say(b"CONNECT a:1 HTTP/1.1\r\nhost: a:1\r\n" + wish + b"\r\n" + HIDDEN, HIDDEN)
            assert (status(answer), error(answer)["code"]) == (400, "malformed")
            assert (app.paths, app.refused) == ([], ["malformed"])

    uvloop.run(run())
