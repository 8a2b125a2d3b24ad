"""The sequences of one node by phase and age: who waits, who runs, who leaves, who lends. Bookkeeping without decisions.

waiting --occupy--> prefilling --start_decoding--> decoding --mark--> preempting --retire--> waiting, first in line, or gone
                         +-------------------------+-----finish--> finished --retire--> lent, or gone
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import NamedTuple

from engine.block_pool import BlockPool
from engine.sequence import Phase, Sequence, SequenceSpec
from engine.slots import Slots


class Waiting(NamedTuple):
    """In the queue; `arrival` is its age, which it keeps when it comes back to the queue."""

    spec: SequenceSpec
    arrival: int


class Population:
    """Owned by the scheduler."""

    def __init__(self, pool: BlockPool, num_slots: int, key_seed: bytes) -> None:
        self.slots = Slots(num_slots)
        self.waiting: OrderedDict[Hashable, Waiting] = OrderedDict()
        self.admitted: dict[Hashable, Sequence] = {}  # all that hold a slot
        self.lent: dict[Hashable, list[int]] = {}  # finished, slot free, blocks not released yet
        # The prompt of which chunks are left to plan. There is never a second one: a step gives a prompt all that its budget
        # has left, so that it is through, or the budget is.
        self.prefilling: Sequence | None = None
        self._pool = pool
        self._key_seed = key_seed
        self._num_arrived = 0

    @property
    def num_preempting(self) -> int:
        """Marked to give way, and still holding their blocks."""
        return len(self.slots.in_phase(Phase.PREEMPTING))

    def knows(self, sequence_id: Hashable) -> bool:
        """Whether the sequence is here, be it only until a step that was launched with it is read."""
        return sequence_id in self.waiting or sequence_id in self.admitted or sequence_id in self.lent

    def new_arrival(self) -> int:
        """The age of a newcomer: higher is younger."""
        self._num_arrived += 1
        return self._num_arrived

    def leaving(self) -> Iterator[Sequence]:
        """Those that hold blocks and have no further row: what they hold becomes available when in-flight steps are read."""
        return (self.slots[slot] for slot in self.slots.leaving() if self.slots[slot] is not self.prefilling)

    def occupy(self, waiting: Waiting, block_ids: list[int], num_promised: int, num_computed: int) -> Sequence:
        """Admit into a free slot; what it holds passes to it. Its leading `num_computed` positions are computed already."""
        spec = waiting.spec
        slot, generation = self.slots.next_owner()
        sequence = Sequence(
            spec=spec,
            slot=slot,
            generation=generation,
            token_ids=list(spec.token_ids),
            block_ids=block_ids,
            num_promised=num_promised,
            is_lending=spec.lends,
            last_key=self._key_seed,
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
        self._pool.unpromise(sequence.num_promised)
        sequence.num_promised = 0

    def retire(self, sequence: Sequence) -> None:
        """No unread step has a row of it: its slot is free, and its blocks, unless it lends them."""
        sequence_id = sequence.spec.sequence_id
        del self.admitted[sequence_id]
        self.slots.vacate(sequence)
        if sequence.is_lending:
            self.lent[sequence_id] = sequence.block_ids
        else:
            self._pool.free(sequence.block_ids)

    def requeue(self, sequence: Sequence) -> None:
        """Retire it and put it first in line, to go on behind every token that is known."""
        self.retire(sequence)
        spec = sequence.resumed(self._key_seed, self._pool.block_size)
        self.waiting[spec.sequence_id] = Waiting(spec, sequence.arrival)
        self.waiting.move_to_end(spec.sequence_id, last=False)

    def snapshot(self) -> dict[str, object]:
        """Every sequence with its phase, and who holds the slots."""
        return {
            "phases": dict.fromkeys(self.waiting, Phase.WAITING)
            | {sequence_id: self.slots.phase_of(sequence) for sequence_id, sequence in self.admitted.items()}
            | dict.fromkeys(self.lent, Phase.FINISHED),
            **self.slots.snapshot(),
            "num_lent": len(self.lent),
        }
