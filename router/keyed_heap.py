"""A priority queue of keys in which every key can be moved or removed: the router's waiting queue and its timers.

Removal marks, and marked entries are skipped; they are swept out once they outnumber the live ones, so memory follows what
is alive and every operation is O(log n) on average.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

_SWEEP_SLACK = 64  # entries; below it sweeping is not worth its pass


K = TypeVar("K", bound=Hashable)


class KeyedHeap(Generic[K]):
    """Each key at most once; the lowest priority comes first, equal ones in the order in which they were put."""

    __slots__ = ("_entries", "_live", "_serial")

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, K]] = []  # (priority, serial, key)
        self._live: dict[K, tuple[float, int]] = {}  # key -> its only valid (priority, serial)
        self._serial = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, key: K) -> bool:
        return key in self._live

    @property
    def num_entries(self) -> int:
        """Entries in memory, dead ones included."""
        return len(self._entries)

    def put(self, key: K, priority: float) -> None:
        """Add the key, or move it."""
        self._serial += 1
        self._live[key] = (priority, self._serial)
        heapq.heappush(self._entries, (priority, self._serial, key))
        if len(self._entries) > 2 * len(self._live) + _SWEEP_SLACK:
            self._entries = [(at, serial, name) for name, (at, serial) in self._live.items()]
            heapq.heapify(self._entries)

    def discard(self, key: K) -> None:
        """Remove the key if it is there."""
        self._live.pop(key, None)

    def first(self) -> tuple[K, float] | None:
        """The key with the lowest priority, and that priority."""
        while self._entries:
            priority, serial, key = self._entries[0]
            if self._live.get(key) == (priority, serial):
                return key, priority
            heapq.heappop(self._entries)
        return None
