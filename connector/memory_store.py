"""The KV pool inside one process: for one node, for tests, and for the simulation. Keeps max_bytes exactly; nothing expires.

The shelf is apart from the store, so that nodes of one process may share one, and so that what lies there can be tampered with.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

import numpy as np

from connector.kv_record import HEADER_BYTES, KvRecords
from connector.kv_store import Count, KvStoreLimits, RunRead, count_nowhere


class Shelf:
    """Records by name, the least recently used first; under `lock`."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.records: OrderedDict[bytes, bytearray] = OrderedDict()
        self.drawn = secrets.token_bytes(32)


class MemoryStore:
    """Implements KvStore."""

    def __init__(
        self, records: KvRecords, limits: KvStoreLimits, count: Count = count_nowhere, shelf: Shelf | None = None
    ) -> None:
        """`shelf`: one that others use, too, with records of this length; None: one of its own."""
        self._form = records
        self._max_records = limits.max_bytes // records.record_bytes
        self._count = count
        self._shelf = Shelf() if shelf is None else shelf

    def identity(self) -> bytes:
        """As KvStore.identity."""
        return self._form.identity(self._shelf.drawn)

    def missing(self, keys: Sequence[bytes]) -> list[bool]:
        """As KvStore.missing."""
        with self._shelf.lock:
            return [self._form.name(key) not in self._shelf.records for key in keys]

    def num_leading(self, keys: Sequence[bytes]) -> int:
        """As KvStore.num_leading."""
        is_missing = self.missing(keys)
        return is_missing.index(True) if True in is_missing else len(keys)

    def write(self, blocks: Sequence[tuple[bytes, memoryview]]) -> int:
        """As KvStore.write."""
        num_stored = 0
        for key, block in blocks:
            header = self._form.header(key, block)
            with self._shelf.lock:
                if self._max_records == 0:
                    continue
                if self._form.name(key) in self._shelf.records:
                    self._shelf.records.move_to_end(self._form.name(key))
                    continue
            record = bytearray(self._form.record_bytes)
            record[:HEADER_BYTES] = header
            np.copyto(np.frombuffer(record, np.uint8)[HEADER_BYTES:], np.frombuffer(block, np.uint8))
            num_stored += self._put(self._form.name(key), record)
        return num_stored

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> RunRead:
        """As KvStore.read."""
        self._form.check_lengths(into)
        for index, (key, block) in enumerate(zip(keys, into, strict=True)):
            name = self._form.name(key)
            with self._shelf.lock:
                record = self._shelf.records.get(name)
                if record is None:
                    return RunRead(index, is_corrupt=False)
                self._shelf.records.move_to_end(name)
            if not self._take(key, record, block):
                with self._shelf.lock:
                    self._shelf.records.pop(name, None)
                return RunRead(index, is_corrupt=True)
        return RunRead(len(keys), is_corrupt=False)

    def remove(self, keys: Sequence[bytes]) -> None:
        """As KvStore.remove."""
        with self._shelf.lock:
            removed = [self._shelf.records.pop(self._form.name(key), None) for key in keys]
        self._count("broken", sum(record is not None for record in removed))

    def close(self) -> None:
        """As KvStore.close; what lies on the shelf goes with its last user."""

    def _put(self, name: bytes, record: bytearray) -> bool:
        """False: somebody else was faster."""
        with self._shelf.lock:
            if name in self._shelf.records:
                return False
            self._shelf.records[name] = record
            while len(self._shelf.records) > self._max_records:
                self._shelf.records.popitem(last=False)
                self._count("evicted", 1)
        return True

    def _take(self, key: bytes, record: bytearray, block: memoryview) -> bool:
        """Copy a record's bytes to their place; whether they are right there."""
        if len(record) != self._form.record_bytes:
            return False
        np.copyto(np.frombuffer(block, np.uint8), np.frombuffer(record, np.uint8)[HEADER_BYTES:])
        return self._form.is_right(key, record[:HEADER_BYTES], block)
