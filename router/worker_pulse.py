"""Which of a router's workers hang: each is asked again and again whether its loop runs. Pure.

What counts is how often one was asked since it last answered, never for how long: a parent that was stopped, or is slow itself,
asks less often, and a machine that slept has asked nobody.
"""

from __future__ import annotations

from typing import Final

BEAT_S: Final = 1.0  # between two questions
MOST_UNANSWERED: Final = 30  # a walk over all objects, or a machine with too much to do, takes seconds


class Pulse:
    """Of the workers that take connections: who loads answers nobody."""

    def __init__(self, most_unanswered: int = MOST_UNANSWERED) -> None:
        self._most_unanswered = most_unanswered
        self._unanswered: dict[int, int] = {}  # questions, by worker

    def begin(self, index: int) -> None:
        """It takes connections: from now on it answers."""
        self._unanswered[index] = 0

    def heard(self, index: int) -> None:
        """It has answered; without effect once it has ended."""
        if index in self._unanswered:
            self._unanswered[index] = 0

    def end(self, index: int) -> None:
        """It has ended, or is about to."""
        self._unanswered.pop(index, None)

    def beat(self) -> list[int]:
        """Who hangs, of those asked before; all others are to be asked now."""
        hung = [index for index, number in self._unanswered.items() if number >= self._most_unanswered]
        for index in hung:
            del self._unanswered[index]
        for index in self._unanswered:
            self._unanswered[index] += 1
        return hung

    @property
    def asked(self) -> tuple[int, ...]:
        """Whom to ask."""
        return tuple(self._unanswered)
