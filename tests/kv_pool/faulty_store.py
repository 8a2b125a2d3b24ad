"""A store over a shelf that hangs, fails and lies when told to, and says whether it was asked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from connector.kv_record import KvRecords
from connector.kv_store import KvStoreError, KvStoreLimits, RunRead
from connector.memory_store import MemoryStore, Shelf


class FaultyStore:
    """Implements KvStore."""

    def __init__(self, block_bytes: int, max_hang_s: float = 120.0) -> None:
        self.records = KvRecords(block_bytes)
        self.shelf = Shelf()
        self.may_write = threading.Event()  # a call to write hangs until it is set
        self.may_read = threading.Event()  # as do the others
        self.may_write.set()
        self.may_read.set()
        self.fails_to_write = self.fails_to_read = False
        self.claims: int | None = None  # what num_leading says, whatever is there
        self.asked: list[str] = []
        self.in_read: Callable[[], None] | None = None  # called once a run has been read
        self._max_hang_s = max_hang_s
        self._store = MemoryStore(self.records, KvStoreLimits(), shelf=self.shelf)

    def identity(self) -> bytes:
        return self._store.identity()

    def missing(self, keys: Sequence[bytes]) -> list[bool]:
        return self._store.missing(keys)

    def num_leading(self, keys: Sequence[bytes]) -> int:
        self._asked("look", self.may_read, self.fails_to_read)
        return self._store.num_leading(keys) if self.claims is None else self.claims

    def write(self, blocks: Sequence[tuple[bytes, memoryview]]) -> int:
        self._asked("write", self.may_write, self.fails_to_write)
        return self._store.write(blocks)

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> RunRead:
        self._asked("read", self.may_read, self.fails_to_read)
        run = self._store.read(keys, into)
        if self.in_read is not None:
            self.in_read()
        return run

    def remove(self, keys: Sequence[bytes]) -> None:
        self._asked("remove", self.may_write, self.fails_to_write)
        self._store.remove(keys)

    def close(self) -> None:
        self.asked.append("close")

    def _asked(self, what: str, gate: threading.Event, fails: bool) -> None:
        self.asked.append(what)
        assert gate.wait(self._max_hang_s)
        if fails:
            raise KvStoreError("told to fail")
