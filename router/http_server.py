"""uvicorn on the process's own loop, socket and signal handlers. Not here: what is served (api.py)."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Final

import uvicorn
from fastapi import FastAPI

BACKLOG: Final = 2048  # connections that the kernel holds while the loop is busy
_STOP_GRACE_S: Final = 1  # for answers under way, which have just got their error


class HttpServer:
    """Serves an app on a socket that listens already."""

    def __init__(self, app: FastAPI, listener: socket.socket) -> None:
        self._listener = listener
        self._server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                http="httptools",
                server_header=False,
                backlog=BACKLOG,
                timeout_graceful_shutdown=_STOP_GRACE_S,
            )
        )

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
