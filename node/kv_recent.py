"""Keys that the KV pool has said a moment ago to have: their blocks need not be copied again. Pure.

Many sequences begin alike. Without this each one that is done would fill the staging buffer with the same leading blocks, and
leave no room for what is new behind them. A moment only: the pool may have dropped one since, which costs a recompute.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class RecentKeys:
    """At most so many, each for so long."""

    def __init__(self, most: int, life_s: float) -> None:
        self._most = most
        self._life_s = life_s
        self._noted_at: OrderedDict[bytes, float] = OrderedDict()  # the longest noted first

    def __len__(self) -> int:
        return len(self._noted_at)

    def note(self, keys: Iterable[bytes], now: float) -> None:
        """The pool has them."""
        for key in keys:
            self._noted_at[key] = now
            self._noted_at.move_to_end(key)
        while len(self._noted_at) > self._most:
            self._noted_at.popitem(last=False)

    def drop(self, keys: Iterable[bytes]) -> None:
        """The pool is not to have them."""
        for key in keys:
            self._noted_at.pop(key, None)

    def has(self, key: bytes, now: float) -> bool:
        """Whether the pool had it less than the given time ago."""
        noted_at = self._noted_at.get(key)
        return noted_at is not None and now - noted_at < self._life_s
