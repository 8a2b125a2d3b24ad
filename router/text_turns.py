"""Whose large text is worked on, and who waits: threads do it beside the loop, so many bytes at once, in the order of arrival.

Tokenizing takes a hundred times a text's size of memory. Texts of a megabyte and more take turns with each other, so that they hold
up none that is shorter, and so do those whose parsing has turns (json_reading.py), which sleep in their threads: short ones have
threads of their own. Who gives up keeps its turn until its thread has ended, which nobody can end. Not here: what is done.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

from router.json_reading import LARGE

AT_ONCE: Final = 8 << 20  # bytes, of either kind; one text may be larger
LONG: Final = 1 << 20  # bytes
_NUM_THREADS: Final = 16
_NUM_SMALL: Final = 4  # threads of texts that are smaller than LARGE
_GIVE_WAY_S: Final = 0.0005  # for so long a thread keeps the interpreter from the loop; usually ten times that

R = TypeVar("R")


class _Lane:
    """Texts of one kind. Of one loop's thread at a time."""

    def __init__(self) -> None:
        self._taken = 0  # bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size: int) -> None:
        """Wait for a turn of so many bytes; `give_back` ends it."""
        if not self._waiting and self._taken + size <= AT_ONCE:
            self._taken += size
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._let_in()  # those behind it
            else:  # it came at the same time
                self.give_back(size)
            raise

    def give_back(self, size: int) -> None:
        """A turn is over."""
        self.forget(size)
        self._let_in()

    def forget(self, size: int) -> None:
        """The same, when the loop has ended, and whoever waited there."""
        self._taken -= size

    def _let_in(self) -> None:
        while self._waiting and (self._waiting[0][1].cancelled() or self._taken + self._waiting[0][0] <= AT_ONCE):
            size, turn = self._waiting.popleft()
            if not turn.cancelled():
                self._taken += size
                turn.set_result(None)


class TextTurns:
    """Calls functions of large texts in threads."""

    def __init__(self) -> None:
        self._small, self._short, self._long = _Lane(), _Lane(), _Lane()
        self._small_threads = ThreadPoolExecutor(_NUM_SMALL, "router-small-text")
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "router-text")
        self._num_working = 0
        self._usual_s = sys.getswitchinterval()

    async def call(self, size: int, work: Callable[[], R]) -> R:
        """What `work` returns or raises; `size`: bytes of its text."""
        lane = self._long if size >= LONG else self._short if size >= LARGE else self._small
        threads = self._small_threads if lane is self._small else self._threads
        size, loop = min(size, AT_ONCE), asyncio.get_running_loop()
        await lane.take(size)

        def ended(give_back: Callable[[int], None]) -> None:
            self._works(-1)
            give_back(size)

        def over(_: Future[R]) -> None:
            try:
                loop.call_soon_threadsafe(ended, lane.give_back)
            except RuntimeError:
                ended(lane.forget)

        self._works(1)
        try:
            future = threads.submit(work)
        except RuntimeError:  # the process ends, or has no thread left
            ended(lane.give_back)
            raise
        future.add_done_callback(over)
        try:
            return await asyncio.wrap_future(future)
        finally:
            del future, work  # what was raised holds this frame: a circle, with the text in it

    def _works(self, number: int) -> None:
        """So many more threads work: with as many as there are the loop would get the interpreter back after each had its turn."""
        self._num_working += number
        sys.setswitchinterval(_GIVE_WAY_S if self._num_working else self._usual_s)
