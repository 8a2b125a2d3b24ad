"""A Redis that is not what it was: another server took over, or the user may not do everything."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from connector.kv_record import KvRecords
from connector.kv_store import KvStoreError, KvStoreLimits, RunRead
from connector.redis_kv_store import RedisKvStore
from tests.kv_pool.places import blocks_of, keys_of, pairs, views
from tests.registry.redis_server import started_redis

SMALL: Final = 100
RECORDS: Final = KvRecords(SMALL)
LIMITS: Final = KvStoreLimits(timeout_s=60.0)  # on any machine
DOCS: Final = Path("docs")


@pytest.mark.covers("W08")
def test_a_server_that_became_a_replica_is_left_for_the_one_that_took_over(tmp_path: Path) -> None:
    """Its connections live on, and each write over them was refused for as long as the node lived."""
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    live, (old_socket, new_socket) = tmp_path / "live", (tmp_path / name / "sock" for name in ("old", "new"))
    with (
        started_redis(tmp_path / "old", "--unixsocket", str(old_socket)) as old,
        started_redis(tmp_path / "new", "--unixsocket", str(new_socket)) as new,
    ):
        live.symlink_to(old_socket)
        writer, reader = (RedisKvStore(f"unix://{live}?db=0", RECORDS, LIMITS) for _ in range(2))
        keys, blocks = keys_of(2), blocks_of(2, SMALL)
        into = np.zeros((1, SMALL), np.uint8)
        assert writer.write(pairs(keys[:1], blocks[:1])) == 1
        assert reader.read(keys[:1], views(into)) == RunRead(1, is_corrupt=False)
        live.unlink()
        live.symlink_to(new_socket)
        old.client.config_set("replica-serve-stale-data", "yes")
        old.client.execute_command("REPLICAOF", "127.0.0.1", "1")
        with pytest.raises(KvStoreError, match="ReadOnlyError"):
            writer.write(pairs(keys[1:], blocks[1:]))
        assert writer.write(pairs(keys[1:], blocks[1:])) == 1
        assert reader.read(keys[:1], views(into)) == RunRead(1, is_corrupt=False), "what a replica has is right"
        assert reader.read(keys[:1], views(into)).num_blocks == 0, (
            "and then the one in charge is asked, who has none of it"
        )
        assert new.client.dbsize() > 0
        writer.close()
        reader.close()


def rights(page: str, before: str) -> list[str]:
    """The rights of a Redis user that a page names behind some words."""
    sentence = (DOCS / page).read_text().partition(before)[2].partition("`.")[0] + "`"
    return " ".join(re.findall(r"`([^`]+)`", sentence)).split()


@pytest.mark.covers("W08")
def test_the_rights_that_the_docs_name_are_enough_and_without_one_nothing_looks_absent(tmp_path: Path) -> None:
    """Who may not look found no block in a pool that was full of them, and no line said why."""
    with started_redis(tmp_path, "--requirepass", "pw", url="redis://:pw@{host}:{port}/0") as redis:
        named = [
            *rights("registry.md", "A user of its own needs"),
            *rights("kv_pool.md", "A user of its own needs those of"),
        ]
        redis.client.execute_command("ACL", "SETUSER", "baton", "on", ">pw", *named)
        store = RedisKvStore(f"redis://baton:pw@127.0.0.1:{redis.port}/0", RECORDS, LIMITS)
        keys, blocks = keys_of(3), blocks_of(3, SMALL)
        into = np.zeros((3, SMALL), np.uint8)
        store.identity()
        assert store.write(pairs(keys, blocks)) == 3
        assert store.write(pairs(keys, blocks)) == 0
        assert store.num_leading(keys) == 3
        assert store.read(keys, views(into)) == RunRead(3, is_corrupt=False)
        store.remove(keys[:1])
        assert store.missing(keys) == [True, False, False]
        redis.client.execute_command("ACL", "SETUSER", "baton", "-strlen")
        with pytest.raises(KvStoreError):
            store.num_leading(keys[1:])
        store.close()
