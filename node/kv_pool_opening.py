"""Opens the store of the KV pool that a node's flags name. Not here: what is done with it (node/kv_pool.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from connector.file_store import FileStore
from connector.kv_record import KvRecords
from connector.kv_store import Count, KvStore, KvStoreError, KvStoreLimits, KvStoreUnready
from connector.memory_store import MemoryStore
from node.config import NodeConfig
from runtime.kv_pool_address import FilePool, MemoryPool, RedisPool, read_kv_pool_address, shown
from runtime.process import NotNow

MIN_SECRET_BYTES: Final = 16


def open_store(role: str, config: NodeConfig, block_bytes: int, count: Count) -> KvStore | None:
    """The store, for blocks of so many bytes; None without --kv-pool. A Redis need not answer yet.

    Raises ValueError with one sentence for what the user can mend; NotNow, which is one, where that may pass by itself.
    """
    if config.kv_pool is None:
        return None
    defaults = KvStoreLimits()
    limits = KvStoreLimits(
        max_bytes=defaults.max_bytes if config.kv_pool_max_mib is None else config.kv_pool_max_mib << 20,
        ttl_s=defaults.ttl_s if config.kv_pool_ttl_s is None else config.kv_pool_ttl_s,
    )
    records = KvRecords(block_bytes, _secret_in(config.kv_pool_secret_file))
    for flag, mib, num_bytes, where in (
        ("--kv-pool-max-mib", config.kv_pool_max_mib, records.record_bytes, " there"),
        ("--kv-pool-staging-mib", config.kv_pool_staging_mib, block_bytes, ""),
    ):
        if mib is not None and mib << 20 < num_bytes:
            raise ValueError(f"{flag} {mib}: does not hold one block, which has {num_bytes} bytes{where}")
    match read_kv_pool_address(config.kv_pool):
        case MemoryPool():
            if role == "decode":
                raise ValueError("--kv-pool memory://: is inside this process, and a decode node reads no KV pool")
            if role == "prefill" and not config.saves_finished:
                raise ValueError(
                    "--kv-pool memory://: is inside this process, and a prefill node saves with --save-finished-kv on alone"
                )
            return MemoryStore(records, limits, count)
        case FilePool(path):
            try:
                return FileStore(path, records, limits, count)
            except KvStoreError as error:
                kind = NotNow if isinstance(error, KvStoreUnready) else ValueError
                raise kind(f"--kv-pool {shown(config.kv_pool)}: {error}") from None
        case RedisPool(url):
            from connector.redis_kv_store import RedisKvStore  # heavy: only who uses Redis pays for its client

            return RedisKvStore(url, records, limits, count)


def _secret_in(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ValueError(f"--kv-pool-secret-file {path}: {error.strerror}") from None
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(
            f"--kv-pool-secret-file {path}: {len(secret)} bytes, at least {MIN_SECRET_BYTES} are a secret; "
            "make one with: head -c 32 /dev/urandom | base64"
        )
    return secret
