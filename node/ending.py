"""Brings a node to its end: on a signal, or at the wish of an operator who calls `Drain`.

    wish --> routers are told --> DrainAsked to the core --> Drained --> its last words are acknowledged --> the process ends

The routers are told first, so that little comes that must be refused; who does not answer is not waited for. Not here: the stages
(node/drain.py), and how the process is taken down (node/process.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from node.drain import Drain, Stage
from node.events import DrainAsked, NodeCore
from proto import baton_pb2 as pb
from runtime.logs import log_event

LOG = logging.getLogger(__name__)

POLL_S: Final = 0.02
PROGRESS_S: Final = 1.0  # between two words of how far it is
WATCHERS_S: Final = 1.0  # that those who watch get to hear the last word
# What a core's snapshot calls the attempts that are here, whatever its role.
ATTEMPTS: Final = ("attempts", "branches", "local_branches")


@dataclass(frozen=True, slots=True)
class Means:
    """What the end needs of the running process."""

    announce: Callable[[], Awaitable[None]]  # tells every router that this node drains; bounded in time
    post: Callable[[DrainAsked], None]  # to the core
    num_undelivered: Callable[[], int]  # messages and calls of ours that have not arrived


class Ending:
    """One node's end, from the first wish for it. Make and use it on the running loop."""

    def __init__(self, core: NodeCore, default_timeout_s: float) -> None:
        self.has_drained = asyncio.Event()  # set by the core's Drained
        self._core = core
        self._default_timeout_s = default_timeout_s
        self._drain = Drain()
        self._loop = asyncio.get_running_loop()
        self._wished = asyncio.Event()
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._watches: set[asyncio.Future[None]] = set()  # done when the watcher has heard the last word, or has gone

    @property
    def stage(self) -> Stage:
        """How far it is."""
        return self._drain.stage

    @property
    def is_draining(self) -> bool:
        """Whether the node takes no new work."""
        return self._drain.stage is not Stage.SERVING

    @property
    def seconds_left(self) -> float:
        """Of the time that the wish has given; without one, 0."""
        deadline = self._drain.deadline
        return max(0.0, deadline - self._loop.time()) if deadline < float("inf") else 0.0

    def ask(self, cause: str, timeout_s: float | None = None) -> None:
        """End within `timeout_s`, 0 for now; None: the time that the node's flag gives."""
        timeout_s = self._default_timeout_s if timeout_s is None else timeout_s
        log_event(LOG, logging.INFO, "drain_asked", cause=cause, timeout_s=timeout_s)
        self._drain.ask(timeout_s, self._loop.time())
        self._wished.set()

    async def run(self, means: Means) -> None:
        """Wait for the wish, then until the process may end."""
        await self._wished.wait()
        if self._drain.stage is Stage.DRAINING:
            await means.announce()
            await self._until_over(means)
            log_event(LOG, logging.INFO, "drain_over", was_cut_short=self._drain.was_cut_short)
        self._over.set_result(None)
        if self._watches:
            await asyncio.wait(self._watches, timeout=WATCHERS_S)

    async def _until_over(self, means: Means) -> None:
        shown, show_at = (-1, -1), 0.0
        told = float("inf")
        while self._look(means) is not Stage.OVER:
            if self._drain.deadline < told:
                told = self._drain.deadline
                means.post(DrainAsked(told))
            if (now := self._loop.time()) >= show_at:
                show_at = now + PROGRESS_S
                if (left := self._left()) != shown:
                    shown = left
                    seconds_left = round(self._drain.deadline - now, 1)
                    log_event(
                        LOG, logging.INFO, "draining", attempts=left[0], leases=left[1], seconds_left=seconds_left
                    )
            await asyncio.sleep(POLL_S)

    def _look(self, means: Means) -> Stage:
        return self._drain.look(self.has_drained.is_set(), means.num_undelivered(), self._loop.time())

    def _left(self) -> tuple[int, int]:
        """Attempts that are here, and leases that stand here."""
        snapshot = self._core.snapshot()
        numbers = {name: value for name, value in snapshot.items() if isinstance(value, int)}
        return sum(numbers.get(name, 0) for name in ATTEMPTS), numbers.get("leases", 0)

    async def watch(self) -> AsyncIterator[pb.DrainProgress]:
        """How far it is, again and again until it is over."""
        told: asyncio.Future[None] = self._loop.create_future()
        self._watches.add(told)
        try:
            while not self._over.done():
                attempts, leases = self._left()
                ms_left = max(0, round((self._drain.deadline - self._loop.time()) * 1000))
                yield pb.DrainProgress(attempts=attempts, leases=leases, ms_left=ms_left)
                await asyncio.wait([self._over], timeout=PROGRESS_S)
            yield pb.DrainProgress(has_ended=True, was_cut_short=self._drain.was_cut_short)
        finally:
            told.set_result(None)
            self._watches.remove(told)
