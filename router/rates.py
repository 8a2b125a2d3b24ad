"""How fast nodes compute prompts, as placement takes it: equal nodes measure unequal rates, and the least of it is true. Pure.

What nodes measure differs from one to the next, and from one moment to the next, by what they were asked and by what else their
machines do. Were the rates taken as they are told, an idle cluster would send every prompt to the node that happened to look
fastest. So a rate counts once it rests on many tokens, and rates within a factor of two count as the same, the highest of
them; a node's is taken anew only where it has changed by a quarter. What is left are nodes on other hardware, or with other
neighbours.
"""

from __future__ import annotations

from typing import Final

from proto.prefill_speed import read_rate
from router.events import NodeRef

SAME: Final = 2.0
KEEPS: Final = 1.25
NUM_TOKENS: Final = 20_000  # computed by a node whose rate counts


class Rates:
    """Prompt tokens per second, by node."""

    def __init__(self) -> None:
        self._told: dict[NodeRef, float] = {}  # those that count
        self._few: dict[NodeRef, float] = {}  # those that do not yet
        self._taken: dict[NodeRef, float] | None = (
            None  # of those that count; None: to be made anew when it is asked for
        )
        self._highest: float | None = None  # goes with it
        self.version = 0  # what `of` says may be other than under the one before

    def hear(self, node: NodeRef, tokens_per_s: float, num_tokens: int) -> None:
        """A node says how fast it has computed so many; what cannot be right, as a 0 before its first prompt, changes nothing."""
        if (rate := read_rate(tokens_per_s)) is None:
            return
        counts = num_tokens >= NUM_TOKENS
        if counts and self._few.pop(node, None) is not None:
            self._change()
        told = self._told if counts else self._few
        known = told.get(node)
        if known is None or not known / KEEPS <= rate <= known * KEEPS:
            told[node] = rate
            self._change()

    def forget(self, node: NodeRef) -> None:
        """It is gone."""
        if self._few.pop(node, None) is not None or self._told.pop(node, None) is not None:
            self._change()

    def _change(self) -> None:
        self._taken = None
        self.version += 1

    def of(self, node: NodeRef) -> float | None:
        """The rate to reckon with: where a node's own does not count, the highest, so that it is tried; None: there is none."""
        if self._taken is None:
            self._taken = _alike(self._told)
            self._highest = max((self._taken or self._few).values(), default=None)
        return self._taken.get(node, self._highest)


def _alike(rates: dict[NodeRef, float]) -> dict[NodeRef, float]:
    taken: dict[NodeRef, float] = {}
    highest = 0.0
    for node in sorted(rates, key=lambda each: rates[each], reverse=True):
        if rates[node] * SAME < highest or not highest:
            highest = rates[node]
        taken[node] = highest
    return taken
