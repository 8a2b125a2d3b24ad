"""What the next step does: rows for what decodes, chunks of prompts, newcomers, and who gives way when blocks are short.

The rules are told in engine/scheduler.py, which reads the results. Pure.
"""

from __future__ import annotations

from engine.plan import DecodeRow, Plan, PrefillChunk, SlotMark, SlotStart
from engine.population import Population
from engine.room import Room
from engine.sequence import NEVER, Phase, Sequence


class Planner:
    """Makes one plan after the other over a population and its room."""

    def __init__(self, population: Population, room: Room, max_batched_tokens: int) -> None:
        self._population = population
        self._room = room
        self._max_batched_tokens = max_batched_tokens
        self._next_step_id = 0
        self._starts: list[SlotStart] = []  # of the plan being made
        self._to_mark: list[Sequence] = []  # in it
        self.is_short = False  # somebody who runs found no blocks in the last plan
        self.num_preempted = 0  # so far

    def plan(self) -> Plan | None:
        """The next step; None if there is nothing to do."""
        self.is_short = False
        self._starts, self._to_mark = [], []
        decodes = self._plan_decodes()
        chunks = self._plan_chunks(self._max_batched_tokens - len(decodes))
        if not (decodes or chunks or self._to_mark):
            return None
        marks = tuple(map(self._mark, self._to_mark))
        if decodes or chunks:
            self._room.reserve.stepped()
        self._next_step_id += 1
        return Plan(
            self._next_step_id - 1, tuple(self._starts), tuple(decodes), tuple(chunks), marks, self._room.take_arrived()
        )

    # Rows that run

    def _plan_decodes(self) -> list[DecodeRow]:
        """One row for each sequence that decodes: never more than slots, which the budget always covers."""
        rows: list[DecodeRow] = []
        num_lacking = 0  # blocks, one for each row that found none
        for sequence in list(self._population.decoding.values()):
            if sequence.phase is Phase.PREEMPTING:
                continue
            position = sequence.num_planned
            if not self._room.grow(sequence, position + 1):
                self.is_short = True
                num_lacking += 1
                num_lacking -= self._give_way(num_lacking, sequence)
                continue
            rows.append(DecodeRow(sequence.slot, sequence.generation, position, self._launch(sequence, position + 1)))
            sequence.num_samples_planned += 1
            if not sequence.may_sample_more:
                del self._population.decoding[sequence.spec.sequence_id]
        return rows

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
        start = sequence.num_planned
        end = start + min(budget_tokens, sequence.num_prompt_unplanned)
        if not self._room.grow(sequence, end):
            self.is_short = True
            return None
        samples = end == len(sequence.spec.token_ids)
        new_block_ids = self._launch(sequence, end)
        if samples:
            self._population.prefilling = None
            sequence.num_samples_planned = 1
            if sequence.may_sample_more:
                self._population.start_decoding(sequence)
        token_ids = sequence.spec.token_ids[start:end]
        return PrefillChunk(sequence.slot, sequence.generation, start, token_ids, new_block_ids, samples)

    def _launch(self, sequence: Sequence, end: int) -> tuple[int, ...]:
        """Note that the plan being made computes the sequence up to position `end`; the blocks to tell the runner of."""
        if sequence.last_step_id == NEVER:
            self._starts.append(sequence.slot_start())
        new_block_ids = tuple(sequence.block_ids[sequence.num_blocks_planned :])
        sequence.num_blocks_planned = len(sequence.block_ids)
        sequence.num_planned = end
        sequence.last_step_id = self._next_step_id
        return new_block_ids

    def _admit(self) -> Sequence | None:
        """Give the head of the queue a slot and its cached prefix, if there is room for it, and for those who run first."""
        population = self._population
        waiting = next(iter(population.waiting.values()), None)
        if waiting is None or self.is_short or population.num_preempting or population.slots.num_free < 1:
            return None
        granted = self._room.admit(waiting.spec, population.admitted.values())
        if granted is None:
            return None
        del population.waiting[waiting.spec.sequence_id]
        sequence = population.occupy(waiting, *granted)
        sequence.num_planned = sequence.num_computed = self._room.num_positions(sequence)
        population.prefilling = sequence
        return sequence

    # Rows that give way

    def _give_way(self, num_lacking: int, needy: Sequence) -> int:
        """Have the youngest give way until as many blocks come as are lacking; 1 if the needy one itself was it, else 0."""
        while self._room.num_coming(self._population.leaving()) < num_lacking:
            # Of a lending sequence somebody reads the blocks. The youngest of the others is never older than the needy one.
            candidates = (each for each in reversed(self._population.decoding.values()) if not each.is_lending)
            victim = next(candidates, None)
            if victim is None:
                return 0
            self._preempt(victim)
            if victim is needy:
                return 1
        return 0

    def _preempt(self, victim: Sequence) -> None:
        decoding = [each for each in self._population.admitted.values() if each.phase is Phase.RUNNING_DECODE]
        num_generated, num_limit = (
            sum(each.num_generated for each in decoding),
            sum(each.num_limit for each in decoding),
        )
        self._room.reserve.preempted(num_generated, num_limit, len(decoding))
        self._population.mark(victim)
        self._to_mark.append(victim)
        self.num_preempted += 1

    def _mark(self, sequence: Sequence) -> SlotMark:
        if sequence.last_step_id == NEVER:  # adopted, and out before its first row
            self._starts.append(sequence.slot_start())
        sequence.last_step_id = self._next_step_id
        return SlotMark(sequence.slot, sequence.generation)
