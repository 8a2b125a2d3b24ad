"""The smallest cluster that keeps an objective, by trying clusters: a bound for each role alone, then pairs by their sum. Pure.

    1. both roles doubled until the objective is kept, or there are too many nodes; then as many as there may be, more of one role
       than of the other
    2. for each role, with as many of the other as kept it then: the fewest that keep it. With fewer of the other none is kept with
       less, so these two are bounds
    3. pairs from the bounds on, smallest sum first, more prefill nodes first where sums are equal

It takes for granted that more nodes of a role keep no less. Where placement by cache makes that untrue by a little (one more node
has none of the prefixes), what is found keeps the objective all the same, and was tried; that a smaller one would not is then
not certain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from bench.plan_outcome import Counts, Outcome

Try = Callable[[Counts], Outcome]


@dataclass(slots=True)
class Search:
    """Tries clusters, each once."""

    attainment: float
    max_nodes: int
    try_: Try
    tried: dict[Counts, Outcome] = field(default_factory=dict)

    def keeps(self, counts: Counts) -> bool:
        """Whether a cluster keeps the objective."""
        if counts not in self.tried:
            self.tried[counts] = self.try_(counts)
        outcome = self.tried[counts]
        return outcome.is_whole and outcome.attainment >= self.attainment

    def fewest(self, make: Callable[[int], Counts], low: int, high: int) -> int:
        """The least number from `low` to `high` whose cluster keeps it; that of `high` does."""
        while low < high:
            middle = (low + high) // 2
            if self.keeps(make(middle)):
                high = middle
            else:
                low = middle + 1
        return high

    def doubled(self, make: Callable[[int], Counts]) -> int | None:
        """1, 2, 4 …: the first number whose cluster keeps it, or `max_nodes` in all; None if that does not, either."""
        number = 1
        while make(number).total <= self.max_nodes:
            if self.keeps(make(number)):
                return number
            number *= 2
        most = self.max_nodes // make(1).total
        return most if most > number // 2 and self.keeps(make(most)) else None

    def smallest_pair(self) -> Counts | None:
        """Prefill and decode nodes; None: `max_nodes` do not keep it."""
        number = self.doubled(lambda number: Counts(number, number))
        ample = self._uneven() if number is None else Counts(number, number)
        if ample is None:
            return None
        prefill = self.fewest(lambda number: Counts(number, ample.decode), 1, ample.prefill)
        decode = self.fewest(lambda number: Counts(ample.prefill, number), 1, ample.decode)
        for total in range(prefill + decode, ample.total + 1):
            for of_prefill in range(min(total - decode, ample.prefill), prefill - 1, -1):
                if total - of_prefill <= ample.decode and self.keeps(found := Counts(of_prefill, total - of_prefill)):
                    return found
        return ample

    def _uneven(self) -> Counts | None:
        """A pair of `max_nodes` that keeps it; None: no such pair does, and so none of fewer nodes.

        What a cluster does not keep, none keeps that has no more of either role: so a few that are up to a quarter larger than they
        may be rule out every pair, and only where one of them keeps it are those that it stands for looked at."""
        last, width = self.max_nodes - 1, self.max_nodes // 4
        parts = [(low, min(low + width, last)) for low in range(1, last + 1, width + 1)]
        while parts:
            low, high = parts.pop()  # prefill nodes
            if not self.keeps(Counts(high, self.max_nodes - low)):
                continue
            if low == high:
                return Counts(low, self.max_nodes - low)
            middle = (low + high) // 2
            parts += [(low, middle), (middle + 1, high)]
        return None

    def smallest_mixed(self) -> Counts | None:
        """Mixed nodes; None: `max_nodes` do not keep it."""
        ample = self.doubled(lambda number: Counts(0, 0, number))
        if ample is None:
            return None
        return Counts(0, 0, self.fewest(lambda number: Counts(0, 0, number), ample // 2 + 1, ample))
