"""Brings a node to its end, or out of its role: on a signal, or at the wish of an operator who calls `Drain` or `ChangeRole`.

    wish --> routers are told --> DrainAsked to the core --> Drained --> its last words are acknowledged --> the process ends,
                                                                                              or goes on in another role

The routers are told first, so that little comes that must be refused; who does not answer is not waited for. Not here: the stages
(node/drain.py), and how things are taken down and put up again (node/process.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Final

from node.drain import Answer, Drain, Stage
from node.events import DrainAsked, NodeCore
from node.roles import RoleName
from proto import baton_pb2 as pb
from runtime.logs import log_event

LOG = logging.getLogger(__name__)

POLL_S: Final = 0.02
PROGRESS_S: Final = 1.0  # between two words of how far it is
WATCHERS_S: Final = 1.0  # that those who watch get to hear the last word
# What a core's snapshot calls the attempts that are here, whatever its role.
ATTEMPTS: Final = ("attempts", "branches", "local_branches")


class NeverDrainedError(RuntimeError):
    """Something of the old role is still touched long after all of it was given up: a bug; the process must not go on."""


@dataclass(frozen=True, slots=True)
class Means:
    """What the end needs of the running process."""

    announce: Callable[[], Awaitable[None]]  # tells every router that this node drains; bounded in time
    post: Callable[[DrainAsked], None]  # to the core
    num_undelivered: Callable[[], int]  # messages and calls of ours that have not arrived
    find_leftover: Callable[[], str]  # what of this role something may still touch (node/roles.py)


class Ending:
    """One node's end, from the first wish for it, and its changes of role until then. Make and use it on the running loop."""

    def __init__(self, default_timeout_s: float, role: RoleName, roles: Collection[RoleName]) -> None:
        """`roles`: those that the process can take, this one included."""
        self.has_drained = asyncio.Event()  # set by the core's Drained
        self._core: NodeCore | None = None
        self._default_timeout_s = default_timeout_s
        self._drain = Drain(role, roles)
        self._loop = asyncio.get_running_loop()
        self._wished = asyncio.Event()
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._changed: asyncio.Future[None] = (
            self._loop.create_future()
        )  # the change of role that is under way has come to its end
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

    def ask_role(self, role: RoleName, timeout_s: float | None = None) -> Answer:
        """Serve in another role; what is not handed over within `timeout_s` is given up. None: as above."""
        timeout_s = self._default_timeout_s if timeout_s is None else timeout_s
        answer = self._drain.ask_role(role, timeout_s, self._loop.time())
        log_event(LOG, logging.INFO, "role_asked", role=role, timeout_s=timeout_s, answer=answer.name)
        if answer is Answer.BEGUN:
            self._changed = self._loop.create_future()
            self._wished.set()
        return answer

    async def run(self, means: Means) -> RoleName | None:
        """Wait for a wish, then until nothing of this role is left: the role to go on in, or None, and the process may end.

        Raises NeverDrainedError if it may neither go on nor has been asked to end.
        """
        await self._wished.wait()
        if self._drain.stage is Stage.DRAINING:
            await means.announce()
            await self._until_over(means)
            log_event(LOG, logging.INFO, "drain_over", was_cut_short=self._drain.was_cut_short)
        if self._drain.is_stuck:
            raise NeverDrainedError(f"the node cannot take another role: {means.find_leftover() or 'its core'} is left")
        if self._drain.stage is Stage.SWITCHING:
            return self._drain.next_role
        self._over.set_result(None)
        if self._watches:
            await asyncio.wait(self._watches, timeout=WATCHERS_S)
        return None

    def take_up(self, core: NodeCore) -> bool:
        """The core of the next role is there; False: it is the first one's, or an end was asked for meanwhile."""
        self._core = core
        self.has_drained.clear()
        if self._drain.stage is not Stage.SWITCHING:
            return False
        self._drain.take_up()
        self._wished.clear()
        return True

    def tell_changed(self) -> None:
        """The node can be found in its new role."""
        self._changed.set_result(None)

    async def _until_over(self, means: Means) -> None:
        shown, show_at = (-1, -1), 0.0
        told = float("inf")
        while self._look(means) not in (Stage.SWITCHING, Stage.OVER):
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
        has_drained = self.has_drained.is_set()
        if has_drained and self._drain.next_role is not None:
            has_drained = not means.find_leftover()
        return self._drain.look(has_drained, means.num_undelivered(), self._loop.time())

    def _left(self) -> tuple[int, int]:
        """Attempts that are here, and leases that stand here."""
        snapshot = {} if self._core is None else self._core.snapshot()
        numbers = {name: value for name, value in snapshot.items() if isinstance(value, int)}
        return sum(numbers.get(name, 0) for name in ATTEMPTS), numbers.get("leases", 0)

    def watch(self) -> AsyncIterator[pb.DrainProgress]:
        """How far the end is, again and again until it is over."""

        def last_word() -> pb.DrainProgress:
            return pb.DrainProgress(has_ended=True, was_cut_short=self._drain.was_cut_short)

        return self._watch(last_word, self._over)

    def watch_change(self) -> AsyncIterator[pb.DrainProgress]:
        """How far the change of role is that was just begun, until the node serves in it, or is over."""
        changed = self._changed

        def last_word() -> pb.DrainProgress:
            was_cut_short, has_changed = self._drain.was_cut_short, changed.done()
            return pb.DrainProgress(has_ended=not has_changed, has_changed=has_changed, was_cut_short=was_cut_short)

        return self._watch(last_word, self._over, changed)

    async def _watch(
        self, last_word: Callable[[], pb.DrainProgress], *ends: asyncio.Future[None]
    ) -> AsyncIterator[pb.DrainProgress]:
        told: asyncio.Future[None] = self._loop.create_future()
        self._watches.add(told)
        try:
            while not any(end.done() for end in ends):
                attempts, leases = self._left()
                ms_left = round(1000 * self.seconds_left)
                yield pb.DrainProgress(attempts=attempts, leases=leases, ms_left=ms_left)
                await asyncio.wait(ends, timeout=PROGRESS_S, return_when=asyncio.FIRST_COMPLETED)
            yield last_word()
        finally:
            told.set_result(None)
            self._watches.remove(told)
