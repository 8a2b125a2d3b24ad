"""What the results of a step mean: tokens, ends, marks answered. The rules are told in engine/scheduler.py. Pure."""

from __future__ import annotations

from typing import Final

import numpy as np

from engine.plan import (
    BARRED_ROW,
    BROKEN_ROW,
    PREEMPTED_TOKEN_ID,
    STALLED_ROW,
    DecodeRow,
    Decodes,
    Plan,
    PrefillChunk,
    SlotMark,
    SlotResult,
    StepResult,
)
from engine.population import Population
from engine.room import Room
from engine.saving import Saves
from engine.sequence import NEVER, Phase, Progress, Progresses, Sequence

PREEMPTED: Final = "preempted"
PAUSED: Final = "paused"
ENDS_OF_ROWS: Final = {BROKEN_ROW: "broken", STALLED_ROW: "stalled", BARRED_ROW: "barred"}  # without a token
_FINISHED: Final = int(Phase.FINISHED)  # an Enum's own comparison costs ten times as much


class Reader:
    """Reads one step after the other, in the order of their plans."""

    def __init__(
        self, population: Population, room: Room, saves: Saves, *, resumes_preempted: bool, keeps_preempted: bool
    ) -> None:
        self._all = population
        self._room = room
        self._saves = saves
        self.resumes_preempted = resumes_preempted
        self._keeps_preempted = keeps_preempted
        self._last_read_step_id = NEVER
        self.num_late = 0  # tokens so far of who had ended before they were read

    def check(self, plan: Plan, result: StepResult) -> None:
        """ValueError, before anything has changed: these are not the answers to the step's rows and marks."""
        num_decodes, others = len(plan.decodes), _others(plan)
        of_decodes, of_others = result.slots[:num_decodes], result.slots[num_decodes:].tolist()
        if not np.array_equal(of_decodes, plan.decodes.slots) or of_others != [row.slot for row in others]:
            raise ValueError(f"results of step {result.step_id} are not those of its rows and marks")
        for index in (result.token_ids[:num_decodes] < 0).nonzero()[0].tolist():
            self._check(plan.decodes[index], result[index])
        for index, row in enumerate(others, num_decodes):
            self._check(row, result[index])

    def _check(self, row: DecodeRow | PrefillChunk | SlotMark, answer: SlotResult) -> None:
        sequence = self._owner(row)
        if isinstance(row, SlotMark):
            if (answer.generation, answer.token_id) != (sequence.generation, PREEMPTED_TOKEN_ID):
                raise ValueError(f"slot {answer.slot} answered {answer.token_id} to its mark")
        elif answer.token_id == PREEMPTED_TOKEN_ID:
            raise ValueError(f"slot {answer.slot} answered a mark that it was not given")
        elif answer.generation == sequence.generation and not self.is_finished(sequence):
            samples = isinstance(row, DecodeRow) or row.samples
            if answer.token_id not in ENDS_OF_ROWS and samples != (answer.token_id >= 0):
                kind = "samples" if samples else "does not sample"
                raise ValueError(f"slot {row.slot} answered {answer.token_id}: the row {kind}")

    def read(self, plan: Plan, result: StepResult) -> Progresses:
        """What the step gave, whose answers were checked."""
        self._last_read_step_id = plan.step_id
        progress = self._read_decodes(plan.decodes, result)
        for index, row in enumerate(_others(plan), len(plan.decodes)):
            progress.others += self._read(row, result[index])
        return progress

    def _owner(self, row: DecodeRow | PrefillChunk | SlotMark) -> Sequence:
        """Who the row was for: a slot changes hands only when no unread step has a row of its owner."""
        sequence = self._all.slots[row.slot]
        assert sequence.generation == row.generation
        return sequence

    def is_finished(self, sequence: Sequence) -> bool:
        """Whether no row of it is planned any more, nor will be."""
        return self._all.slots.phases.item(sequence.slot) == _FINISHED

    def has_unread_rows(self, sequence: Sequence) -> bool:
        """Whether a step that was launched with it has not been read."""
        return self._all.slots.last_step_ids.item(sequence.slot) > self._last_read_step_id

    def _read_decodes(self, decodes: Decodes, result: StepResult) -> Progresses:
        """Most answers are one more token, and nothing else; those that are more, or may be the last, are read one by one."""
        slots, rows, ends = self._all.slots, decodes.slots, decodes.positions + 1
        num_decodes = len(rows)
        token_ids = result.token_ids[:num_decodes]
        is_plain = (
            (token_ids >= 0)
            & (result.generations[:num_decodes] == decodes.generations)
            & (slots.generations[rows] == decodes.generations)
            & (slots.phases[rows] != _FINISHED)
            & (ends != slots.ends[rows])
        )
        for index in result.with_more:
            if index < num_decodes:
                is_plain[index] = False
        for index in (is_plain & slots.may_stop(token_ids)).nonzero()[0].tolist():
            is_plain[index] = token_ids.item(index) not in slots[rows.item(index)].spec.stop_token_ids
        # A block that a row filled is full of tokens that were known before this step's: its key needs none of them.
        fills_block = is_plain & (ends % self._room.block_size == 0)
        filled = list(map(slots.__getitem__, rows[fills_block].tolist()))
        for sequence in filled:
            slots.catch_up(sequence)
        self._room.publish_each(zip(filled, ends[fills_block].tolist(), strict=True))
        plain, num_computed, said = rows[is_plain], ends[is_plain], token_ids[is_plain]
        slots.say_each(plain, num_computed, said)
        others = [
            each for index in (~is_plain).nonzero()[0].tolist() for each in self._read(decodes[index], result[index])
        ]
        return Progresses(slots.sequence_ids[plain].tolist(), num_computed.tolist(), said.tolist(), others)

    def _read(self, row: DecodeRow | PrefillChunk | SlotMark, answer: SlotResult) -> list[Progress]:
        """What one row or mark gave."""
        sequence = self._owner(row)
        progress: list[Progress] = []
        if isinstance(row, SlotMark):
            progress = self._leave(sequence)
        elif answer.generation == sequence.generation:
            if not self.is_finished(sequence):
                progress = [self._advance(sequence, row, answer)]
            else:
                self.num_late += answer.token_id >= 0
                if isinstance(row, PrefillChunk) and not sequence.is_broken:
                    self._keep_computed(sequence, row, answer)
        if self.is_finished(sequence) and not self.has_unread_rows(sequence):
            if sequence.is_complete:
                self._saves.finished(sequence)
            self._all.retire(sequence)
        return progress

    def _advance(self, sequence: Sequence, row: DecodeRow | PrefillChunk, answer: SlotResult) -> Progress:
        sequence_id, token_id = sequence.spec.sequence_id, answer.token_id
        match row:
            case DecodeRow():
                num_computed, samples = row.position + 1, True
            case PrefillChunk():
                num_computed, samples = row.start + len(row.token_ids), row.samples
        self._all.slots.catch_up(sequence)
        self._all.slots.num_computed[row.slot] = num_computed
        if token_id in ENDS_OF_ROWS:
            sequence.is_broken = True
            if token_id == BROKEN_ROW:
                self._room.forget(sequence)
                self._saves.broken(sequence)
            self._all.finish(sequence)
            return Progress(sequence_id, num_computed, None, ENDS_OF_ROWS[token_id])
        self._room.publish(sequence, num_computed, decodes=isinstance(row, DecodeRow))
        if not samples:
            return Progress(sequence_id, num_computed, None, None, None, answer.prompt_logprobs)
        sequence.token_ids.append(token_id)
        finish = sequence.finish_reason()
        if finish is not None:
            sequence.is_complete = True
            self._all.finish(sequence)
        num_cached = 0 if isinstance(row, DecodeRow) else sequence.num_matched * self._room.block_size
        told = (answer.logprobs, answer.prompt_logprobs, answer.branch_tokens, num_cached)
        return Progress(sequence_id, num_computed, token_id, finish, *told)

    def _keep_computed(self, sequence: Sequence, row: PrefillChunk, answer: SlotResult) -> None:
        """An aborted prompt's chunk was launched already: who asks for the same prompt again need not compute it twice."""
        if answer.token_id not in ENDS_OF_ROWS:
            self._room.publish(sequence, row.start + len(row.token_ids), decodes=False)

    def _leave(self, sequence: Sequence) -> list[Progress]:
        """The runner is done with a marked slot: all that its owner generated has been read before this."""
        if self.is_finished(sequence):  # meanwhile, or aborted
            return []
        self._all.slots.catch_up(sequence)
        is_paused = sequence.is_pausing
        num_computed = int(self._all.slots.num_computed[sequence.slot])
        self._room.publish(sequence, num_computed, decodes=True)  # what it computed again, before it comes to decode
        if not is_paused and self.resumes_preempted and not sequence.is_read:
            self._saves.preempted(sequence)
            self._all.requeue(sequence)
            return []
        if is_paused or self._keeps_preempted or sequence.is_read:
            self._all.park(sequence, keeps_slot=is_paused)
        else:
            self._saves.preempted(sequence)
            self._all.retire(sequence)
        return [Progress(sequence.spec.sequence_id, num_computed, None, PAUSED if is_paused else PREEMPTED)]


def _others(plan: Plan) -> tuple[PrefillChunk | SlotMark, ...]:
    """What is answered behind the decode rows."""
    return (*plan.chunks, *plan.marks)
