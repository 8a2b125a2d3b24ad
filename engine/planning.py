"""What the next step does: rows for what decodes, chunks of prompts, newcomers, and who gives way when blocks are short.

The rules are told in engine/scheduler.py, which reads the results. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from engine.plan import Decodes, Plan, PrefillChunk, SlotMark, SlotStart
from engine.population import Population
from engine.room import Room
from engine.saving import Saves
from engine.sequence import NEVER, Phase, Sequence

_PREEMPTING: Final = int(Phase.PREEMPTING)  # see engine/slots.py


class Shown(NamedTuple):
    """What a plan puts where links read of one sequence."""

    sequence: Sequence
    owner: tuple[int, int]  # its slot and generation, which a resumed one changes
    num_blocks: int  # leading ones that are there when the step was read
    # Those of them that this plan names. It has a reference on each until its step is read: the sequence may be gone before, and
    # the step would copy over what arrived in a block that was leased in the meantime.
    block_ids: list[int]


class Planner:
    """Makes one plan after the other over a population and its room."""

    def __init__(
        self,
        population: Population,
        room: Room,
        saves: Saves,
        max_batched_tokens: int,
        max_beside_decodes: int | None = None,
    ) -> None:
        self._population = population
        self._slots = population.slots
        self._room = room
        self._saves = saves
        self._max_batched_tokens = max_batched_tokens
        self.bound_prompts(max_beside_decodes)
        self._next_step_id = 0
        self._starts: list[SlotStart] = []  # of the plan being made
        self._matched: list[int] = []  # in it: blocks of the prefix cache that a link is going to read
        self._to_mark: list[Sequence] = []  # in it
        self._pausing: list[Sequence] = []  # to be marked in the next one
        self._shown: deque[tuple[int, list[Shown]]] = deque()  # by unread step, of those that show any
        self.is_short = False  # somebody who runs found no blocks in the last plan
        self.num_preempted = 0  # so far

    def bound_prompts(self, max_beside_decodes: int | None) -> None:
        """So many tokens of prompts at most in a step that decodes; None: all that decodes leave."""
        self._max_beside_decodes = self._max_batched_tokens if max_beside_decodes is None else max_beside_decodes

    def plan(self) -> Plan | None:
        """The next step; None if there is nothing to do."""
        self.is_short = False
        self._starts, self._to_mark = [], [each for each in self._pausing if self._is_preempting(each)]
        self._pausing, self._matched = [], []
        decodes = self._plan_decodes()
        budget_tokens = self._max_batched_tokens - len(decodes)
        chunks = self._plan_chunks(min(budget_tokens, self._max_beside_decodes) if decodes else budget_tokens)
        leaving = self._show()
        if not (decodes or chunks or self._to_mark or leaving):
            return None
        marks = tuple(map(self._mark, self._to_mark))
        if decodes or chunks:
            self._room.reserve.stepped()
        self._next_step_id += 1
        arrived = self._room.take_arrived()
        return Plan(self._next_step_id - 1, tuple(self._starts), decodes, tuple(chunks), marks, arrived, leaving)

    def pause(self, sequence: Sequence) -> None:
        """Plan nothing of a sequence that decodes any more but a mark."""
        self._population.mark(sequence)
        sequence.is_pausing = True
        self._pausing.append(sequence)

    def read(self, step_id: int) -> list[Shown]:
        """The oldest unread step was computed: what its plan put where links read, and keeps no longer."""
        if not self._shown or self._shown[0][0] != step_id:
            return []
        _, shown = self._shown.popleft()
        for each in shown:
            self._room.let_go(each.block_ids)
        return shown

    def shown_block_ids(self) -> Iterator[int]:
        """A block as often as unread plans keep it."""
        return (block_id for _, shown in self._shown for each in shown for block_id in each.block_ids)

    # Rows that run

    def _plan_decodes(self) -> Decodes:
        """One row for each sequence that decodes, oldest first: never more than slots, which the budget always covers.

        All go one position on at once. Looked at one by one are those that begin or end with it, or may not find a block.
        """
        slots = self._slots
        rows = slots.decoding()
        positions = slots.num_planned[rows]
        is_last = positions + 1 == slots.ends[rows]
        is_due = is_last | (slots.last_step_ids[rows] == NEVER)
        is_full = positions == slots.num_blocks[rows] * self._room.block_size
        new_block_ids: dict[int, tuple[int, ...]] = {}
        if self._room.grow_each([slots[slot] for slot in rows[is_full].tolist()]):
            for slot in rows[is_full & ~is_due].tolist():
                new_block_ids[slot] = self._new_blocks(slots[slot])
        else:
            is_due |= is_full
        without: list[int] = []  # slots whose rows found no block
        num_lacking = 0  # blocks, one for each of them that does not give way itself
        for slot, is_its_last in zip(rows[is_due].tolist(), is_last[is_due].tolist(), strict=True):
            sequence = slots[slot]
            if slots.phases.item(slot) == _PREEMPTING:
                continue
            if not self._room.grow(sequence, slots.num_planned.item(slot) + 1):
                self.is_short = True
                without.append(slot)
                num_lacking += 1
                num_lacking -= self._give_way(num_lacking, sequence)
                continue
            new_block_ids[slot] = self._tell(sequence)
            if is_its_last:
                slots.set_has_rows(sequence, False)
        if self.is_short:
            rows = rows[(slots.phases[rows] == Phase.RUNNING_DECODE) & ~np.isin(rows, without)]
            positions = slots.num_planned[rows]
        slots.num_planned[rows] = positions + 1
        slots.last_step_ids[rows] = self._next_step_id
        return Decodes(rows, slots.generations[rows], positions, new_block_ids)

    def _plan_chunks(self, budget_tokens: int) -> list[PrefillChunk]:
        """The running prompt's next chunk, then those of newly admitted ones, until the budget is used up."""
        chunks: list[PrefillChunk] = []
        while budget_tokens > 0:
            sequence = self._population.prefilling or self._admit()
            if sequence is None:
                break
            chunk = self._plan_chunk(sequence, budget_tokens)
            if chunk is None:
                break
            chunks.append(chunk)
            budget_tokens -= len(chunk.token_ids)
        return chunks

    def _plan_chunk(self, sequence: Sequence, budget_tokens: int) -> PrefillChunk | None:
        """The prompt's next chunk; None if its blocks are not there: the step ends with that, and nobody gives way."""
        slot, given = sequence.slot, sequence.spec.token_ids
        start = self._slots.num_planned.item(slot)
        end = min(start + budget_tokens, len(given))
        if not self._room.grow(sequence, end):
            self.is_short = True
            return None
        new_block_ids = self._tell(sequence)
        self._slots.num_planned[slot] = end
        self._slots.last_step_ids[slot] = self._next_step_id
        samples = end == len(given)
        if samples:
            self._population.prefilling = None
            if end < self._slots.ends[slot]:
                self._population.start_decoding(sequence)
        return PrefillChunk(slot, sequence.generation, start, given[start:end], new_block_ids, samples)

    def _tell(self, sequence: Sequence) -> tuple[int, ...]:
        """Of a sequence with a row in the plan being made: its start if it is its first, and the blocks that are new."""
        if self._slots.last_step_ids.item(sequence.slot) == NEVER:
            self._starts.append(sequence.slot_start())
        return self._new_blocks(sequence)

    def _new_blocks(self, sequence: Sequence) -> tuple[int, ...]:
        new_block_ids = tuple(sequence.block_ids[sequence.num_blocks_planned :])
        sequence.num_blocks_planned = self._slots.num_blocks[sequence.slot] = len(sequence.block_ids)
        return new_block_ids

    def _admit(self) -> Sequence | None:
        """Give the head of the queue a slot and its cached prefix, if there is room for it, and for those who run first.

        And if nobody is about to have computed most of it: of several choices of a request the first computes the prompt.
        """
        population = self._population
        waiting = next(iter(population.waiting.values()), None)
        if waiting is None or self.is_short or self._slots.num_free < 1 or population.num_preempting:
            return None
        if self._room.is_coming(waiting.spec, self._slots):
            return None
        granted = self._room.admit(waiting.spec, self._slots)
        if granted is None:
            return None
        block_ids, num_promised = granted
        del population.waiting[waiting.spec.sequence_id]
        sequence = population.occupy(waiting, block_ids, num_promised, len(block_ids) * self._room.block_size)
        sequence.num_matched = len(block_ids)
        population.prefilling = sequence
        if waiting.spec.lends:
            self._matched += block_ids
        return sequence

    # Sequences that move, or are saved

    def _is_preempting(self, sequence: Sequence) -> bool:
        """Whether it still has its slot, and was not ended since it was to be marked."""
        is_owner = self._slots.owners[sequence.slot] is sequence
        return is_owner and self._slots.phases.item(sequence.slot) == _PREEMPTING

    def _show(self) -> tuple[int, ...]:
        """Blocks for links to read: those that are final, and all of who is paused, or marked in the plan being made.

        And those that are saved: the full ones of who finished, and of who is marked because it gives way. And those that a
        lending sequence found in the prefix cache: decode rows may have written them, of which nothing else is brought there.
        """
        shown: list[Shown] = []
        leaving = self._saves.name(self._next_step_id) + self._matched
        for sequence in self._to_mark if self._saves.of_preempted else ():
            if not sequence.is_pausing:
                num_full = int(self._slots.num_planned[sequence.slot]) // self._room.block_size
                leaving += sequence.block_ids[:num_full]
        for sequence_id, sequence in self._population.read.items():
            num_blocks = len(sequence.block_ids)
            if sequence_id not in self._population.paused and not any(each is sequence for each in self._to_mark):
                num_blocks = int(self._slots.num_computed[sequence.slot]) // self._room.block_size
            if num_blocks > sequence.num_shown:
                block_ids = sequence.block_ids[sequence.num_shown : num_blocks]
                self._room.keep(block_ids)
                leaving += block_ids
                sequence.num_shown = num_blocks
                shown.append(Shown(sequence, sequence.owner, num_blocks, block_ids))
        if shown:
            self._shown.append((self._next_step_id, shown))
        return tuple(leaving)

    # Rows that give way

    def _give_way(self, num_lacking: int, needy: Sequence) -> int:
        """Have the youngest give way until as many blocks come as are lacking; 1 if the needy one itself was it, else 0."""
        kept = [*self._saves.block_ids(), *self.shown_block_ids()]
        while self._room.num_coming(self._population.leaving(), kept) < num_lacking:
            # Of a lending sequence somebody reads the blocks. The youngest of the others is never older than the needy one.
            decoding = self._slots.decoding()
            candidates = decoding[~self._slots.is_lending[decoding]]
            if not len(candidates):
                return 0
            victim = self._slots[candidates[-1]]
            self._preempt(victim)
            if victim is needy:
                return 1
        return 0

    def _preempt(self, victim: Sequence) -> None:
        decoding = self._slots.in_phase(Phase.RUNNING_DECODE)
        num_limit = int(self._slots.num_limits(decoding).sum())
        num_generated = num_limit - int(self._slots.num_remaining()[decoding].sum())
        self._room.reserve.preempted(num_generated, num_limit, len(decoding))
        self._population.mark(victim)
        self._to_mark.append(victim)
        self.num_preempted += 1

    def _mark(self, sequence: Sequence) -> SlotMark:
        if self._slots.last_step_ids[sequence.slot] == NEVER:  # adopted, and out before its first row
            self._starts.append(sequence.slot_start())
        self._slots.last_step_ids[sequence.slot] = self._next_step_id
        return SlotMark(sequence.slot, sequence.generation)
