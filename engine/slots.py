"""The rows of the runner's persistent batch: who owns each, in which generation, and how many are kept for later. Pure."""

from __future__ import annotations

from engine.sequence import Sequence


class Slots:
    """A slot belongs to one sequence at a time; each owner has its own generation, so that late answers are told apart."""

    def __init__(self, num_slots: int) -> None:
        self._owners: list[Sequence | None] = [None] * num_slots
        self._generations = [0] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._num_reserved = 0

    def __getitem__(self, slot: int) -> Sequence | None:
        return self._owners[slot]

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
        return slot, self._generations[slot] + 1

    def own(self, sequence: Sequence) -> None:
        """The sequence, made for next_owner(), has its slot from now on."""
        slot = self._free.pop()
        self._generations[slot] += 1
        assert (sequence.slot, sequence.generation) == (slot, self._generations[slot])
        self._owners[slot] = sequence

    def vacate(self, sequence: Sequence) -> None:
        """No unread step has a row of its owner."""
        self._owners[sequence.slot] = None
        self._free.append(sequence.slot)

    def snapshot(self) -> dict[str, object]:
        """Every slot's owner and generation."""
        return {
            "slots": tuple(None if owner is None else owner.spec.sequence_id for owner in self._owners),
            "generations": tuple(self._generations),
            "num_reserved_slots": self._num_reserved,
        }
