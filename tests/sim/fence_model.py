"""A fence floor without bounds and cleverness: what a node was told to take no more, and may not take for a while.

It knows less than connector/fence.py (nothing of attempts that live) and never more: what it forbids must be refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from connector.fence import MIN_REST_S
from proto.attempt_key import AttemptKey, BranchKey

_MARGIN_S: Final = 0.1


class FenceModel:
    """The floors that Cancel and Release have set at one node, by the node's clock."""

    def __init__(self) -> None:
        self._floors: dict[BranchKey, tuple[int, float]] = {}

    def end(self, keys: Iterable[AttemptKey], now: float) -> None:
        """These attempts, and older ones of their branches, are over."""
        for key in keys:
            floor, until = self._floors.get(key.branch, (0, 0.0))
            if key.attempt + 1 >= floor or until <= now:
                self._floors[key.branch] = (key.attempt + 1, now + MIN_REST_S - _MARGIN_S)

    def forbids(self, keys: Iterable[AttemptKey], now: float) -> bool:
        """Whether none of these attempts may begin."""
        return all(key.attempt < self._floor(key.branch, now) for key in keys)

    def _floor(self, branch: BranchKey, now: float) -> int:
        floor, until = self._floors.get(branch, (0, 0.0))
        return floor if now < until else 0
