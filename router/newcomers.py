"""Who may begin: new requests step aside for the tokens that are here already. Pure.

Reading, checking and tokenizing a request takes as long as a dozen tokens of others, and nobody sees a millisecond of its
beginning; a token that is late for it is seen, or heard. So a newcomer begins once no event waits for the core, and one in a turn
of the loop, so that what came meanwhile goes between two; or when it has stood aside for MOST_S, however much there is: a router
that is never idle still takes requests.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Generic, TypeVar

MOST_S: Final = 0.005

Who = TypeVar("Who")


class Newcomers(Generic[Who]):
    """Those who stand aside, in the order in which they came."""

    __slots__ = ("_aside",)

    def __init__(self) -> None:
        self._aside: deque[tuple[Who, float]] = deque()

    def __len__(self) -> int:
        return len(self._aside)

    def add(self, who: Who, now: float) -> None:
        """Somebody has come."""
        self._aside.append((who, now + MOST_S))

    def next(self, now: float, is_busy: bool) -> Who | None:
        """Who begins now; None: nobody. `is_busy`: events wait for the core."""
        if not self._aside or (is_busy and now < self._aside[0][1]):
            return None
        return self._aside.popleft()[0]
