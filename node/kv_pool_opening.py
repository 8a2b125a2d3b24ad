"""Which store a node's KV pool is kept in, by its address."""

from __future__ import annotations

from typing import assert_never

from connector.file_store import FileStore
from connector.kv_record import KvRecords
from connector.kv_store import Count, KvStore, KvStoreLimits
from connector.memory_store import MemoryStore
from runtime.kv_pool_address import FilePool, KvPoolAddress, MemoryPool, RedisPool


def open_kv_store(address: KvPoolAddress, records: KvRecords, limits: KvStoreLimits, count: Count) -> KvStore:
    """The store at the address; one in Redis is not called yet. Raises KvStoreError for a directory that cannot be used."""
    match address:
        case MemoryPool():
            return MemoryStore(records, limits, count)
        case FilePool(path):
            return FileStore(path, records, limits, count)
        case RedisPool(url):
            from connector.redis_kv_store import RedisKvStore  # heavy: only who uses Redis pays for its client

            return RedisKvStore(url, records, limits, count)
        case _:
            assert_never(address)
