"""What `baton up` can be asked while it runs: to kill one of its nodes, which it then starts again. One line of JSON each way.

For the button of the dashboard (router/launcher_link.py). On loopback, and only for who shows the token that the launcher handed
its routers by variable: other users of this machine can reach the port, too. Not here: killing and starting (launcher.py).
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

MAX_LINE: Final = 4096
LINE_S: Final = 5.0
MAX_CALLERS: Final = 16
_LOOPBACK: Final = "127.0.0.1"

Kill = Callable[[str], Awaitable[str | None]]


def read_order(line: bytes, token: str) -> str | None:
    """The name of the node to be killed; None: whoever sent this has not the token, or makes no sense."""
    try:
        order: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(order, dict):
        return None
    shown, node = order.get("token"), order.get("kill")
    if not isinstance(shown, str) or not isinstance(node, str):
        return None
    return node if hmac.compare_digest(shown.encode("utf-8", "replace"), token.encode()) else None


class Control:
    """Listens until it is closed."""

    def __init__(self, kill: Kill) -> None:
        """`kill` kills a node by its name, and says in one sentence why it did not."""
        self._kill = kill
        self._token = secrets.token_urlsafe(32)
        self._server: asyncio.Server | None = None
        self._callers: set[asyncio.Task[None]] = set()

    async def open(self) -> str:
        """Listen; what routers are to be told: HOST:PORT/TOKEN."""
        self._server = await asyncio.start_server(self._called, _LOOPBACK, 0, limit=MAX_LINE)
        port = self._server.sockets[0].getsockname()[1]
        return f"{_LOOPBACK}:{port}/{self._token}"

    async def close(self) -> None:
        """Answer nobody any more."""
        if self._server is not None:
            self._server.close()
        for task in self._callers:
            task.cancel()
        if self._callers:
            await asyncio.wait(self._callers)

    async def _called(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            if len(self._callers) < MAX_CALLERS:
                self._callers.add(task)
                await self._answer(reader, writer)
        finally:
            self._callers.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ValueError, TimeoutError):  # whoever it was has gone, or talks without end
            node = read_order(await asyncio.wait_for(reader.readline(), LINE_S), self._token)
            if node is not None:
                problem = await self._kill(node)
                writer.write(json.dumps({"problem": problem}).encode() + b"\n")
                await asyncio.wait_for(writer.drain(), LINE_S)
