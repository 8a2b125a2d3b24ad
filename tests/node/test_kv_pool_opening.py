"""The store that a node's flags name, or one sentence."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from connector.file_store import FileStore
from connector.kv_record import HEADER_BYTES
from connector.kv_store import KvStore, count_nowhere
from connector.memory_store import MemoryStore
from connector.redis_kv_store import RedisKvStore
from node.config import NodeConfig
from node.kv_pool_opening import open_store
from runtime.config import parse
from runtime.process import NotNow

KEY = bytes(32)
BLOCK_BYTES = 64


def opened(role: str, *flags: str) -> KvStore | None:
    config = parse(NodeConfig, f"baton {role}", "", ["--model", "m", "--router", "127.0.0.1:1", *flags], {})
    return open_store(role, config, BLOCK_BYTES, count_nowhere)


def is_read(store: KvStore | None) -> bool:
    assert store is not None
    return store.read([KEY], [memoryview(bytearray(BLOCK_BYTES))]).num_blocks == 1


@pytest.mark.covers("W10")
def test_each_url_opens_its_store(tmp_path: Path) -> None:
    assert opened("decode") is None
    assert isinstance(opened("decode", "--kv-pool", (tmp_path / "pool").as_uri()), FileStore)
    assert isinstance(opened("mixed", "--kv-pool", "memory://"), MemoryStore)
    nobody_there = opened("decode", "--kv-pool", "redis://127.0.0.1:1/0")
    assert isinstance(nobody_there, RedisKvStore), "a store that is down costs recomputing, not the start"


@pytest.mark.covers("W10")
def test_the_size_bound_is_the_flags(tmp_path: Path) -> None:
    store = opened("mixed", "--kv-pool", "memory://", "--kv-pool-max-mib", "1")
    assert store is not None
    keys = [number.to_bytes(32, "big") for number in range(9000)]
    store.write([(key, memoryview(bytes(BLOCK_BYTES))) for key in keys])
    assert sum(not missing for missing in store.missing(keys)) == (1 << 20) // (64 + BLOCK_BYTES)


@pytest.mark.covers("W08")
def test_blocks_of_a_cluster_with_another_secret_or_none_are_not_read(tmp_path: Path) -> None:
    pool = ("--kv-pool", (tmp_path / "pool").as_uri())
    for name in ("ours", "theirs"):
        (tmp_path / name).write_text(f"the secret of {name}\n")
    ours = (*pool, "--kv-pool-secret-file", str(tmp_path / "ours"))
    store = opened("decode", *ours)
    assert store is not None and store.write([(KEY, memoryview(bytes(BLOCK_BYTES)))]) == 1
    assert is_read(opened("prefill", *ours))
    assert not is_read(opened("prefill", *pool))
    assert not is_read(opened("prefill", *pool, "--kv-pool-secret-file", str(tmp_path / "theirs")))


@pytest.mark.parametrize(
    ("role", "flags", "sentence"),
    [
        ("decode", ("--kv-pool", "memory://"), "a decode node reads no KV pool"),
        ("prefill", ("--kv-pool", "memory://"), "saves with --save-finished-kv on alone"),
        (
            "decode",
            ("--kv-pool", "file:///no/such/parent/pool"),
            "file:///no/such/parent/pool: /no/such/parent is not there; make it",
        ),
        (
            "decode",
            ("--kv-pool", "file:///tmp", "--kv-pool-secret-file", "/no/such"),
            "--kv-pool-secret-file /no/such: ",
        ),
        (
            "decode",
            ("--kv-pool", "file:///tmp", "--kv-pool-secret-file", "/dev/null"),
            "0 bytes, at least 16 are a secret",
        ),
    ],
)
def test_what_cannot_be_opened_is_one_sentence(role: str, flags: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ValueError, match="--kv-pool") as error:
        opened(role, *flags)
    assert sentence in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_disk_that_is_full_or_gone_may_pass_by_itself(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node ended with the code after which units start none again, and stayed away when the disk had room."""

    def mkdir(path: object, mode: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "mkdir", mkdir)
    with pytest.raises(ValueError, match=os.strerror(number)) as raised:
        opened("decode", "--kv-pool", (tmp_path / "pool").as_uri())
    assert isinstance(raised.value, NotNow) == (number != errno.EACCES)


def test_a_pool_whose_file_system_is_read_only_now_may_pass_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = (tmp_path / "pool").as_uri()
    opened("decode", "--kv-pool", url)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match="cannot be written to") as raised:
        opened("decode", "--kv-pool", url)
    assert not isinstance(raised.value, NotNow), "somebody else's folder is to be mended"
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
    with pytest.raises(NotNow, match=os.strerror(errno.EROFS)):
        opened("decode", "--kv-pool", url)


def test_a_bound_that_holds_no_block_is_one_sentence() -> None:
    for flag, num_bytes in (("--kv-pool-max-mib", "1048641 bytes there"), ("--kv-pool-staging-mib", "1048577 bytes")):
        config = parse(NodeConfig, "", "", ["--model", "m", "--router", "h:1", "--kv-pool", "memory://", flag, "1"], {})
        with pytest.raises(ValueError, match=f"{flag} 1: does not hold one block, which has {num_bytes}$"):
            open_store("mixed", config, (1 << 20) + 1, count_nowhere)


def test_a_bound_of_one_block_does_not_hold_its_header() -> None:
    """Nothing was ever stored, and routers were told of each block that it was."""
    flags = ["--model", "m", "--router", "h:1", "--kv-pool", "memory://", "--kv-pool-max-mib", "1"]
    config = parse(NodeConfig, "", "", flags, {})
    with pytest.raises(ValueError, match="--kv-pool-max-mib 1: does not hold one block, which has 1048640 bytes there"):
        open_store("mixed", config, 1 << 20, count_nowhere)
    assert open_store("mixed", config, (1 << 20) - HEADER_BYTES, count_nowhere) is not None


def test_a_prefill_node_that_saves_prompts_may_keep_them_for_itself() -> None:
    assert opened("prefill", "--kv-pool", "memory://", "--save-finished-kv", "on") is not None
