"""The rows of the fast engine: what is known of each, and which plan brings its next block, or its end. Pure.

A row's next position is a constant of its own and the number of the plan: it is filed once, and looked at when that plan comes.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bench.plan_engine import Work


class Waiting(NamedTuple):
    """In the queue; it keeps its age when it comes back to it."""

    work: Work
    arrival: int
    num_given: int
    num_new: int
    has_said: bool


@dataclass(slots=True, eq=False)
class Row:
    """A sequence that was admitted, until its slot is free again."""

    work: Work
    arrival: int
    num_prompt: int  # of the client
    begin: int  # the position whose row samples first
    end: int  # behind the last whose row samples
    num_planned: int  # while it is a prompt
    num_computed: int  # likewise
    block_ids: list[int]
    num_promised: int
    lends: bool
    is_promised: bool = False
    has_said: bool = False  # its first token was told
    is_through: bool = False  # its last chunk was read
    is_begun: bool = False  # a plan has its first chunk
    num_published: int = 0
    joined: int = -1  # number of the first plan with a row of it; -1: it is a prompt, or in no plan yet
    base: int = 0  # the position of its next row is this and the number of the plan
    missed: list[int] = field(default_factory=list)  # plans in which it found no block
    is_decoding: bool = False  # it has, or had, rows
    is_preempting: bool = False


@dataclass(slots=True, eq=False)
class Planned:
    """A step that was not read yet."""

    num_plans: int  # with rows, this one included
    ends: list[Row]  # whose last row is in it
    chunks: list[tuple[Row, int]]  # with where each ends
    marks: list[Row]
    is_plain: bool  # rows alone, all of which were in a plan before and go on
    is_silent: bool  # nobody hears of its results


def is_coming(
    keys: Sequence[bytes], num_found: int, max_matched: int, block_size: int, chunks: Iterable[tuple[Row, int]]
) -> bool:
    """As Room.is_coming, of a newcomer's keys, `num_found` of them cached; `chunks`: of all steps that were not read."""
    most = min(max_matched, len(keys))
    if num_found == most:
        return False
    index = num_found + (most - num_found - 1) // 2
    end = (index + 1) * block_size
    return any(
        row.num_computed < end <= row.num_planned and row.work.keys[index : index + 1] == keys[index : index + 1]
        for row, _ in chunks
    )


class Filed:
    """Rows that decode, by the plans that they need a block in, and by the one that they end with."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._by_phase: dict[int, dict[Row, None]] = {}  # the plan's number, modulo block_size
        self._ends: list[tuple[int, int, int, Row]] = []  # heap: the plan, the row's age; stale ones are passed over
        self._num_filed = 0

    def put(self, row: Row) -> None:
        """Its `base` is known."""
        self._by_phase.setdefault(-row.base % self._block_size, {})[row] = None
        self._num_filed += 1
        heapq.heappush(self._ends, (row.end - 1 - row.base, row.arrival, self._num_filed, row))

    def remove(self, row: Row) -> None:
        """It was put here, and has had this `base` since."""
        phase = -row.base % self._block_size
        del self._by_phase[phase][row]
        if not self._by_phase[phase]:
            del self._by_phase[phase]

    def full(self, number: int) -> list[Row]:
        """Those that need a block in this plan."""
        rows = self._by_phase.get(number % self._block_size, ())
        return [row for row in rows if len(row.block_ids) * self._block_size == row.base + number]

    def take_ends(self, number: int) -> list[Row]:
        """Those whose last row is in this plan, if they find their blocks; oldest first, each told once."""
        found: list[Row] = []
        while self._ends and self._ends[0][0] <= number:
            entry = heapq.heappop(self._ends)
            if self._is_live(*entry):
                found.append(entry[-1])
        return found

    def next_end(self) -> int:
        """The first plan that a row ends with; there are rows."""
        while not self._is_live(*self._ends[0]):
            heapq.heappop(self._ends)
        return self._ends[0][0]

    def _is_live(self, number: int, _arrival: int, _filed: int, row: Row) -> bool:
        return number == row.end - 1 - row.base and row in self._by_phase.get(-row.base % self._block_size, ())

    def num_growing(self, number: int, num_plans: int) -> int:
        """Blocks without a promise that so many plans take, from this one on."""
        return sum(
            self._num_crossings(phase, number, num_plans) * sum(not row.num_promised for row in rows)
            for phase, rows in self._by_phase.items()
        )

    def num_within(self, number: int, num_plans: int, num_blocks: int) -> int:
        """How many of so many plans, from this one on, take these blocks at most, promised or not, and so does one more: that is
        planned before the last of them has ended."""

        def taken(plans: int) -> int:
            by_phase = self._by_phase.items()
            return sum(self._num_crossings(phase, number, plans) * len(rows) for phase, rows in by_phase)

        return bisect_right(range(1, num_plans + 1), num_blocks, key=lambda plans: taken(plans + 1))

    def growing(self, number: int, num_plans: int) -> list[Row]:
        """Who needs any in them."""
        by_phase = self._by_phase.items()
        return [row for phase, rows in by_phase if self._num_crossings(phase, number, num_plans) for row in rows]

    def _num_crossings(self, phase: int, number: int, num_plans: int) -> int:
        first = (phase - number) % self._block_size
        return 0 if first >= num_plans else 1 + (num_plans - 1 - first) // self._block_size
