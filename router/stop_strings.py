"""Stop strings in a text that comes in parts, found at the same place however it is cut. Pure.

Text is looked at character by character, and the first character that completes a stop string ends it; of several completed
by the same character the longest counts. What may still become one is held back, so no part of a stop text is ever shown.

    … shown │ held back │ part      held back = the longest end of the text that begins a stop string

Each stop string has Knuth, Morris and Pratt's automaton: its state is the number of its first characters that the text ends
with, so the cost is that of the text, whatever the strings are.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Looks for the first of `stops`, none of which is empty."""

    __slots__ = ("_fallbacks", "_firsts", "_held", "_states", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._states = [0] * len(self._stops)
        self._held = ""

    def push(self, part: str) -> tuple[str, bool]:
        """What can be shown now, and whether a stop string was found; then nothing may be pushed any more."""
        if self._firsts.isdisjoint(part) and not any(self._states):
            return part, False  # the usual case: nothing has begun, nothing begins
        text = self._held + part
        for end, character in enumerate(part, len(self._held) + 1):
            longest = max([self._step(i, character) for i in range(len(self._stops))], default=0)
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
        stop, fallbacks, state = self._stops[i], self._fallbacks[i], self._states[i]
        while state and stop[state] != character:
            state = fallbacks[state]
        self._states[i] = state = state + (stop[state] == character)
        return state if state == len(stop) else 0


def _fallbacks(stop: str) -> list[int]:
    """For each number of matched characters, the next smaller one that the same text also matches."""
    fallbacks = [0, 0]
    for position in range(1, len(stop)):
        state = fallbacks[position]
        while state and stop[state] != stop[position]:
            state = fallbacks[state]
        fallbacks.append(state + (stop[state] == stop[position]))
    return fallbacks
