"""Many deadlines, one per key: which are due, and when the next one is. Knows no clock."""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


def earliest(*instants: float | None) -> float | None:
    """The first to come; None: there is none."""
    first: float | None = None
    for at in instants:
        if at is not None and (first is None or at < first):
            first = at
    return first


class Timers(Generic[K]):
    """At most one instant per key; setting it again replaces it. O(log n) each."""

    def __init__(self) -> None:
        self._at: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []  # an entry counts if it is its key's current instant
        self._serial = count()

    def set(self, key: K, at: float | None) -> None:
        """Fire `key` at the instant `at`; None clears it."""
        if at is None:
            self._at.pop(key, None)
        elif self._at.get(key) != at:
            self._at[key] = at
            heappush(self._heap, (at, next(self._serial), key))
            if len(self._heap) > 2 * len(self._at) + 64:  # most are of ended work, and far away
                self._heap = [entry for entry in self._heap if self._at.get(entry[2]) == entry[0]]
                heapify(self._heap)

    def pop_due(self, now: float) -> list[K]:
        """Keys whose instant has come, earliest first; they are cleared."""
        due: list[K] = []
        while self._heap and self._heap[0][0] <= now:
            at, _, key = heappop(self._heap)
            if self._at.get(key) == at:
                del self._at[key]
                due.append(key)
        return due

    def next(self) -> float | None:
        """The earliest instant, or None."""
        while self._heap and self._at.get(self._heap[0][2]) != self._heap[0][0]:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None
