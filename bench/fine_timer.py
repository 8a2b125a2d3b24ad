"""A timer that wakes a loop to within some 50 µs: a loop's own count milliseconds, so that what is due at different instants of one
comes at once, as nothing does that several machines say. Linux alone has these (timerfd_create(2)).
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
from typing import Final

_CLOCK_MONOTONIC: Final = 1
_FLAGS: Final = os.O_NONBLOCK | os.O_CLOEXEC
_ABSOLUTE: Final = 1


class FineTimer:
    """One sleeper at a time. Make and use it on the running loop."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor: int = self._libc.timerfd_create(_CLOCK_MONOTONIC, _FLAGS)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._rung: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._ring)

    async def sleep_until(self, at: float) -> None:
        """Until an instant of time.monotonic; one that has passed is now."""
        rung = self._rung = self._loop.create_future()
        nanoseconds = max(round(at * 1e9), 1)  # 0 would mean never
        setting = struct.pack("qqqq", 0, 0, *divmod(nanoseconds, 10**9))
        if self._libc.timerfd_settime(self._descriptor, _ABSOLUTE, setting, None):
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")
        await rung

    def close(self) -> None:
        """Give it back."""
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)

    def _ring(self) -> None:
        try:
            os.read(self._descriptor, 8)
        except BlockingIOError:
            return
        if self._rung is not None and not self._rung.done():
            self._rung.set_result(None)
