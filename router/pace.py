"""How long a newcomer would wait in the queue, from how fast the queue has moved while somebody waited. Pure.

The pace is a mean over the last minute or so of waiting time: dispatches and seconds, both of which fade alike, read as of the last
dispatch. Sequences of one batch end together, so a queue may move by leaps: the time since the last leap counts only once it is
longer than all that the mean looks at, which is when the queue stands still.

In doubt the estimate is too short, since nobody is to be turned away who could have been served: nothing is known before a few
dispatches, and an empty queue forgets all, because it says that there is more room than the pace would tell.
"""

from __future__ import annotations

import math
from typing import Final

_MEMORY_S: Final = 60.0  # what was so long ago counts 1/e
_ENOUGH: Final = 8  # dispatches, before which there is no pace


class QueuePace:
    """Hears when somebody begins to wait, when somebody is dispatched, and when nobody waits any more."""

    def __init__(self) -> None:
        self._last_at: float | None = (
            None  # when somebody who waited was dispatched last, or began to; None: nobody waits
        )
        self._num_dispatched = 0  # since then
        self._dispatches = 0.0  # the same, faded
        self._seconds = 0.0  # in which they happened, faded

    def waits(self, now: float) -> None:
        """Somebody finds no room."""
        if self._last_at is None:
            self._last_at = now

    def dispatched(self, num: int, now: float) -> None:
        """So many leave the queue at its head; those who did not have to wait say nothing."""
        if self._last_at is None or (not self._num_dispatched and now <= self._last_at):
            return
        fading = math.exp((self._last_at - now) / _MEMORY_S)
        self._dispatches = self._dispatches * fading + num
        self._seconds = self._seconds * fading + _MEMORY_S * (1 - fading)
        self._num_dispatched += num
        self._last_at = now

    def came_back(self) -> None:
        """One that had been dispatched waits again, in front of the others: the queue is as long as it was."""
        self._num_dispatched = max(self._num_dispatched - 1, 0)
        self._dispatches = max(self._dispatches - 1, 0.0)

    def is_empty(self) -> None:
        """Nobody waits."""
        self._last_at, self._num_dispatched, self._dispatches, self._seconds = None, 0, 0.0, 0.0

    def wait_s(self, num_ahead: int, now: float) -> float:
        """Seconds until so many will have been dispatched; 0 where nothing is known."""
        if self._last_at is None or self._num_dispatched < _ENOUGH:
            return 0.0
        # Less than one is what fading left of those that came back: it tells nothing, and would make hours of seconds.
        return num_ahead * max(self._seconds, now - self._last_at) / max(self._dispatches, 1.0)
