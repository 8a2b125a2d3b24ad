"""`python -m bench.sse_floor`: the least that FastAPI and uvicorn take to stream so many events; what a router costs is beyond it.

One endpoint, whose generator waits for its stream's next token (stepping.py) and yields an event of the router's length, on the
router's own server settings, loop and HTTP parser. No checking, no tokenizing, no log, nothing from another process.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

import uvloop
from fastapi import FastAPI, Request
from starlette.responses import StreamingResponse

from bench.mock_backend import SSE_END, sse_event
from bench.stepping import Stepper, Stream, obey
from runtime.config import knob, load
from runtime.http_protocol import HttpBounds
from runtime.http_server import BACKLOG, HttpServer
from runtime.process import die_with_parent

PROG: Final = "python -m bench.sse_floor"
_MAX_CONNECTIONS: Final = 8192


@dataclass(frozen=True, slots=True)
class SseFloorConfig:
    """What the server is told when it starts."""

    parent_pid: int = knob(0, "die when the process with this id dies; 0: never", low=0)


class _Waiter:
    """A stream's generator, and what it waits for."""

    def __init__(self) -> None:
        self.heard = asyncio.Event()

    async def events(self, stream: Stream) -> AsyncIterator[bytes]:
        """Each token once; those that came while the client was slow, together."""
        num_told = 0
        while num_told < stream.max_tokens:
            if num_told == len(stream.said_at):
                self.heard.clear()
                await self.heard.wait()
            num_said = len(stream.said_at)
            yield b"".join(
                sse_event(stream.name, index, index == stream.max_tokens - 1) for index in range(num_told, num_said)
            )
            num_told = num_said
        yield SSE_END


def _app(stepper: Stepper) -> FastAPI:
    app, numbers = FastAPI(openapi_url=None), count(1)

    async def completions(request: Request) -> StreamingResponse:
        asked: dict[str, Any] = await request.json()
        now, waiter = time.monotonic(), _Waiter()
        stream = Stream(f"f{next(numbers)}", asked["max_tokens"], now, waiter, [now])
        stepper.note(stream)
        if not stream.is_over:
            stepper.add(stream)
        return StreamingResponse(waiter.events(stream), media_type="text/event-stream")

    app.add_api_route("/v1/completions", completions, methods=["POST"], response_model=None)
    return app


def _say(streams: Sequence[Stream]) -> None:
    for stream in streams:
        stream.handle.heard.set()


async def _serve() -> None:
    stepper = Stepper(_say)
    listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    http = HttpServer(_app(stepper), listener, bounds=HttpBounds(max_connections=_MAX_CONNECTIONS))
    async with asyncio.TaskGroup() as tasks:
        stepping, serving = tasks.create_task(stepper.run()), tasks.create_task(http.run())
        await obey(stepper, {"url": f"http://127.0.0.1:{listener.getsockname()[1]}"})
        http.stop()
        await serving
        stepping.cancel()


def main(argv: Sequence[str] | None = None) -> int:
    """Run until stdin closes."""
    config = load(SseFloorConfig, PROG, "FastAPI and uvicorn streaming events, and nothing else.", argv)
    die_with_parent(config.parent_pid)
    uvloop.run(_serve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
