"""The sequences of one node by phase and age: who waits, who runs, who leaves, who lends. Bookkeeping without decisions.

waiting --occupy--> prefilling --start_decoding--> decoding --mark--> preempting --retire--> waiting, first in line, or gone
                         |                         |  ^                   +-----park--> paused --drop--> lent, or gone
                         |                         |  +---------unpark--------------------+
                         +-------------------------+-----finish--> finished --retire--> lent, or gone
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import NamedTuple

import numpy as np

from engine.block_pool import BlockPool
from engine.sequence import Phase, Sequence, SequenceSpec
from engine.slots import Slots
from proto.block_key import block_keys


class Waiting(NamedTuple):
    """In the queue; `arrival` is its age, which it keeps when it comes back to the queue."""

    spec: SequenceSpec
    arrival: int


class Backlog(NamedTuple):
    """What a newcomer would find in front of it."""

    num_tokens: int  # prompt positions that are not computed, those that the prefix cache has included
    num_blocks: int  # that those who wait will take, at most


class Population:
    """Owned by the scheduler."""

    def __init__(self, pool: BlockPool, num_slots: int, key_seed: bytes) -> None:
        self.slots = Slots(num_slots, pool.block_size)
        self.waiting: OrderedDict[Hashable, Waiting] = OrderedDict()
        self.admitted: dict[Hashable, Sequence] = {}  # all that hold a slot
        self.paused: dict[Hashable, Sequence] = {}  # hold blocks, and a reserved slot where they may go on at once
        self.lent: dict[Hashable, list[int]] = {}  # finished, slot free, blocks not released yet
        self.read: dict[Hashable, Sequence] = {}  # admitted or paused, and a link reads what they have
        # The prompt of which chunks are left to plan. There is never a second one: a step gives a prompt all that its budget
        # has left, so that it is through, or the budget is.
        self.prefilling: Sequence | None = None
        self._pool = pool
        self._key_seed = key_seed
        self._num_arrived = 0

    @property
    def num_preempting(self) -> int:
        """Marked to give way, and still holding their blocks."""
        return self.slots.num_in(Phase.PREEMPTING)

    def knows(self, sequence_id: Hashable) -> bool:
        """Whether the sequence is here, be it only until a step that was launched with it is read."""
        return any(sequence_id in each for each in (self.waiting, self.admitted, self.paused, self.lent))

    def backlog(self) -> Backlog:
        """Of those who run and wait."""
        is_running, num_given = self.slots.is_running(), self.slots.begins + 1
        num_left = np.maximum(num_given - self.slots.num_computed, 0)[is_running]
        specs = [waiting.spec for waiting in self.waiting.values()]
        num_tokens = int(num_left.sum()) + sum(len(spec.token_ids) for spec in specs)
        return Backlog(num_tokens, sum(spec.num_blocks_at_limit(self._pool.block_size) for spec in specs))

    def new_arrival(self) -> int:
        """The age of a newcomer: higher is younger."""
        self._num_arrived += 1
        return self._num_arrived

    def leaving(self) -> Iterator[Sequence]:
        """Those that hold blocks and have no further row: what they hold becomes available when in-flight steps are read.

        What is paused is on its way to another node, or to its end.
        """
        yield from (self.slots[slot] for slot in self.slots.leaving() if self.slots[slot] is not self.prefilling)
        yield from self.paused.values()

    def occupy(self, waiting: Waiting, block_ids: list[int], num_promised: int, num_computed: int) -> Sequence:
        """Admit into a free slot; what it holds passes to it. Its leading `num_computed` positions are computed already."""
        spec = waiting.spec
        slot, generation = self.slots.next_owner()
        sequence = Sequence(
            spec=spec,
            slot=slot,
            generation=generation,
            token_ids=array("I", spec.token_ids),
            block_ids=block_ids,
            num_promised=num_promised,
            is_lending=spec.lends,
            key_seed=self._key_seed,
            arrival=waiting.arrival,
        )
        self.slots.own(sequence, num_computed)
        self.admitted[spec.sequence_id] = sequence
        return sequence

    def start_decoding(self, sequence: Sequence) -> None:
        """Every token known at its start is planned, and more are to come."""
        self.slots.set_phase(sequence, Phase.RUNNING_DECODE, has_rows=True)

    def mark(self, sequence: Sequence) -> None:
        """It gives way: nothing of it is planned any more but a mark."""
        self.slots.set_phase(sequence, Phase.PREEMPTING)

    def finish(self, sequence: Sequence) -> None:
        """Nothing of it is planned any more; what it holds stays its own until retire()."""
        self.slots.set_phase(sequence, Phase.FINISHED)
        self.prefilling = None if self.prefilling is sequence else self.prefilling
        self._end_growth(sequence)

    def retire(self, sequence: Sequence) -> None:
        """No unread step has a row of it: its slot is free, and its blocks, unless it lends them."""
        sequence_id = sequence.spec.sequence_id
        del self.admitted[sequence_id]
        self.slots.vacate(sequence)
        self._let_go(sequence)

    def _end_growth(self, sequence: Sequence) -> None:
        self._pool.unpromise(sequence.num_promised)
        sequence.num_promised = 0

    def _let_go(self, sequence: Sequence) -> None:
        sequence_id = sequence.spec.sequence_id
        self.read.pop(sequence_id, None)
        if sequence.is_lending or sequence.is_read:
            self.lent[sequence_id] = sequence.block_ids
        else:
            self._pool.free(sequence.block_ids)

    def park(self, sequence: Sequence, *, keeps_slot: bool) -> None:
        """Its mark was answered: it leaves its slot, and keeps its blocks; `keeps_slot`: another one is kept for it."""
        sequence_id = sequence.spec.sequence_id
        self.paused[sequence_id] = self.admitted.pop(sequence_id)
        self.slots.vacate(sequence)
        sequence.keeps_slot = keeps_slot and self.slots.reserve(1)

    def unpark(self, sequence: Sequence) -> None:
        """It decodes on, in its reserved slot, behind every token that is known."""
        sequence_id = sequence.spec.sequence_id
        self._leave_park(sequence)
        sequence.spec = sequence.resumed(sequence.spec.block_keys)
        sequence.slot, sequence.generation = self.slots.next_owner()
        sequence.num_blocks_planned, sequence.is_pausing = 0, False
        num_final = (len(sequence.token_ids) - 1) // self._pool.block_size
        sequence.num_shown = min(sequence.num_shown, num_final)
        sequence.num_readable = min(sequence.num_readable, num_final)
        self.slots.own(sequence, len(sequence.token_ids) - 1)
        self.admitted[sequence_id] = sequence
        self.start_decoding(sequence)

    def drop(self, sequence: Sequence) -> None:
        """A paused one goes on nowhere: its blocks are free, or lent to who still reads them."""
        self._leave_park(sequence)
        self._end_growth(sequence)
        self._let_go(sequence)

    def _leave_park(self, sequence: Sequence) -> None:
        del self.paused[sequence.spec.sequence_id]
        self.slots.unreserve(sequence.keeps_slot)

    def requeue(self, sequence: Sequence) -> None:
        """Retire or drop it, and put it first in line, to go on behind every token that is known."""
        if sequence.spec.sequence_id in self.paused:
            self.drop(sequence)
        else:
            self.retire(sequence)
        spec = sequence.resumed(tuple(block_keys(self._key_seed, sequence.token_ids, self._pool.block_size)))
        self.waiting[spec.sequence_id] = Waiting(spec, sequence.arrival)
        self.waiting.move_to_end(spec.sequence_id, last=False)

    def snapshot(self) -> dict[str, object]:
        """Every sequence with its phase, and who holds the slots."""
        again = (self.waiting, self.admitted, self.paused)
        return {
            "phases": dict.fromkeys(self.lent, Phase.FINISHED)
            | dict.fromkeys(self.waiting, Phase.WAITING)
            | {sequence_id: self.slots.phase_of(sequence) for sequence_id, sequence in self.admitted.items()}
            | dict.fromkeys(self.paused, Phase.PAUSED),
            **self.slots.snapshot(),
            # Of those that are here again, while a link still reads what they left.
            "references_left_lent": sum(
                len(self.lent[name]) for name in self.lent if any(name in each for each in again)
            ),
        }
