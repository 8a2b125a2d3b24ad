"""HTTP/1.1 of one connection within bounds: uvicorn's own protocol, which has none of these.

    bytes of a request's head (line, headers, and what chunks and trailers put around a body)   431, closed
    seconds until a head is complete                                                            408, closed
    requests sent before the first one is answered                                              400, closed
    connections at once                                                                         503, closed
    seconds in which a client takes nothing of what is there for it                             closed, by the kernel

Over the bound on connections, those that ask for one of the spared paths are still answered, since who probes a busy process must
not find it dead; beyond a few more they are closed without a word. Bodies are the application's to bound. Each refusal is counted.

httptools keeps a header that has not ended without telling anybody, so bytes are counted as they come.

Nothing is switched to, which RFC 9110 7.8 allows: a request that asks for another protocol (Java's HttpClient does so on each new
connection in the clear) is served as what it is. httptools ends such a message at its head, and would take its body, which the
client wrote, for the next request: so its head is fed once more, without the field, before the body.

An application may go around ASGI (DirectWay): write a part of its answer without a task's turn, and hear of the client's leaving
without a task that waits for it.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, Literal, get_args

import httptools
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

SPARE_CONNECTIONS: Final = 64  # for who asks for a spared path
MAX_PIPELINED: Final = 16
DIRECT: Final = "baton.direct"  # of a scope's extensions: a DirectWay
_AROUND_A_BODY: Final = 16  # bytes that chunks may put around each byte of a body

Reason = Literal["connections", "head", "slow", "pipelined", "malformed"]
REASONS: Final[tuple[Reason, ...]] = get_args(Reason)


@dataclass(frozen=True, slots=True)
class HttpBounds:
    """What one server takes from strangers."""

    max_connections: int = 256
    max_head_bytes: int = 32 << 10
    head_timeout_s: float = 10.0
    stuck_timeout_s: float = 60.0  # until a connection ends whose client takes nothing of what it was sent
    spared_paths: frozenset[str] = frozenset({"/health", "/ready", "/metrics"})


@dataclass(frozen=True, slots=True)
class _Refusal:
    reason: Reason
    status: int
    message: str

    def body(self) -> bytes:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": self.message, "type": kind, "param": None, "code": self.reason}
        return json.dumps({"error": error}).encode("ascii")

    def encoded(self) -> bytes:
        """The whole answer, for who is told without the application's help."""
        body, phrase = self.body(), HTTPStatus(self.status).phrase
        head = f"HTTP/1.1 {self.status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        return f"{head}connection: close\r\n\r\n".encode("ascii") + body


_FULL: Final = _Refusal("connections", 503, "The server has as many connections as it takes.")


def _end_when_stuck(connection: socket.socket, timeout_s: float) -> None:
    """Have the kernel end a connection whose peer has taken nothing for so long, though there was something for it.

    Else closing it waits for ever where bytes are left. Source: TCP_USER_TIMEOUT, https://man7.org/linux/man-pages/man7/tcp.7.html
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * timeout_s))


class DirectWay:
    """From one answer to its connection."""

    __slots__ = ("_connection", "_cycle")

    def __init__(self, connection: BoundedHttp, cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self._cycle = cycle

    @property
    def takes_more(self) -> bool:
        """Whether a part that is written now goes out at once, as a chunk: the answer has begun, and the client keeps up."""
        cycle = self._cycle
        is_open = bool(cycle.chunked_encoding) and not (cycle.response_complete or cycle.disconnected)
        return is_open and not cycle.flow.write_paused and not cycle.transport.is_closing()

    def write(self, part: bytes) -> None:
        """Write a part of the body, which is not empty; only where `takes_more`."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))

    def cut_off(self) -> None:
        """End the connection, whatever the client has not read yet."""
        self._cycle.transport.abort()

    def when_lost(self, call: Callable[[], None] | None) -> None:
        """Have `call` called when the client has gone, once, or at once if it has; None: nobody wants to know any more."""
        connection = self._connection
        connection.on_lost = call
        if call is not None:
            connection.tell_lost()
            self._cycle.flow.resume_reading()  # who does not read hears nothing


