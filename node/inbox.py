"""The one way into a node's loop: events from any thread or task, taken out in order by the loop alone."""

from __future__ import annotations

import asyncio
import threading
from collections import deque

from node.events import Event
from runtime.bell import Bell


class Inbox:
    """A queue of events with many posters and one taker.

    Not bounded itself: what fills it is bounded where it comes from (session windows, calls under way, leased blocks, two
    plans), and the loop empties it before it does anything else.
    """

    def __init__(self) -> None:
        """Made inside the running loop that takes the events."""
        self._events: deque[Event] = deque()
        self._bell = Bell()
        self._loop = asyncio.get_running_loop()

    def post(self, event: Event) -> None:
        """Append an event; from any thread."""
        self._events.append(event)
        # A wake-up costs a system call, so one serves all events that come before the loop looks. The taker forgets the
        # ring before it empties the queue: whoever saw it rung has appended in time.
        if not self._bell.is_rung:
            self._loop.call_soon_threadsafe(self._bell.ring)

    async def wait(self) -> None:
        """Return once there may be something to take, and everybody else has had a turn."""
        if self._bell.is_rung:
            await asyncio.sleep(0)
        await self._bell.wait()

    def wake(self) -> None:
        """Let `wait` return although nothing came: a timer is due."""
        self._bell.ring()

    def take(self) -> Event | None:
        """The oldest event, or None."""
        return self._events.popleft() if self._events else None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to take."""
        return not self._events


class NewestInbox:
    """What threads that outlive an incarnation speak to: the newest one's inbox. What comes before the first one waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inbox: Inbox | None = None
        self._early: list[Event] = []

    def post(self, event: Event) -> None:
        """As Inbox.post."""
        with self._lock:
            if self._inbox is None:
                self._early.append(event)
            else:
                self._inbox.post(event)

    def turn_to(self, inbox: Inbox) -> None:
        """There is a new one."""
        with self._lock:
            self._inbox = inbox
            for event in self._early:
                inbox.post(event)
            self._early.clear()
