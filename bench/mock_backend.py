"""`python -m bench.mock_backend`: an HTTP server that answers completions without a model, behind a router that speaks HTTP.

It stands where a prefill or a decode server stands behind a peer (bench.router --peer), and alone it shows what the client of the
measurement costs by itself. Streams go on by steps (stepping.py). Everything else is answered with a status that says that it is
well, in the words that such routers look for. Parsing and writing by hand, so that it takes as little of the machine as it can.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

import httptools
import uvloop

from bench.stepping import Stepper, Stream, obey
from runtime.config import knob, load
from runtime.process import die_with_parent

PROG: Final = "python -m bench.mock_backend"
SSE_END: Final = b"data: [DONE]\n\n"
_LETTERS: Final = "abcdefgh"
_STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)
_STATUS: Final[dict[str, Any]] = {
    "status": "ok",
    "model_path": "m",
    "served_model_name": "m",
    "tokenizer_path": "",
    "is_generation": True,
    "dp_size": 1,
    "tp_size": 1,
    "disaggregation_mode": "null",
    "version": "0.0",
    "object": "list",
    "data": [{"id": "m", "object": "model", "owned_by": "mock"}],
}


@dataclass(frozen=True, slots=True)
class MockBackendConfig:
    """What the server is told when it starts."""

    role: Literal["prefill", "decode"] = knob("decode", "prefill: every answer has one token; decode: as many as asked")
    port: int = knob(0, "0 takes a free one", low=0, high=65535)
    parent_pid: int = knob(0, "die when the process with this id dies; 0: never", low=0)


def sse_event(name: str, index: int, is_last: bool) -> bytes:
    """The token with this index of a completion, as one server-sent event of one letter; as long as the router's own are."""
    reason = '"length"' if is_last else "null"
    return (
        f'data: {{"id":"cmpl-{name}","created":1700000000,"model":"m","object":"text_completion","choices":[{{"index":0,'
        f'"text":"{_LETTERS[index % len(_LETTERS)]}","logprobs":null,"finish_reason":{reason}}}]}}\n\n'
    ).encode()


class _Connection(asyncio.Protocol):
    """A client's connection, which may carry several requests; the names without underscore are asyncio's and httptools'."""

    def __init__(self, server: _Server) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._body = bytearray()
        self._name = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:  # a router that tries HTTP/2 first
            if self._transport is not None:
                self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._server.stepper.remove(self._name)
        self._transport = None

    def on_message_begin(self) -> None:
        self._body.clear()

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        asked: dict[str, Any] = json.loads(self._body) if self._parser.get_method() == b"POST" and self._body else {}
        if asked.get("stream"):
            self._name = self._server.begin(self, asked)
        else:
            content = json.dumps(_STATUS | {"choices": [], "usage": {}}).encode()
            head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
            self.write(head.encode() + content)

    def write(self, data: bytes) -> None:
        """Send, unless the client has gone."""
        if self._transport is not None:
            self._transport.write(data)

    def say(self, stream: Stream) -> None:
        """The stream's newest token, and its end behind the last one."""
        event = sse_event(stream.name, len(stream.said_at) - 1, stream.is_over)
        chunk = f"{len(event):x}\r\n".encode() + event + b"\r\n"
        if stream.is_over:
            chunk += f"{len(SSE_END):x}\r\n".encode() + SSE_END + b"\r\n0\r\n\r\n"
        self.write(chunk)


class _Server:
    """What all connections share."""

    def __init__(self, is_prefill: bool) -> None:
        self._is_prefill = is_prefill
        self._num_streams = 0
        self.stepper = Stepper(self._say)

    def begin(self, connection: _Connection, asked: dict[str, Any]) -> str:
        """Say the first token of a new stream at once; its name."""
        now = time.monotonic()
        self._num_streams += 1
        most = 1 if self._is_prefill else int(asked.get("max_tokens", 16))
        stream = Stream(f"m{self._num_streams}", most, now, connection, [now])
        if not self._is_prefill:
            self.stepper.note(stream)
        connection.write(_STREAM_HEAD)
        connection.say(stream)
        if not stream.is_over:
            self.stepper.add(stream)
        return stream.name

    def _say(self, streams: Sequence[Stream]) -> None:
        for stream in streams:
            stream.handle.say(stream)


async def _serve(config: MockBackendConfig) -> None:
    server = _Server(config.role == "prefill")
    listener = await asyncio.get_running_loop().create_server(lambda: _Connection(server), "127.0.0.1", config.port)
    port = listener.sockets[0].getsockname()[1]
    async with asyncio.TaskGroup() as tasks:
        stepping = tasks.create_task(server.stepper.run())
        await obey(server.stepper, {"url": f"http://127.0.0.1:{port}"})
        stepping.cancel()
    listener.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Run until stdin closes."""
    config = load(MockBackendConfig, PROG, "A server of completions without a model.", argv)
    die_with_parent(config.parent_pid)
    uvloop.run(_serve(config))
    return 0


if __name__ == "__main__":
    sys.exit(main())