class BoundedHttp(HttpToolsProtocol):
    """One connection."""

    def __init__(
        self,
        bounds: HttpBounds,
        on_refused: Callable[[str], None],
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._bounds = bounds
        self._on_refused = on_refused
        self._own_app = self.app
        self._untold_bytes = 0  # since the head began, or since the body last grew: what the parser may have kept
        self._is_whole = True  # no request has begun that has not ended
        self._is_in_head = False
        self._timer: asyncio.TimerHandle | None = None
        self._refusal: _Refusal | None = None
        self._is_lost = False
        # The last whose answer was begun: what `cycle` is, or ahead of it.
        self._running: RequestResponseCycle | None = None
        self.on_lost: Callable[[], None] | None = None  # of the answer under way

    # ---------------------------------------------------------------- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Arm the first head's time."""
        super().connection_made(transport)
        if len(self.connections) > self._bounds.max_connections + SPARE_CONNECTIONS:
            self._on_refused("connections")
            self._refusal = _FULL
            transport.abort()
            return
        if (connection := transport.get_extra_info("socket")) is not None:
            _end_when_stuck(connection, self._bounds.stuck_timeout_s)
        self._arm_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing of it is left. uvicorn tells the newest request alone, which waits if it was sent ahead of an answer."""
        self._stop_timer()
        super().connection_lost(exc)
        self._is_lost = True
        self._let_go_of_running()
        self.tell_lost()

    def _let_go_of_running(self) -> None:
        if self._running is not None:
            self._running.disconnected = not self._running.response_complete
            self._running.message_event.set()

    def tell_lost(self) -> None:
        """Tell the answer under way that its client has gone, if that is so."""
        if self._is_lost and (call := self.on_lost) is not None:
            self.on_lost = None
            call()

    def close_when_idle(self) -> None:
        """Close it behind the answer under way, or now if kept for later; not while a request, or the first one, is on its way."""
        if self.cycle is None or not self._is_whole:
            return
        if self.cycle.response_complete:
            self.transport.close()
        self.cycle.keep_alive = False

    def data_received(self, data: bytes) -> None:
        """Parse, then look whether it was too much: what is refused is the piece behind the bound."""
        if self._refusal is not None:
            return  # it is being closed
        self._untold_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except httptools.HttpParserError:
            msg = "Invalid HTTP request received."
            self.logger.warning(msg)
            self.send_400_response(msg)
        if self._refusal is None and self._untold_bytes > self._bounds.max_head_bytes:
            self._refuse(self._head_too_large())

    def _feed(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as stop:  # behind a head, wherever in the piece; see on_headers_complete
                data = self._head_without_upgrade() + data[stop.args[0] :]
                # Anew: where the connection is to be closed behind it, the old one takes whatever follows for nothing.
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _head_without_upgrade(self) -> bytes:
        line = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode("ascii"))
        fields = [b"%b: %b" % (name, value) for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([line, *fields, b"\r\n"])

    # ---------------------------------------------------------------- the parser's words

    def on_message_begin(self) -> None:
        """A head begins; how much of the piece is of it is not known, so it begins at 0."""
        super().on_message_begin()
        self._untold_bytes = 0
        self._is_whole = False
        self._is_in_head = True
        self._arm_timer()

    def on_headers_complete(self) -> None:
        """The head is there."""
        self._stop_timer()
        self._is_in_head = False
        num_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if num_bytes > self._bounds.max_head_bytes:
            self._fail(self._head_too_large())
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (num_hosts == 0 and self.parser.get_http_version() == "1.1"):  # RFC 9112 3.2
            self._fail(_Refusal("malformed", 400, f"A request has one Host header; this one has {num_hosts}."))
        if self.parser.should_upgrade():
            if not any(name == b"upgrade" for name, _ in self.headers):
                self._fail(_Refusal("malformed", 400, "CONNECT is for proxies."))
            return  # _feed brings it once more
        if len(self.pipeline) >= MAX_PIPELINED:
            self._fail(_Refusal("pipelined", 400, f"More than {MAX_PIPELINED} requests came ahead of an answer."))
        self._untold_bytes = 0
        is_spared = self.url.partition(b"?")[0].decode("latin-1") in self._bounds.spared_paths
        is_full = len(self.connections) > self._bounds.max_connections and not is_spared
        self.app = self._answer_full if is_full else self._own_app
        was_reading = not self.flow.read_paused
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:
            extensions: Any = {DIRECT: DirectWay(self, self.cycle)}
            self.scope["extensions"] = extensions
        if was_reading and sum(len(cycle.body) for cycle, _ in self.pipeline) <= HIGH_WATER_LIMIT:
            self.flow.resume_reading()  # paused if it is ahead of an answer: who does not read hears nobody leave

    def on_chunk_header(self) -> None:
        """The body goes on; behind the last one come trailers, during which nothing is told."""
        self._untold_bytes = 0

    def on_body(self, body: bytes) -> None:
        """The body goes on."""
        self._untold_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is there."""
        if self.parser.should_upgrade():
            return  # its head alone
        self._untold_bytes = 0
        self._is_whole = True
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The answer is out; of a request that is not, nobody wants the rest."""
        super().on_response_complete()
        if not self._is_whole and not self._is_in_head:
            self._stop_timer()
            self._timer = self.loop.call_later(self._bounds.head_timeout_s, self.transport.close)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]  # as uvicorn's
        """Its turn has come."""
        self._running = cycle
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]

    # ---------------------------------------------------------------- refusing

    def send_400_response(self, msg: str) -> None:
        """What uvicorn says when the parser fails: of its own accord, or because a callback did."""
        self._refuse(self._refusal or _Refusal("malformed", 400, msg))

    def _fail(self, refusal: _Refusal) -> None:
        """Inside a callback: stop the parser, which leads to send_400_response."""
        self._refusal = refusal
        raise httptools.HttpParserError(refusal.message)

    def _refuse(self, refusal: _Refusal) -> None:
        self._refusal = refusal
        self._stop_timer()
        self._on_refused(refusal.reason)
        running = self._running
        is_its_own = running is self.cycle and running is not None and not running.response_started
        # Else it would stand in the middle of another answer, or for it.
        if running is None or running.response_complete or is_its_own:
            self.transport.write(refusal.encoded())
            self._let_go_of_running()
        self.transport.close()

    def _head_too_large(self) -> _Refusal:
        most = self._bounds.max_head_bytes
        return _Refusal("head", 431, f"The request's line and headers are larger than {most} bytes.")

    async def _answer_full(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._on_refused("connections")
        body = _FULL.body()
        length = str(len(body)).encode("ascii")
        headers = [(b"content-type", b"application/json"), (b"content-length", length), (b"retry-after", b"1")]
        headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": _FULL.status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    def _arm_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self._bounds.head_timeout_s, self._on_timer)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        if self._is_whole:  # nothing has come at all
            self.transport.close()
        else:
            limit = self._bounds.head_timeout_s
            self._refuse(_Refusal("slow", 408, f"The request's line and headers took longer than {limit:g} s."))
