"""One HTTP/1.1 request and its answer over a connection of its own, with the instant of every part of the answer.

Leaner than a general client, because what it costs is added to what it measures: httptools parses, `take` gets the body as it
comes, nothing is copied or decoded in between. Instants are time.monotonic's: uvloop's own time() counts milliseconds.
Not here: redirects, proxies, compression, connections used twice.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import httptools

from runtime.server_url import read_url

Take = Callable[[bytes, float], None]  # a part of the body, and the instant when it came, by time.monotonic

_PORTS: Final = {"http": 80, "https": 443}
_INTERIM: Final = (100, 102, 103)  # statuses of messages before the answer; 101 would be its end


class BrokenAnswer(Exception):
    """The connection ended, or was reset, before the answer did."""


class MalformedAnswer(Exception):
    """What came is not HTTP."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where requests go."""

    host: str
    port: int
    is_tls: bool
    prefix: str  # of every path, without "/" at its end
    address: str  # the host, or what its name stands for

    @staticmethod
    def parse(url: str) -> Server:
        """From http(s)://HOST[:PORT][/PREFIX], `/v1` at the end left out; ValueError says in one sentence what is wrong."""
        read = read_url(url)
        host, prefix = read.raw_host.decode("ascii"), read.raw_path.decode("ascii").rstrip("/")
        return Server(host, read.port or _PORTS[read.scheme], read.scheme == "https", prefix, host)

    async def resolved(self) -> Server:
        """The same with the address that answers now, so that no request waits for a name. Raises OSError."""
        if ":" in self.host:
            return self  # is one, with a zone perhaps, which a peer's name lacks
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, self.host, self.port)
        peer: tuple[Any, ...] = transport.get_extra_info("peername")
        transport.abort()
        return replace(self, address=str(peer[0]))

    @property
    def base_url(self) -> str:
        """What a path like /v1/models is put behind."""
        return f"{'https' if self.is_tls else 'http'}://{self._authority}{self.prefix}"

    @property
    def _authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def post(self, path: str, body: bytes, api_key: str | None = None) -> bytes:
        """The bytes of a JSON request."""
        head = f"POST {self.prefix}{path} HTTP/1.1\r\nHost: {self._authority}\r\nContent-Type: application/json\r\n"
        if api_key is not None:
            head += f"Authorization: Bearer {api_key}\r\n"
        return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


class _Exchange(asyncio.Protocol):
    """The connection; the method names without underscore are asyncio's and httptools'."""

    def __init__(self, request: bytes, take: Take) -> None:
        self._request = request
        self._take = take
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0.0
        self._is_in_body = False
        self._has_length = False
        self.connected_at = 0.0
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()  # the status

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.connected_at = time.monotonic()
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic()
        if self.ended.done():
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.ended.set_exception(MalformedAnswer(str(error)))

    def connection_lost(self, error: Exception | None) -> None:
        if self.ended.done():
            return
        if error is None and self._is_in_body and not self._has_length:
            self.ended.set_result(self._parser.get_status_code())  # such a body ends with its connection
        else:
            self.ended.set_exception(BrokenAnswer(str(error or "the server closed the connection")))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._has_length |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self._is_in_body = not self._is_interim

    def on_body(self, data: bytes) -> None:
        self._take(data, self._now)

    def on_message_complete(self) -> None:
        if self._is_interim:
            self._has_length = False
        elif not self.ended.done():
            self.ended.set_result(self._parser.get_status_code())

    @property
    def _is_interim(self) -> bool:
        """Of 100 Continue, or 103 Early Hints: the answer itself comes behind (RFC 9110, section 15.2)."""
        return int(self._parser.get_status_code()) in _INTERIM


async def exchange(
    server: Server, request: bytes, take: Take, on_connected: Callable[[float], None], tls: ssl.SSLContext | None
) -> int:
    """Send the request and hand the answer's body to `take` as it comes; its status, once it is complete.

    Raises OSError (no connection), BrokenAnswer, MalformedAnswer. Cancelling it closes the connection.
    """
    loop = asyncio.get_running_loop()
    options: dict[str, Any] = {"ssl": tls, "server_hostname": server.host.partition("%")[0]} if server.is_tls else {}
    transport, protocol = await loop.create_connection(
        lambda: _Exchange(request, take), server.address, server.port, **options
    )
    try:
        on_connected(protocol.connected_at)
        return await protocol.ended
    finally:
        transport.abort()
