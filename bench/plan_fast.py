"""The scheduler's rules in numbers, so that steps which are all alike are taken at once. Pure.

Between a newcomer, an end and a shortage of blocks every plan of a node is the last one again, each row a position on: nothing
in it has to be decided, and its time is a sum. So a row is kept as a constant (its position less the plans so far), ends stand in
a heap by the number of the plan that they come with, and blocks are taken for many steps at once. What decides is the product's:
block pool, prefix cache, reserve, and at the door of a decode node its admission. The rules of engine/planning.py,
engine/room.py and engine/reading.py are told again here, in the same order; a property test holds this engine against the
scheduler itself (plan_engine.py), step by step, under shortage, too.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import chain

import numpy as np

from bench.plan_engine import STEPS_AHEAD, Sizes, Step, Told, Work
from bench.plan_rates import Shape, pairs_of
from bench.plan_rows import Filed, Planned, Row, Waiting, is_coming
from engine.block_pool import BlockPool
from engine.prefix_cache import PrefixCache
from engine.reserve import make_reserve
from engine.sequence import blocks_for


class FastEngine:
    """One node's engine; see bench.plan_engine.Engine."""

    def __init__(self, sizes: Sizes, role: str) -> None:
        """`role`: "prefill", "decode" or "mixed"."""
        self.pool = BlockPool(sizes.num_blocks, sizes.block_size)
        self._cache = PrefixCache(self.pool)
        self._sizes = sizes
        self._block_size = sizes.block_size
        self._lends = role == "prefill"
        self._resumes = role == "mixed"
        self.promises_growth = sizes.reserve.policy == "full"
        self._reserve = make_reserve(sizes.reserve, sizes.block_size)
        self._waiting: deque[Waiting] = deque()
        self._prompt: Row | None = None  # of which chunks are left to plan
        self._rows: list[Row] = []  # with rows left to plan, oldest first
        self._leaving: dict[Row, None] = {}  # that have none left, or none yet, until their slot is free
        self._filed = Filed(sizes.block_size)
        self._num_positions = 0  # that the rows' next plan reads
        self._num_new = 0  # rows that were in no plan yet
        self._num_plans = 0  # with rows, so far
        self._num_read = 0  # of them
        self._unread: deque[Planned] = deque()
        self._num_slots = sizes.max_num_seqs  # free
        self._num_reserved = 0
        self._num_arrived = 0
        self._num_preempting = 0
        self._is_short = False
        self._lent: dict[int, list[int]] = {}
        self.num_preempted = 0

    # ---------------------------------------------------------------- sequences come and go

    def submit(self, work: Work) -> None:
        """See Engine."""
        self._num_arrived += 1
        num_new = 1 if self._lends else work.num_new
        self._waiting.append(Waiting(work, self._num_arrived, work.num_given, num_new, False))

    def adopt(self, work: Work, block_ids: Sequence[int], num_promised: int) -> None:
        """See Engine."""
        self._num_arrived += 1
        self._num_reserved -= 1
        begin, end = work.num_given, work.num_given + work.num_new - 1
        held = list(block_ids)
        row = Row(work, self._num_arrived, work.num_prompt, begin, end, begin, begin, held, num_promised, False)
        row.has_said = row.is_through = row.is_begun = True
        row.is_promised = num_promised > 0
        self._num_slots -= 1
        self._publish(row, begin)
        self._start_decoding(row)

    def release(self, work: Work) -> None:
        """See Engine."""
        self.pool.free(self._lent.pop(work.request))

    def reserve_slot(self) -> bool:
        """See Engine."""
        if self._num_slots - self._num_reserved < 1:
            return False
        self._num_reserved += 1
        return True

    def unreserve_slot(self) -> None:
        """See Engine."""
        self._num_reserved -= 1

    def _start_decoding(self, row: Row) -> None:
        row.base, row.is_decoding = row.num_planned - self._num_plans, True
        self._num_new += 1
        self._rows.insert(bisect_left(self._rows, row.arrival, key=lambda each: each.arrival), row)
        self._num_positions += row.num_planned + 1
        self._filed.put(row)

    def _computed(self, row: Row) -> int:
        """Leading positions by the steps that were read."""
        if row.joined < 0 or not row.is_through:
            return row.num_computed
        read = max(self._num_read, row.joined)
        return row.base + read + sum(each >= read for each in row.missed)

    # ---------------------------------------------------------------- room

    def admits(self, num_blocks: int, remaining: Sequence[int], granted: Sequence[int]) -> bool:
        """See Engine."""
        return not (self._is_short or self._num_preempting) and self._has_room(num_blocks, remaining, granted)

    def _has_room(self, num_blocks: int, remaining: Sequence[int], granted: Sequence[int] = ()) -> bool:
        """As Room.admits."""
        prompt, num_lacking = self._prompt, 0
        growing = [row for row in self._leaving if not (row.is_preempting or row.lends)] + self._rows
        if prompt is not None:
            growing += [] if prompt.lends else [prompt]
            if not prompt.is_promised:
                num_lacking = max(prompt.begin // self._block_size + 1 - len(prompt.block_ids), 0)
        num_reserved = 0
        if growing or granted:
            left = [row.end - max(self._computed(row), row.begin) for row in growing]
            num_reserved = self._reserve.num_blocks(np.array((*left, *granted, *remaining), np.int64))
        return num_blocks + num_lacking + num_reserved <= self.pool.num_available

    def _admit(self, chunks: Sequence[tuple[Row, int]]) -> Row | None:
        """The head of the queue, if there is room; `chunks`: of this plan so far."""
        if not self._waiting or self._is_short or self._num_preempting or self._num_slots - self._num_reserved < 1:
            return None
        work, arrival, num_given, num_new, has_said = self._waiting[0]
        most = (num_given - 1) // self._block_size
        unread = chain(chunks, *(planned.chunks for planned in self._unread))
        if is_coming(work.keys, len(self._cache.match(work.keys, most)), most, self._block_size, unread):
            return None
        matched = self._cache.acquire_match(work.keys, most)
        is_to_limit = self.promises_growth or self._lends
        num_total = blocks_for(num_given + num_new - 1 if is_to_limit else num_given, self._block_size)
        num_needed = num_total - len(matched)
        if not self._has_room(num_needed, () if is_to_limit else (num_new,)):
            self.pool.free(matched)
            return None
        num_promised = num_needed if is_to_limit else 0
        self.pool.promise(num_promised)
        self._waiting.popleft()
        self._num_slots -= 1
        start, begin = len(matched) * self._block_size, num_given - 1
        end = begin + num_new
        row = Row(work, arrival, work.num_prompt, begin, end, start, start, matched, num_promised, self._lends)
        row.is_promised, row.has_said = num_promised > 0, has_said
        self._prompt = row
        return row

    def _grow(self, row: Row, end: int) -> bool:
        """As Room.grow."""
        num_new = blocks_for(end, self._block_size) - len(row.block_ids)
        if num_new <= 0:
            return True
        is_promised = row.num_promised > 0
        if not is_promised and not self.pool.can_allocate(num_new):
            return False
        row.block_ids += self.pool.allocate(num_new, promised=is_promised)
        row.num_promised -= num_new if is_promised else 0
        return True

    # ---------------------------------------------------------------- steps

    def plan(self) -> Step | None:
        """See Engine."""
        self._is_short = False
        index, num_positions = self._num_plans, self._num_positions
        num_rows, is_joined = len(self._rows), self._num_new > 0
        ends, marks = self._filed.take_ends(index), list[Row]()
        full = self._filed.full(index)
        num_unpromised = sum(not row.num_promised for row in full)
        if self.pool.can_allocate(num_unpromised):
            for row in full:
                self._grow(row, row.base + index + 1)
            for row in ends:
                self._leave(row)
        else:
            ends, num_missing, num_unread = self._plan_short(index, full, ends, marks)
            num_rows -= num_missing
            num_positions -= num_unread
        if is_joined:
            for row in (*self._rows, *ends):
                if row.joined < 0 and index not in row.missed[-1:]:
                    row.joined = index
            self._num_new = sum(row.joined < 0 for row in self._rows)
        if self._rows or num_rows:
            self._num_plans += 1
        self._num_positions = self._num_positions_of_next(num_rows, num_positions, ends)
        starts: list[tuple[Work, int]] = []
        sizes: list[tuple[int, int]] = []
        chunks = self._plan_chunks(self._sizes.max_num_batched_tokens - num_rows, starts, sizes)
        if not (num_rows or chunks or marks):
            return None
        if num_rows or chunks:
            self._reserve.stepped()
        is_silent = not (ends or chunks or marks)
        is_plain = is_silent and not (is_joined or self._is_short)
        self._unread.append(Planned(self._num_plans, ends, chunks, marks, is_plain, is_silent))
        if not sizes:
            return Step(Shape(num_rows, num_positions), ())
        num_tokens, num_pairs = sum(number for number, _ in sizes), sum(pairs_of(*each) for each in sizes)
        return Step(Shape(num_rows, num_positions, num_tokens, num_pairs), tuple(starts))

    def _num_positions_of_next(self, num_rows: int, num_positions: int, ends: Sequence[Row]) -> int:
        """What the next plan's rows read."""
        if self._is_short:
            return sum(row.base + self._num_plans + 1 for row in self._rows)
        return num_positions + num_rows - sum(row.end + 1 for row in ends)

    def _leave(self, row: Row) -> None:
        """No further row of it is planned."""
        self._rows.remove(row)
        self._filed.remove(row)
        self._leaving[row] = None

    def _plan_short(
        self, index: int, full: Sequence[Row], ends: Sequence[Row], marks: list[Row]
    ) -> tuple[list[Row], int, int]:
        """Blocks do not suffice: one by one, oldest first. Who ends with this plan, how many have no row in it, and what those
        would have read."""
        without: list[Row] = []
        ended: list[Row] = []
        num_lacking = 0
        for row in dict.fromkeys(sorted((*full, *ends), key=lambda each: each.arrival)):
            if row.is_preempting:
                continue
            if not self._grow(row, row.base + index + 1):
                self._is_short = True
                without.append(row)
                num_lacking += 1
                num_lacking -= self._give_way(num_lacking, row, index, marks)
            elif row in ends:
                ended.append(row)
                self._leave(row)
        missing = dict.fromkeys((*without, *marks))
        num_unread = sum(row.base + index + 1 for row in missing)
        for row in without:
            if not row.is_preempting:
                self._filed.remove(row)
                row.missed.append(index)
                row.base -= 1
                self._filed.put(row)
        return ended, len(missing), num_unread

    def _give_way(self, num_lacking: int, needy: Row, index: int, marks: list[Row]) -> int:
        """As Planner._give_way."""
        while self._num_coming() < num_lacking:
            if not self._rows:
                return 0
            victim = self._rows[-1]
            self._preempt(victim, index)
            marks.append(victim)
            if victim is needy:
                return 1
        return 0

    def _num_coming(self) -> int:
        return self.pool.num_freed_by(each for row in self._leaving if not row.lends for each in row.block_ids)

    def _preempt(self, victim: Row, index: int) -> None:
        decoding = [row for row in (*self._rows, *self._leaving) if not row.is_preempting and row.is_decoding]
        num_limit = sum(row.end + 1 - row.num_prompt for row in decoding)
        num_left = sum(row.end - max(self._computed(row), row.begin) for row in decoding)
        self._reserve.preempted(num_limit - num_left, num_limit, len(decoding))
        self._leave(victim)
        victim.is_preempting, victim.num_planned = True, victim.base + index
        self._num_preempting += 1
        self.num_preempted += 1

    def _plan_chunks(
        self, budget: int, starts: list[tuple[Work, int]], sizes: list[tuple[int, int]]
    ) -> list[tuple[Row, int]]:
        """As Planner._plan_chunks; who is begun is put into `starts`, tokens and context of each chunk into `sizes`."""
        chunks: list[tuple[Row, int]] = []
        while budget > 0 and (row := self._prompt or self._admit(chunks)) is not None:
            start = row.num_planned
            end = min(start + budget, row.begin + 1)
            if not self._grow(row, end):
                self._is_short = True
                break
            row.num_planned = end
            if not row.is_begun:
                row.is_begun = True
                starts.append((row.work, start))
            if end == row.begin + 1:
                self._prompt = None
                if end < row.end:
                    self._start_decoding(row)
                else:
                    self._leaving[row] = None
            chunks.append((row, end))
            sizes.append((end - start, start))
            budget -= end - start
        return chunks

    def complete(self) -> list[Told]:
        """See Engine."""
        planned = self._unread.popleft()
        self._num_read = planned.num_plans
        told = [self._end(row, row.end) for row in planned.ends]
        for row, end in planned.chunks:
            row.num_computed = end
            self._publish(row, end)
            if end == row.begin + 1:
                is_first, row.has_said, row.is_through = not row.has_said, True, True
                if end == row.end:
                    told.append(self._end(row, end)._replace(is_first=is_first))
                elif is_first:
                    told.append(Told(row.work, end, True, None, row.end - end))
            elif self._lends:
                told.append(Told(row.work, end, False, None, row.end - end))
        for row in planned.marks:
            self._num_preempting -= 1
            self._publish(row, row.num_planned)
            num_left = row.end - row.num_planned
            self._retire(row)
            if self._resumes:
                self._waiting.appendleft(Waiting(row.work, row.arrival, row.num_planned + 1, num_left, row.has_said))
            else:
                told.append(Told(row.work, row.num_planned, False, "preempted", num_left))
        return told

    def _end(self, row: Row, end: int) -> Told:
        is_first, row.has_said = not row.has_said, True
        self._retire(row)
        return Told(row.work, end, is_first, "length")

    def _retire(self, row: Row) -> None:
        """Its slot is free, and its blocks, unless it lends them."""
        del self._leaving[row]
        self._num_slots += 1
        self.pool.unpromise(row.num_promised)
        if row.lends:
            self._lent[row.work.request] = row.block_ids
        else:
            self.pool.free(row.block_ids)

    def _publish(self, row: Row, num_computed: int) -> None:
        """As Room.publish, of the prompt's blocks."""
        num_full = min(num_computed, row.num_prompt) // self._block_size
        full = slice(row.num_published, num_full)
        self.pool.publish(dict(zip(row.block_ids[full], row.work.keys[full], strict=True)))
        row.num_published = max(row.num_published, num_full)

    # ---------------------------------------------------------------- many steps at once

    def num_uniform(self) -> int:
        """See Engine."""
        if self._num_new or not self._goes_on() or not all(each.is_plain for each in self._unread):
            return 0
        return self._num_with_room(self._filed.next_end() - self._num_plans)

    def ahead(self, keeps_cache: bool = False) -> tuple[int, Shape] | None:
        """See Engine."""
        if self._is_short or not self._goes_on() or not all(each.is_silent for each in self._unread):
            return None
        number = self._num_with_room(self._filed.next_end() - self._num_plans + 1)
        if keeps_cache:
            number = self._filed.num_within(self._num_plans, number, self.pool.counts().free)
        return (number, Shape(len(self._rows), self._num_positions)) if number else None

    def _goes_on(self) -> bool:
        """Whether the next plan is of these rows alone."""
        if len(self._unread) < STEPS_AHEAD or not self._rows or self._num_preempting or self._prompt is not None:
            return False
        return not self._waiting or self._num_slots <= self._num_reserved

    def _num_with_room(self, number: int) -> int:
        """As many of so many next plans as find blocks for all their rows."""
        room, most = self.pool.num_available, -(-number // self._block_size)
        if len(self._rows) * most <= room or sum(not row.num_promised for row in self._rows) * most <= room:
            return number
        return bisect_right(range(1, number + 1), room, key=lambda some: self._filed.num_growing(self._num_plans, some))

    def skip(self, num_steps: int) -> None:
        """See Engine."""
        if num_steps == 0:
            return
        behind = self._num_plans + num_steps
        for row in self._filed.growing(self._num_plans, num_steps):
            self._grow(row, row.base + behind)
        self._num_read = self._unread[0].num_plans + num_steps - 1
        self._num_plans = behind
        self._num_positions += num_steps * len(self._rows)
        for planned in self._unread:
            planned.num_plans += num_steps
        for _ in range(num_steps):
            before = self._reserve.value
            self._reserve.stepped()
            if self._reserve.value == before:
                break
