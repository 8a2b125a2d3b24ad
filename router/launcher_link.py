"""The router's way to the launcher that has started it (`baton up`): one question, one line of JSON each way, on loopback.

The launcher hands every router a port and a token (deploy/control.py); a router that was started otherwise has neither, and no
node can be killed by way of it. Not here: who may ask (kill_rules.py).
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any, Final

ANSWER_S: Final = 10.0
MAX_LINE: Final = 4096


class LauncherGone(Exception):
    """It does not answer; the message is one sentence."""


class LauncherLink:
    """Where the launcher listens, and what it wants to be shown."""

    def __init__(self, address: str) -> None:
        """`address`: HOST:PORT/TOKEN. Raises ValueError."""
        place, _, self._token = address.partition("/")
        self._host, _, port = place.rpartition(":")
        self._port = int(port)
        if not (self._host and self._token):
            raise ValueError("is not HOST:PORT/TOKEN")

    async def kill(self, node: str) -> str | None:
        """Have a node killed and a new one started; why not, if it was not. Raises LauncherGone."""
        order = json.dumps({"token": self._token, "kill": node}).encode() + b"\n"
        try:
            async with asyncio.timeout(ANSWER_S):
                line = await self._asked(order)
            answer: Any = json.loads(line)
            problem: str | None = answer["problem"]
        except (OSError, TimeoutError, ValueError, KeyError, TypeError) as error:
            raise LauncherGone(f"The launcher does not answer: {error or type(error).__name__}.") from error
        return problem

    async def _asked(self, order: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=MAX_LINE)
        try:
            writer.write(order)
            return await reader.readline()
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
