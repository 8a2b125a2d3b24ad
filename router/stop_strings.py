"""Stop strings in a text that comes in parts, found at the same place however it is cut. Pure.

Text is looked at character by character, and the first character that completes a stop string ends it; of several completed
by the same character the longest counts. What may still become one is held back, so no part of a stop text is ever shown.

    … shown │ held back │ part      held back = the longest end of the text that begins a stop string

Each stop string has Knuth, Morris and Pratt's automaton: its state is the number of its first characters that the text ends
with, so the cost is that of the text, whatever the strings are. What it falls back to is computed once for all choices of a body.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final


class Stops:
    """Some stop strings, none of which is empty, and their automata; takes as long as they have characters."""

    __slots__ = ("fallbacks", "firsts", "texts")

    def __init__(self, texts: Sequence[str] = ()) -> None:
        self.texts: Final = tuple(texts)
        self.firsts: Final = frozenset(text[0] for text in self.texts)
        self.fallbacks: Final = [_fallbacks(text) for text in self.texts]

    def __bool__(self) -> bool:
        return bool(self.texts)


NO_STOPS: Final = Stops()


class StopMatcher:
    """Looks for the first of `stops` in one text."""

    __slots__ = ("_held", "_states", "_stops")

    def __init__(self, stops: Stops) -> None:
        self._stops = stops
        self._states = [0] * len(stops.texts)
        self._held = ""

    def push(self, part: str) -> tuple[str, bool]:
        """What can be shown now, and whether a stop string was found; then nothing may be pushed any more."""
        if self._stops.firsts.isdisjoint(part) and not any(self._states):
            return part, False  # the usual case: nothing has begun, nothing begins
        text = self._held + part
        for end, character in enumerate(part, len(self._held) + 1):
            longest = max([self._step(i, character) for i in range(len(self._states))], default=0)
            if longest:
                self._held = ""
                return text[: max(end - longest, 0)], True
        cut = max(len(text) - max(self._states, default=0), 0)
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """What is held back, to be shown since nothing follows."""
        held, self._held = self._held, ""
        return held

    def _step(self, i: int, character: str) -> int:
        """Let a stop string's automaton take a character; its length if it is complete, else 0."""
        stop, fallbacks, state = self._stops.texts[i], self._stops.fallbacks[i], self._states[i]
        while state and stop[state] != character:
            state = fallbacks[state]
        self._states[i] = state = state + (stop[state] == character)
        return state if state == len(stop) else 0


def _fallbacks(stop: str) -> array[int]:
    """For each number of matched characters, the next smaller one that the same text also matches."""
    fallbacks = array("I", [0, 0])
    for position in range(1, len(stop)):
        state = fallbacks[position]
        while state and stop[state] != stop[position]:
            state = fallbacks[state]
        fallbacks.append(state + (stop[state] == stop[position]))
    return fallbacks
