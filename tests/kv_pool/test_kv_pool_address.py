"""Which `--kv-pool` is taken, what is said of the others, and that no secret is ever shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.kv_pool_address import FilePool, KvPoolAddress, MemoryPool, RedisPool, read_kv_pool_address, shown

SECRET = "hunter2"


@pytest.mark.covers("W10")
@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("memory://", MemoryPool()),
        ("file:///mnt/pool", FilePool(Path("/mnt/pool"))),
        ("file:///mnt/my%20pool/%C3%BC%3F", FilePool(Path("/mnt/my pool/ü?"))),
        ("redis://127.0.0.1:6379/0", RedisPool("redis://127.0.0.1:6379/0")),
        (f"redis://user:{SECRET}@[::1]:6379/15", RedisPool(f"redis://user:{SECRET}@[::1]:6379/15")),
        (f"rediss://:{SECRET}@host:6380/0?ssl_check_hostname=false",) * 2,
        ("unix:///run/redis.sock?db=2", RedisPool("unix:///run/redis.sock?db=2")),
    ],
)
def test_taken(text: str, address: KvPoolAddress | str) -> None:
    found = read_kv_pool_address(text)
    assert found == (RedisPool(address) if isinstance(address, str) else address)
    assert SECRET not in shown(text)
    assert SECRET not in repr(found)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must be file:///PATH, memory://, redis://HOST"),
        ("/mnt/pool", "must be file:///PATH"),
        ("memory://x", "must be file:///PATH, memory://"),
        ("s3://bucket", "must be file:///PATH, memory://"),
        ("file:", "must be file:///PATH"),
        ("file://pool", "must be file:///PATH"),
        ("file://host/pool", "must be file:///PATH"),
        ("file:pool", "must be file:///PATH"),
        ("file:///", "must name a directory"),
        ("file:////", "must name a directory"),
        ("file:///a?b", "write %3F"),
        ("file:///a#b", "write %3F"),
        ("file:///a?", "write %3F"),
        ("file:///a%00b", "with an absolute path"),
        ("file:///a\nb", "with an absolute path"),
        ("file:///a%ff", "is no URL"),
        ("file://[/a", "is no URL"),
        (f"redis://:{SECRET}@", "must be file:///PATH, memory://, redis://"),
        (f"redis://:{SECRET}@host/zero", "the number of a database"),
        (f"redis://:a#{SECRET}@host/0", "must be file:///PATH, memory://, redis://"),
        (f"redis://host?password={SECRET}", "it takes no options"),
    ],
)
def test_refused_with_a_sentence_without_the_secret(text: str, says: str) -> None:
    with pytest.raises(ValueError) as raised:
        read_kv_pool_address(text)
    sentence = str(raised.value)
    assert sentence.startswith("--kv-pool ")
    assert says in sentence
    assert SECRET not in sentence


@given(st.text())
def test_any_text_is_taken_or_refused(text: str) -> None:
    for each in (text, f"file://{text}", f"redis://{text}"):
        try:
            read_kv_pool_address(each)
        except ValueError as error:
            assert str(error).startswith("--kv-pool ")
