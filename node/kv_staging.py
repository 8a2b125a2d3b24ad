"""Which slots of the staging buffer hold what, between a node's KV memory and the KV pool. Pure.

    free --begin--> filling --filled--> waiting --take--> leaving --left--> free
                                           '---drop---> free

Bounded by the buffer: a block for which there is no free slot is not stored. Of a key there is one slot at most. Not here:
the bytes, threads (node/kv_pool.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection


class Staging:
    """The slots of one buffer."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free = list(range(num_slots))
        self._filling: dict[int, bytes] = {}
        self._waiting: deque[tuple[bytes, int]] = deque()
        self._leaving: dict[int, bytes] = {}
        self._keys: set[bytes] = set()  # of all that is not free

    @property
    def num_used(self) -> int:
        """Slots that are not free."""
        return self._num_slots - len(self._free)

    @property
    def num_waiting(self) -> int:
        """Blocks that could be taken now."""
        return len(self._waiting)

    def holds(self, key: bytes) -> bool:
        """Whether the block of this key is in the buffer already."""
        return key in self._keys

    def begin(self, key: bytes) -> int | None:
        """The slot to copy a block into; None: there is none. Raises ValueError for a key that is there already."""
        if key in self._keys:
            raise ValueError("the block is in the buffer already")
        if not self._free:
            return None
        slot = self._free.pop()
        self._filling[slot] = key
        self._keys.add(key)
        return slot

    def filled(self, slot: int) -> None:
        """The slot's bytes are complete. Raises KeyError for a slot that was not begun."""
        self._waiting.append((self._filling.pop(slot), slot))

    def take(self, most: int) -> list[tuple[bytes, int]]:
        """Keys and slots of the longest waiting blocks, which are read from now on until they have left."""
        taken = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
        self._leaving.update((slot, key) for key, slot in taken)
        return taken

    def drop(self, keys: Collection[bytes]) -> None:
        """Waiting blocks of these keys are not to be taken."""
        dropped = [(key, slot) for key, slot in self._waiting if key in keys]
        self._waiting = deque(waiting for waiting in self._waiting if waiting[0] not in keys)
        self._keys.difference_update(key for key, _ in dropped)
        self._free += [slot for _, slot in dropped]

    def left(self, slot: int) -> None:
        """The slot is read no more. Raises KeyError for one that was not taken."""
        self._keys.remove(self._leaving.pop(slot))
        self._free.append(slot)
