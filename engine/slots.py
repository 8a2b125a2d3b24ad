"""The rows of the runner's persistent batch: who owns each, how far it is, and how many are kept for later. Pure.

What a step asks of every sequence lies here, in arrays by slot, so that it is asked of all of them at once; what is asked of
one sequence at a time lies in the Sequence.

    token_ids   0 ......................... | begin ................. | end - 1 | end
    its row     computes KV and no more     | samples the next token            | never fed
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.sequence import NEVER, Phase, Sequence

Slot = int | np.int64

# Numbers: an array is compared with an Enum's member ten times as slowly.
_WAITING: Final = int(Phase.WAITING)
_PREFILL: Final = int(Phase.RUNNING_PREFILL)
_DECODE: Final = int(Phase.RUNNING_DECODE)


class Slots:
    """A slot belongs to one sequence at a time; each owner has its own generation, so that late answers are told apart.

    The arrays are [num_slots]; but for generations, what they say of a slot that nobody owns means nothing.
    """

    def __init__(self, num_slots: int, block_size: int) -> None:
        self.owners: list[Sequence | None] = [None] * num_slots
        self.generations = np.zeros(num_slots, np.int64)
        self.phases = np.full(num_slots, Phase.WAITING, np.int8)  # of the owner; WAITING: there is none
        self.arrivals = np.zeros(num_slots, np.int64)  # the higher, the younger
        self.begins = np.zeros(
            num_slots, np.int64
        )  # the position whose row samples first: that of the last token given
        self.ends = np.zeros(num_slots, np.int64)  # behind the last position whose row may sample
        self.num_planned = np.zeros(num_slots, np.int64)  # leading positions, by all plans so far
        self.num_computed = np.zeros(num_slots, np.int64)  # the same, by all steps that were read
        self.num_blocks = np.zeros(num_slots, np.int64)  # in the block table
        self.last_step_ids = np.full(num_slots, NEVER, np.int64)  # of the last step launched with the owner
        self.num_said = np.zeros(num_slots, np.int64)  # completion tokens among those given
        self.is_promised = np.zeros(num_slots, np.bool_)  # admitted with its prompt's blocks promised, or more
        self.is_lending = np.zeros(num_slots, np.bool_)
        self.sequence_ids = np.full(num_slots, None, object)
        # By position within its block, the tokens that the owner has said since say_each() was first told of them; at most a
        # block's, those that its token_ids lack among them: catch_up().
        self._recent = np.zeros((num_slots, block_size), np.uint32)
        self._num_stopped = np.zeros(1, np.int64)  # by token id: owners that it ends; behind all that end any, a 0
        self._is_decoding = np.zeros(num_slots, np.bool_)
        self._by_age: NDArray[np.int64] | None = None  # those that decode; None: somebody came or went
        self._free = list(range(num_slots - 1, -1, -1))
        self._num_reserved = 0

    def __getitem__(self, slot: Slot) -> Sequence:
        """The owner. There is one wherever a row, a phase or a plan says so."""
        owner = self.owners[slot]
        assert owner is not None
        return owner

    # All at once

    def decoding(self) -> NDArray[np.int64]:
        """Slots with decode rows left to plan, oldest first; not to be changed."""
        if self._by_age is None:
            (slots,) = self._is_decoding.nonzero()
            self._by_age = slots[self.arrivals[slots].argsort()]
        return self._by_age

    def is_running(self) -> NDArray[np.bool_]:
        """By slot: whether its owner neither gives way nor is finished."""
        is_running: NDArray[np.bool_] = (self.phases == _PREFILL) | (self.phases == _DECODE)
        return is_running

    def in_phase(self, phase: Phase) -> NDArray[np.int64]:
        """Slots of those in it."""
        return np.flatnonzero(self.phases == int(phase))

    def num_in(self, phase: Phase) -> int:
        """How many they are."""
        return int(np.count_nonzero(self.phases == int(phase)))

    def leaving(self) -> NDArray[np.int64]:
        """Slots of those that have no decode rows left to plan, or none yet."""
        return np.flatnonzero((self.phases != _WAITING) & ~self._is_decoding)

    def may_stop(self, token_ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each ends some owner, be it not the one who said it; of what is no token (below 0) this says nothing."""
        is_stop: NDArray[np.bool_] = self._num_stopped.take(token_ids, mode="clip") > 0
        return is_stop

    def num_remaining(self) -> NDArray[np.int64]:
        """By slot: completion tokens that may still come, those of unread steps included."""
        return self.ends - np.maximum(self.num_computed, self.begins)

    def num_limits(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Completion tokens that each ends with at the latest."""
        return self.num_said[slots] + self.ends[slots] - self.begins[slots]

    def say_each(self, slots: NDArray[np.int64], positions: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """Each owner has said one more token, the one at this position, and computed all before it.

        It is not in the owner's token_ids before catch_up(), which is due before the token that begins the next block.
        """
        self.num_computed[slots] = positions
        self._recent[slots, positions % self._recent.shape[1]] = token_ids

    # One by one

    def catch_up(self, sequence: Sequence) -> None:
        """Put what it has said into its token_ids; at all times but in say_each() those end behind what it computed."""
        token_ids, slot = sequence.token_ids, sequence.slot
        if (num_missing := self.num_computed.item(slot) + 1 - len(token_ids)) > 0:
            first = len(token_ids) % self._recent.shape[1]
            token_ids.frombytes(self._recent[slot, first : first + num_missing].tobytes())

    def phase_of(self, sequence: Sequence) -> Phase:
        """How far it is."""
        return Phase(self.phases.item(sequence.slot))

    def set_phase(self, sequence: Sequence, phase: Phase, has_rows: bool = False) -> None:
        """It is so far now; `has_rows`: there are decode rows of it to plan."""
        self.phases[sequence.slot] = phase
        self.set_has_rows(sequence, has_rows)

    def set_has_rows(self, sequence: Sequence, has_rows: bool) -> None:
        """Whether decode rows of it are left to plan."""
        if self._is_decoding.item(sequence.slot) != has_rows:
            self._is_decoding[sequence.slot] = has_rows
            self._by_age = None

    # Who has them

    @property
    def num_free(self) -> int:
        """Neither owned nor reserved."""
        return len(self._free) - self._num_reserved

    @property
    def num_reserved(self) -> int:
        """Kept for somebody who comes later."""
        return self._num_reserved

    def reserve(self, num_slots: int) -> bool:
        """Keep so many; False, and none is kept, if fewer are free."""
        if self.num_free < num_slots:
            return False
        self._num_reserved += num_slots
        return True

    def unreserve(self, num_slots: int) -> None:
        """Give back what reserve() took. ValueError: fewer are reserved."""
        if self._num_reserved < num_slots:
            raise ValueError(f"of {num_slots} slots to unreserve {self._num_reserved} are reserved")
        self._num_reserved -= num_slots

    def next_owner(self) -> tuple[int, int]:
        """The slot that the next own() takes, and its generation there."""
        slot = self._free[-1]
        return slot, int(self.generations[slot]) + 1

    def own(self, sequence: Sequence, num_computed: int) -> None:
        """The sequence, made for next_owner(), has its slot from now on; no step was launched with it yet."""
        slot, spec = self._free.pop(), sequence.spec
        self.generations[slot] += 1
        assert (sequence.slot, sequence.generation) == (slot, self.generations[slot])
        self.owners[slot] = sequence
        self.set_phase(sequence, Phase.RUNNING_PREFILL)
        self.arrivals[slot] = sequence.arrival
        self.begins[slot] = len(spec.token_ids) - 1
        self.ends[slot] = len(spec.token_ids) - 1 + spec.max_new_tokens
        self.num_planned[slot] = self.num_computed[slot] = num_computed
        self.num_blocks[slot] = len(sequence.block_ids)
        self.last_step_ids[slot] = NEVER
        self.num_said[slot] = spec.num_generated
        self.is_promised[slot] = sequence.num_promised > 0
        self.is_lending[slot] = sequence.is_lending
        self.sequence_ids[slot] = spec.sequence_id
        self._count_stops(sequence, 1)

    def vacate(self, sequence: Sequence) -> None:
        """No unread step has a row of its owner."""
        self.owners[sequence.slot] = None
        self.sequence_ids[sequence.slot] = None
        self._count_stops(sequence, -1)
        self.set_phase(sequence, Phase.WAITING)
        self._free.append(sequence.slot)

    def _count_stops(self, sequence: Sequence, number: int) -> None:
        stops = sequence.spec.stop_token_ids  # below the vocabulary's size: node/validate.py
        if stops and (num_more := max(stops) + 2 - len(self._num_stopped)) > 0:
            self._num_stopped = np.pad(self._num_stopped, (0, num_more))
        for stop in stops:
            self._num_stopped[stop] += number

    def snapshot(self) -> dict[str, object]:
        """Every slot's owner and generation."""
        return {
            "slots": tuple(None if owner is None else owner.spec.sequence_id for owner in self.owners),
            "generations": tuple(self.generations.tolist()),
            "num_reserved_slots": self._num_reserved,
        }
