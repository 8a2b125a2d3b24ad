"""An HTTP server on a free port that answers /v1/completions with bytes that a test chooses, when the test says so."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

Answer = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]  # the request's body, and where to write


@asynccontextmanager
async def scripted_server(answer: Answer) -> AsyncIterator[str]:
    """The server's URL; `answer` writes head and body, the connection is closed behind it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = head.partition(b"content-length:")[2].split(b"\r\n")[0]
            body = await reader.readexactly(int(length)) if length else b"{}"
            await answer(json.loads(body), writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            writer.transport.abort()  # the client has hung up
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def stream_head() -> bytes:
    """The head of an event stream that ends with its connection."""
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


def event(**fields: Any) -> bytes:
    """One event of a stream."""
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def chunk(text: str = "x") -> bytes:
    """One event that carries a choice."""
    return event(choices=[{"index": 0, "text": text, "finish_reason": None}], usage=None)


def usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    """The event with the counts, and the end of the stream."""
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return event(choices=[], usage=counts) + b"data: [DONE]\n\n"


def whole(status: int, content: object) -> bytes:
    """A JSON answer with its length."""
    body = json.dumps(content).encode()
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
