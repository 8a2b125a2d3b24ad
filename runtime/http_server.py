"""uvicorn on the process's own loop, socket and signal handlers, within bounds (http_protocol.py), over TLS or not.

Not here: what is served, and whose certificates (credentials.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp

from runtime.http_protocol import BoundedHttp, HttpBounds
from runtime.shared_listener import SharedListener

BACKLOG: Final = 2048  # connections that the kernel holds while the loop is busy
# Longer than clients and load balancers keep a connection that they do not use (httpx 5 s, nginx and ALB 60 s), so that they close
# it and not we: a request that crosses our closing is lost, and only some clients ask again.
KEEP_ALIVE_S: Final = 75
_STOP_GRACE_S: Final = 1  # for answers under way, which have just got their error


class HttpServer:
    """Serves an app on a socket that listens already."""

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        *,
        is_shared: bool = False,
        bounds: HttpBounds | None = None,
        tls: ssl.SSLContext | None = None,
        on_refused: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """`is_shared`: other processes take from the listener, too. `on_refused` hears the reason of each refusal by the bounds.

        Over TLS where a context is given.
        """
        # Connections inherit it. asyncio sets it only where a socket names its protocol, which one of create_server does not;
        # without it an answer's second write waits 40 ms for the first one's acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        self._listener = listener
        bounds = bounds or HttpBounds()
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            http=partial(BoundedHttp, bounds, on_refused),  # type: ignore[arg-type]  # makes one
            server_header=False,
            proxy_headers=False,  # nobody here asks where a request came from
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=_STOP_GRACE_S,
            ssl_context_factory=None if tls is None else lambda _config, _default: tls,
        )
        self._server = _Server(config, bounds.head_timeout_s, is_shared)

    async def run(self) -> None:
        """Serve until `stop`."""
        await self._server.serve(sockets=[self._listener])

    @property
    def num_under_way(self) -> int:
        """Answers that are not out yet, whatever was asked for."""
        return len(self._server.server_state.tasks)

    def close_idle(self) -> None:
        """Close connections that clients keep for later, others behind their answers: the next request is for somebody else."""
        for connection in list(self._server.server_state.connections):
            if isinstance(connection, BoundedHttp):
                connection.close_when_idle()

    def stop(self) -> None:
        """Let `run` return once the answers under way are out."""
        self._server.should_exit = True


class _Server(uvicorn.Server):
    """uvicorn inside a process that has its own signal handlers, with a bound on how long a handshake may take."""

    def __init__(self, config: uvicorn.Config, handshake_timeout_s: float, is_shared: bool) -> None:
        super().__init__(config)
        self._handshake_timeout_s = handshake_timeout_s
        self._is_shared = is_shared

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's for sockets that are there; it leaves the time of a handshake to the loop, which waits for a minute."""
        config = self.config
        make: Callable[..., asyncio.Protocol] = config.http_protocol_class
        protocol = partial(make, config=config, server_state=self.server_state, app_state=self.lifespan.state)
        timeout_s = self._handshake_timeout_s if config.ssl else None
        if self._is_shared:
            shared: Any = [SharedListener(protocol, each, config.ssl, timeout_s) for each in sockets or ()]
            self.servers = shared
        else:
            loop = asyncio.get_running_loop()
            self.servers = [
                await loop.create_server(
                    protocol, sock=each, ssl=config.ssl, backlog=config.backlog, ssl_handshake_timeout=timeout_s
                )
                for each in sockets or ()
            ]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
