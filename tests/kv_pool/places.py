"""Where each kind of store keeps its records, so that a test can open several stores over them and lay hands on what lies there."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from connector.file_store import FileStore
from connector.kv_record import KvRecords
from connector.kv_store import Count, KvStore, KvStoreLimits, count_nowhere
from connector.memory_store import MemoryStore, Shelf
from connector.redis_kv_store import RedisKvStore
from tests.registry.redis_server import RedisServer

Blocks = npt.NDArray[np.uint8]

PLENTY: Final = KvStoreLimits(timeout_s=60.0)
REDIS_PREFIX: Final = b"baton:{kv}:block:"


class Place(Protocol):
    """The records of one kind of store."""

    def open(self, records: KvRecords, limits: KvStoreLimits = PLENTY, count: Count = count_nowhere) -> KvStore:
        """One more store over them."""

    def names(self) -> set[bytes]:
        """Of the records that lie there."""

    def lay(self, name: bytes, record: bytes) -> None:
        """Put bytes under a name, whatever was there."""

    def look(self, name: bytes) -> bytes:
        """The bytes under a name."""

    def begin_anew(self) -> None:
        """Another, empty, of this kind takes its place."""


class MemoryPlace:
    """A shelf."""

    def __init__(self) -> None:
        self.shelf = Shelf()

    def open(self, records: KvRecords, limits: KvStoreLimits = PLENTY, count: Count = count_nowhere) -> KvStore:
        return MemoryStore(records, limits, count, self.shelf)

    def names(self) -> set[bytes]:
        return set(self.shelf.records)

    def lay(self, name: bytes, record: bytes) -> None:
        self.shelf.records[name] = bytearray(record)

    def look(self, name: bytes) -> bytes:
        return bytes(self.shelf.records[name])

    def begin_anew(self) -> None:
        self.shelf = Shelf()


class FilePlace:
    """A directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def open(self, records: KvRecords, limits: KvStoreLimits = PLENTY, count: Count = count_nowhere) -> KvStore:
        return FileStore(self.root, records, limits, count)

    def names(self) -> set[bytes]:
        return {bytes.fromhex(path.stem) for path in self.root.glob("??/*.kv")}

    def lay(self, name: bytes, record: bytes) -> None:
        self.path(name).parent.mkdir(exist_ok=True)
        self.path(name).write_bytes(record)

    def look(self, name: bytes) -> bytes:
        return self.path(name).read_bytes()

    def begin_anew(self) -> None:
        self.root = self.root.with_name("another")

    def path(self, name: bytes) -> Path:
        """Of a record."""
        return self.root / name.hex()[:2] / f"{name.hex()}.kv"


class RedisPlace:
    """A database."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server

    def open(self, records: KvRecords, limits: KvStoreLimits = PLENTY, count: Count = count_nowhere) -> KvStore:
        return RedisKvStore(self.server.url, records, limits, count)

    def names(self) -> set[bytes]:
        return {key.removeprefix(REDIS_PREFIX) for key in self.server.client.keys(REDIS_PREFIX + b"*")}

    def lay(self, name: bytes, record: bytes) -> None:
        self.server.client.set(REDIS_PREFIX + name, record)

    def look(self, name: bytes) -> bytes:
        found: bytes = self.server.client.get(REDIS_PREFIX + name)
        return found

    def begin_anew(self) -> None:
        self.server.client.flushall()


def keys_of(num: int, of: str = "") -> list[bytes]:
    """Keys as blocks have them."""
    return [hashlib.sha256(f"{of} {n}".encode()).digest() for n in range(num)]


def blocks_of(num: int, block_bytes: int, seed: int = 0) -> Blocks:
    """Random ones: [num, block_bytes] u8."""
    return np.random.default_rng(seed).integers(0, 256, (num, block_bytes), dtype=np.uint8)


def pairs(keys: Sequence[bytes], blocks: Blocks) -> list[tuple[bytes, memoryview]]:
    """What KvStore.write takes."""
    return [(key, block.data) for key, block in zip(keys, blocks, strict=True)]


def views(blocks: Blocks) -> list[memoryview]:
    """What KvStore.read fills."""
    return [block.data for block in blocks]
