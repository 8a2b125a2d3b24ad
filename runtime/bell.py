"""Wakes the one task that waits for something to do: asyncio.Event for a single waiter, in a third of its steps.

A ring while nobody waits is kept, and several are one. Use it on the loop's thread.
"""

from __future__ import annotations

import asyncio


class Bell:
    """Made anywhere; rung and waited for on one loop."""

    def __init__(self) -> None:
        self._is_rung = False
        self._waiter: asyncio.Future[None] | None = None

    def ring(self) -> None:
        """Let `wait` return, now or the next time."""
        self._is_rung = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Return once it was rung since the last return; at once if it has been. For one task at a time."""
        if not self._is_rung:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._is_rung = False

    @property
    def is_rung(self) -> bool:
        """Whether `wait` would return at once."""
        return self._is_rung
