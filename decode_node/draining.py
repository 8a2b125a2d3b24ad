"""A decode node that is to end: which branches are asked for now, and which again later. Pure.

Oldest first, and few at once: each move has a link's bandwidth to itself for a while, and is over sooner than if all went together.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Final

from decode_node.mover import Mover
from decode_node.running_branch import RunningBranch
from proto.attempt_key import AttemptKey

MOVES_AT_ONCE: Final = 4  # of a drain: enough to hide the routers' and the targets' answers
REST_S: Final = 0.1  # before a branch whose move came to nothing is asked for again, at least


class Draining:
    """Owned by what runs here, which it asks the mover to move once it has begun."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._rests_until: dict[AttemptKey, float] = {}
        self._ask_at = inf
        self._is_over = False
        self.deadline = inf  # when what is left is given up
        self.has_begun = False

    def begin(self, deadline: float) -> None:
        """The node takes nothing new from now on."""
        self.has_begun, self.deadline = True, min(deadline, self.deadline)

    def is_over(self, now: float) -> bool:
        """Whether what is left is to be given up; the deadline is passed once."""
        self._is_over = self._is_over or now >= self.deadline
        return self._is_over

    def ask(self, branches: Iterable[RunningBranch], now: float) -> None:
        """Ask for targets, as many as may be: at the end of each turn."""
        for key, until in self._mover.take_rests():
            self._rests_until[key] = max(until, now + REST_S)
        if not self.has_begun:
            self._rests_until.clear()
            return
        self._ask_at, rests = inf, {}
        for branch in branches:
            until = self._rests_until.get(branch.key, now)
            if until > now:
                rests[branch.key] = until
                self._ask_at = min(self._ask_at, until)
            elif len(self._mover) < MOVES_AT_ONCE:
                self._mover.want(branch, now)
        self._rests_until = rests

    def next_deadline(self) -> float | None:
        """When somebody may be asked for again, or is given up."""
        at = min(self._ask_at, inf if self._is_over else self.deadline)
        return at if at < inf else None
