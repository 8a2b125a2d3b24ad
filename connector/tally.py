"""Counts per key that one thread raises and another one reads."""

from __future__ import annotations

from collections import Counter
from threading import Lock


class Tally:
    """A number per name: bytes per peer, refusals per cause. Never goes down."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        """Raise one count."""
        with self._lock:
            self._counts[name] += amount

    def snapshot(self) -> dict[str, int]:
        """All counts, sorted by name."""
        with self._lock:
            return dict(sorted(self._counts.items()))
