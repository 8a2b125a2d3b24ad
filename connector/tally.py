"""Counts per key that one thread raises and another one reads.

Bounded: nodes may have random names (a pod's), so a process that lives for long hears of ever more of them. The names that have
gone unused for longest are counted together as OTHER; all counts together are what they would be without that.
"""

from __future__ import annotations

from threading import Lock
from typing import Final

MOST_NAMES: Final = 256  # more than a node has peers at once
OTHER: Final = "other"  # a node of that name is counted among them


class Tally:
    """A number per name: bytes per peer, refusals per cause. Never goes down while its name is there."""

    def __init__(self, most_names: int = MOST_NAMES) -> None:
        self._lock = Lock()
        self._most_names = most_names
        self._counts: dict[str, int] = {}  # what was used last is last
        self._forgotten = 0  # of the names that are not kept

    def add(self, name: str, amount: int = 1) -> None:
        """Raise one count."""
        with self._lock:
            counts = self._counts
            counts[name] = counts.pop(name, 0) + amount
            if len(counts) > self._most_names:
                self._forgotten += counts.pop(next(iter(counts)))

    def snapshot(self) -> dict[str, int]:
        """All counts, sorted by name; at most so many names, and OTHER."""
        with self._lock:
            counts = dict(self._counts)
            if self._forgotten:
                counts[OTHER] = counts.get(OTHER, 0) + self._forgotten
        return dict(sorted(counts.items()))
