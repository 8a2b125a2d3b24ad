"""Connections of a listening socket that other processes take from, too: one in a turn, so that all who are idle get some.

A loop's own server takes all that wait as soon as it wakes (libuv accepts until there is none, asyncio `backlog` in a turn), and
who wakes first has them: of 24 clients that came to two idle processes at once, one had 22. Here each turn of the loop takes one:
meanwhile the others wake and take theirs, and a busy loop, whose turns are long, takes less than an idle one.

Not here: what is spoken on a connection (http_protocol.py).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from runtime.logs import log_event

_LOG: Final = logging.getLogger(__name__)
_RETRY_S: Final = 1.0  # as asyncio's own server, where descriptors or memory have run out
_OUT_OF_MEANS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class SharedListener:
    """Takes connections until it is closed; of asyncio.Server what uvicorn asks for."""

    def __init__(
        self,
        make: Callable[[], asyncio.Protocol],
        listener: socket.socket,
        tls: ssl.SSLContext | None = None,
        handshake_timeout_s: float | None = None,
    ) -> None:
        """`make`: a connection's protocol; the time is of TLS alone. The listener stays the caller's. Within a running loop."""
        self._make = make
        self._listener = listener
        self._tls = tls
        self._handshake_timeout_s = handshake_timeout_s
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[Any]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._is_closed = False
        listener.setblocking(False)
        self._loop.add_reader(listener, self._take)

    def close(self) -> None:
        """Take no more, and close those whose handshake is under way."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._listener)
            if self._retry is not None:
                self._retry.cancel()
            for opening in self._opening:
                opening.cancel()

    async def wait_closed(self) -> None:
        """Return once none is being opened."""
        if self._opening:
            await asyncio.wait(self._opening)

    def _take(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # somebody else has it, or it has gone
        except OSError as error:
            if error.errno not in _OUT_OF_MEANS:
                raise
            log_event(_LOG, logging.ERROR, "cannot_accept", error=error.strerror)
            self._loop.remove_reader(self._listener)
            self._retry = self._loop.call_later(_RETRY_S, self._loop.add_reader, self._listener, self._take)
            return
        connection.setblocking(False)
        opening = self._loop.create_task(
            self._loop.connect_accepted_socket(
                self._make, connection, ssl=self._tls, ssl_handshake_timeout=self._handshake_timeout_s
            )
        )
        self._opening.add(opening)
        opening.add_done_callback(partial(self._opened, connection))

    def _opened(self, connection: socket.socket, opening: asyncio.Task[Any]) -> None:
        self._opening.discard(opening)
        if opening.cancelled():  # perhaps before it began
            connection.close()
        elif (error := opening.exception()) is not None:
            connection.close()
            if not isinstance(error, OSError):  # of a handshake that fails its context tells (credentials.py)
                raise error
