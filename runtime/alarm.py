"""One wake-up call of an event loop, for whoever has a next_deadline(): never late, sometimes early.

Rearming for a later instant keeps the earlier call, which finds nothing due and is armed anew: cheaper than moving a timer at
each event. Remembers the instant itself, because a loop may answer call_at() with a handle that does not know it (uvloop does,
where the instant has passed already).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Alarm:
    """Calls `on_due` from the loop at the instant last armed for, or earlier."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_due: Callable[[], None]) -> None:
        self._loop = loop
        self._on_due = on_due
        self._handle: asyncio.Handle | None = None
        self._at = float("inf")

    def arm(self, deadline: float | None) -> None:
        """Be called at `deadline` (the loop's clock) at the latest; None asks for nothing."""
        if deadline is None or (self._handle is not None and self._at <= deadline):
            return
        self.cancel()
        self._at = deadline
        self._handle = self._loop.call_at(deadline, self._ring)

    def cancel(self) -> None:
        """Not be called."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _ring(self) -> None:
        self._handle = None
        self._on_due()
