"""What this node knows to be in the KV pool, as routers are told of it. Pure.

What it stored, or found there, until the pool turns out not to have it, or so much else has come that it is forgotten. So it
is no list of the pool: others write there, too, and tell of it themselves, and the pool may drop anything. A router that is
wrong places a prompt less well, and hears of it: whoever then looks in vain says so.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from engine.key_log import KeyLog
from node.events import PoolSaid

NUM_KEYS: Final = 1 << 16  # some 13 MB
_SHORT_KEY_BYTES: Final = 8  # what routers are told of a key (cache_feed.py)


class PoolBook:
    """Keys in slots, so that a snapshot can be told in pieces; the longest unused goes first."""

    def __init__(self, capacity: int = NUM_KEYS) -> None:
        self.pool = b""  # its identity; empty: it has not said anything yet
        self.key_log = KeyLog(capacity)
        self._capacity = capacity
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()
        self._keys: list[bytes | None] = []  # by slot
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._slot_of)

    def take(self, said: PoolSaid) -> None:
        """The pool has said something."""
        self.pool = said.pool
        for (
            key
        ) in said.stored:  # told anew though it is known: it may have been gone in between, and others have said so
            self._put(key[:_SHORT_KEY_BYTES])
            self.key_log.add(key[:_SHORT_KEY_BYTES], True)
        for key in said.found:
            if self._put(key[:_SHORT_KEY_BYTES]):
                self.key_log.add(key[:_SHORT_KEY_BYTES], True)
        for key in said.lacking:
            self._drop(key[:_SHORT_KEY_BYTES])
            self.key_log.add(key[:_SHORT_KEY_BYTES], None)  # also where it was not known: others may believe it there

    def keys_from(self, first: int, number: int) -> tuple[list[bytes], int | None]:
        """As BlockPool.keys_from, of slots."""
        behind = first + number
        keys = [key for key in self._keys[first:behind] if key is not None]
        return keys, behind if behind < len(self._keys) else None

    def _put(self, key: bytes) -> bool:
        """Whether it is new."""
        if key in self._slot_of:
            self._slot_of.move_to_end(key)
            return False
        if len(self._slot_of) == self._capacity:
            oldest = next(iter(self._slot_of))
            self._drop(oldest)
            self.key_log.add(oldest, False)
        if self._free:
            slot = self._free.pop()
            self._keys[slot] = key
        else:
            slot = len(self._keys)
            self._keys.append(key)
        self._slot_of[key] = slot
        return True

    def _drop(self, key: bytes) -> None:
        if (slot := self._slot_of.pop(key, None)) is not None:
            self._keys[slot] = None
            self._free.append(slot)
