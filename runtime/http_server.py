"""uvicorn on the process's own loop, socket and signal handlers, within bounds (http_protocol.py), over TLS or not.

Not here: what is served, and whose certificates (credentials.py).
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from runtime.http_protocol import BoundedHttp, HttpBounds

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
        bounds: HttpBounds | None = None,
        tls: ssl.SSLContext | None = None,
        on_refused: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """`on_refused` hears the reason of each refusal by the bounds. Over TLS where a context is given."""
        # Connections inherit it. asyncio sets it only where a socket names its protocol, which one of create_server does not;
        # without it an answer's second write waits 40 ms for the first one's acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        self._listener = listener
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            http=partial(BoundedHttp, bounds or HttpBounds(), on_refused),  # type: ignore[arg-type]  # makes one
            server_header=False,
            proxy_headers=False,  # nobody here asks where a request came from
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=_STOP_GRACE_S,
            ssl_context_factory=None if tls is None else lambda _config, _default: tls,
        )
        self._server = _Server(config)

    async def run(self) -> None:
        """Serve until `stop`."""
        await self._server.serve(sockets=[self._listener])

    @property
    def num_under_way(self) -> int:
        """Answers that are not out yet, whatever was asked for."""
        return len(self._server.server_state.tasks)

    def stop(self) -> None:
        """Let `run` return once the answers under way are out."""
        self._server.should_exit = True


class _Server(uvicorn.Server):
    """uvicorn inside a process that has its own signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
