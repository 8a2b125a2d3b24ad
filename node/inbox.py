"""The one way into a node's loop: events from any thread or task, taken out in order by the loop alone."""

from __future__ import annotations

import asyncio
from collections import deque

from node.events import Event


class Inbox:
    """A queue of events with many posters and one taker.

    Not bounded itself: what fills it is bounded where it comes from (session windows, calls under way, leased blocks, two
    plans), and the loop empties it before it does anything else.
    """

    def __init__(self) -> None:
        """Made inside the running loop that takes the events."""
        self._events: deque[Event] = deque()
        self._filled = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def post(self, event: Event) -> None:
        """Append an event; from any thread."""
        self._events.append(event)
        # A wake-up costs a system call, so one serves all events that come before the loop looks. The taker clears the
        # flag before it empties the queue: whoever saw it set has appended in time.
        if not self._filled.is_set():
            self._loop.call_soon_threadsafe(self._filled.set)

    async def wait(self) -> None:
        """Return once there may be something to take, and everybody else has had a turn."""
        if self._filled.is_set():
            await asyncio.sleep(0)
        else:
            await self._filled.wait()
        self._filled.clear()

    def wake(self) -> None:
        """Let `wait` return although nothing came: a timer is due."""
        self._filled.set()

    def take(self) -> Event | None:
        """The oldest event, or None."""
        return self._events.popleft() if self._events else None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to take."""
        return not self._events
