"""The KV pool inside one process: for one node, for tests, and for the simulation. Keeps max_bytes exactly; nothing expires."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from threading import Lock

import numpy as np

from connector.kv_record import HEADER_BYTES, KvRecords
from connector.kv_store import KvStoreLimits, RunRead
from connector.tally import Tally


class MemoryStore:
    """Implements KvStore. Nodes that live in one process may share one."""

    def __init__(self, records: KvRecords, limits: KvStoreLimits) -> None:
        self._records = records
        self._max_records = limits.max_bytes // records.record_bytes
        self._lock = Lock()
        self._stored: OrderedDict[bytes, bytearray] = OrderedDict()  # by name, the least recently used first
        self._tally = Tally()

    def missing(self, keys: Sequence[bytes]) -> list[bool]:
        """As KvStore.missing."""
        with self._lock:
            return [self._records.name(key) not in self._stored for key in keys]

    def num_leading(self, keys: Sequence[bytes]) -> int:
        """As KvStore.num_leading."""
        is_missing = self.missing(keys)
        return is_missing.index(True) if True in is_missing else len(keys)

    def write(self, blocks: Sequence[tuple[bytes, memoryview]]) -> int:
        """As KvStore.write."""
        num_stored = 0
        for key, block in blocks:
            header = self._records.header(key, block)
            with self._lock:
                if self._max_records == 0 or self._records.name(key) in self._stored:
                    continue
            record = bytearray(self._records.record_bytes)
            record[:HEADER_BYTES] = header
            np.copyto(np.frombuffer(record, np.uint8)[HEADER_BYTES:], np.frombuffer(block, np.uint8))
            with self._lock:
                self._stored[self._records.name(key)] = record
                while len(self._stored) > self._max_records:
                    self._stored.popitem(last=False)
                    self._tally.add("evicted")
            num_stored += 1
        return num_stored

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> RunRead:
        """As KvStore.read."""
        for index, (key, block) in enumerate(zip(keys, into, strict=True)):
            name = self._records.name(key)
            with self._lock:
                record = self._stored.get(name)
                if record is None:
                    return RunRead(index, is_corrupt=False)
                self._stored.move_to_end(name)
            np.copyto(np.frombuffer(block, np.uint8), np.frombuffer(record, np.uint8)[HEADER_BYTES:])
            if not self._records.is_right(key, record[:HEADER_BYTES], block):
                with self._lock:
                    self._stored.pop(name, None)
                return RunRead(index, is_corrupt=True)
        return RunRead(len(keys), is_corrupt=False)

    def close(self) -> None:
        """As KvStore.close; here nothing stays."""
        with self._lock:
            self._stored.clear()

    def snapshot(self) -> Mapping[str, int]:
        """As KvStore.snapshot."""
        return self._tally.snapshot()
