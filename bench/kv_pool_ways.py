"""The ways of bench/kv_pool.py: each writes a run of blocks and reads it back, and forgets it between rounds.

memcpy      np.copyto, block by block                                what the store in memory is measured against
file        a new file for each block, written and read at once      what the store in a directory is measured against
redis       SET and GET, a pipeline of 8 MiB                         what the store in Redis is measured against
memory, directory, server; + keyed: with the cluster's secret        connector's stores, as a node has them
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
from redis import Redis

from connector.file_store import FileStore
from connector.kv_record import KvRecords
from connector.kv_store import KvStore, KvStoreLimits
from connector.memory_store import MemoryStore
from connector.redis_kv_store import RedisKvStore

Blocks = npt.NDArray[np.uint8]  # [num_blocks, block_bytes]
BASELINE: Final = {"memory": "memcpy", "directory": "file", "server": "redis"}  # of a store, keyed or not
_SECRET: Final = b"of a cluster that is benched"
_PIPELINE_BYTES: Final = 8 << 20
_LIMITS: Final = KvStoreLimits(max_bytes=1 << 40, timeout_s=60)


class Way(Protocol):
    """One of them, for one size of blocks."""

    def write(self, blocks: Blocks) -> None:
        """Store every block."""

    def read(self, into: Blocks) -> None:
        """Get back what was written last."""

    def forget(self) -> None:
        """Have nothing stored."""


class _Memcpy:
    def __init__(self, like: Blocks) -> None:
        self._copy = np.zeros_like(like)

    def write(self, blocks: Blocks) -> None:
        for target, source in zip(self._copy, blocks, strict=True):
            np.copyto(target, source)

    def read(self, into: Blocks) -> None:
        for target, source in zip(into, self._copy, strict=True):
            np.copyto(target, source)

    def forget(self) -> None:
        pass


class _Files:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()

    def write(self, blocks: Blocks) -> None:
        for number, block in enumerate(blocks):
            file = os.open(f"{self._folder}/{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            os.write(file, block.data)
            os.close(file)

    def read(self, into: Blocks) -> None:
        for number, block in enumerate(into):
            file = os.open(f"{self._folder}/{number}", os.O_RDONLY)
            os.readv(file, [block.data])
            os.close(file)

    def forget(self) -> None:
        shutil.rmtree(self._folder)
        self._folder.mkdir()


class _Values:
    def __init__(self, url: str, block_bytes: int) -> None:
        self._client: Any = Redis.from_url(url, socket_read_size=1 << 20, protocol=2)
        self._per_pipeline = max(1, _PIPELINE_BYTES // block_bytes)

    def write(self, blocks: Blocks) -> None:
        for first in range(0, len(blocks), self._per_pipeline):
            pipe = self._client.pipeline(transaction=False)
            for number, block in enumerate(blocks[first : first + self._per_pipeline]):
                pipe.set(f"plain:{first + number}", block.data)
            pipe.execute()

    def read(self, into: Blocks) -> None:
        for first in range(0, len(into), self._per_pipeline):
            targets = into[first : first + self._per_pipeline]
            pipe = self._client.pipeline(transaction=False)
            for number in range(len(targets)):
                pipe.get(f"plain:{first + number}")
            for target, value in zip(targets, pipe.execute(), strict=True):
                np.copyto(target, np.frombuffer(value, np.uint8))

    def forget(self) -> None:
        self._client.flushall()


class _Store:
    """A store of connector's; `opened` forgets what is stored and opens it."""

    def __init__(self, num_blocks: int, opened: Callable[[], KvStore]) -> None:
        self._keys = [hashlib.sha256(b"%d" % number).digest() for number in range(num_blocks)]
        self._opened = opened
        self._store = opened()

    def write(self, blocks: Blocks) -> None:
        num_written = self._store.write([(key, block.data) for key, block in zip(self._keys, blocks, strict=True)])
        assert num_written == len(blocks), "a block was there already"

    def read(self, into: Blocks) -> None:
        run = self._store.read(self._keys, [block.data for block in into])
        assert run.num_blocks == len(into), "a block is not there"

    def forget(self) -> None:
        self._store.close()
        self._store = self._opened()


def make_ways(folder: Path, redis_url: str | None, like: Blocks) -> dict[str, Way]:
    """Every way, the references first, for blocks of this number and size; those over Redis where there is one."""
    num_blocks, block_bytes = like.shape
    ways: dict[str, Way] = {"memcpy": _Memcpy(like), "file": _Files(folder / "plain")}
    if redis_url is not None:
        ways["redis"] = _Values(redis_url, block_bytes)
    for suffix, secret in (("", None), (" keyed", _SECRET)):
        records = KvRecords(block_bytes, secret)
        root = folder / f"pool{suffix}"
        ways[f"memory{suffix}"] = _Store(num_blocks, partial(MemoryStore, records, _LIMITS))
        ways[f"directory{suffix}"] = _Store(num_blocks, partial(_emptied_directory, root, records))
        if redis_url is not None:
            ways[f"server{suffix}"] = _Store(num_blocks, partial(_emptied_server, redis_url, records))
    return ways


def _emptied_directory(root: Path, records: KvRecords) -> KvStore:
    if root.exists():
        shutil.rmtree(root)
    return FileStore(root, records, _LIMITS)


def _emptied_server(url: str, records: KvRecords) -> KvStore:
    with Redis.from_url(url) as client:
        client.flushall()
    return RedisKvStore(url, records, _LIMITS)
