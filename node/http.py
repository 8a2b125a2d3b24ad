"""The pages of a node: /health, /ready, /metrics, /state. For people, probes and Prometheus; no client's request comes here.

Not here: what the pages say (node/view.py). The handlers are coroutines, so they run on the loop's thread, where the core may be
read; a plain function would be sent to a thread pool.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Final

import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from node.view import NodeView

MAX_CONNECTIONS: Final = 256
STOP_GRACE_S: Final = 1  # that an answer under way gets


def make_app(view: NodeView) -> FastAPI:
    """The pages of one node."""
    app = FastAPI(title=f"Baton node {view.node_id}", docs_url=None, redoc_url=None)

    @app.get("/health")
    async def health() -> dict[str, str]:
        """That the loop answers at all, also while it drains: who restarts what is not healthy must let it finish."""
        return {"status": "draining" if view.is_draining else "ok", "node_id": view.node_id}

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """That the node takes work."""
        return JSONResponse({"ready": not view.is_draining}, 503 if view.is_draining else 200)

    @app.get("/state")
    async def state() -> JSONResponse:
        return JSONResponse(view.state())

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(view.metrics(), media_type=CONTENT_TYPE_LATEST)

    return app


class _Server(uvicorn.Server):
    """uvicorn inside a process that has its own signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves an app on a socket that listens already."""

    def __init__(self, app: FastAPI, listener: socket.socket) -> None:
        # Connections inherit it. asyncio sets it only where a socket names its protocol, which one of create_server does not;
        # without it an answer's second write waits 40 ms for the first one's acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        self._listener = listener
        self._server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                limit_concurrency=MAX_CONNECTIONS,
                timeout_graceful_shutdown=STOP_GRACE_S,
            )
        )

    async def run(self) -> None:
        """Serve until `stop`."""
        await self._server.serve(sockets=[self._listener])

    def stop(self) -> None:
        """Let `run` return once the answers under way are out."""
        self._server.should_exit = True
