"""What is particular to Redis: time to live, a server that dies, hangs, is full or holds something else."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
import pytest

from connector.kv_record import KvRecords
from connector.kv_store import KvStoreError, KvStoreLimits, RunRead
from connector.redis_kv_store import RedisKvStore
from tests.kv_pool.places import REDIS_PREFIX, RedisPlace, blocks_of, keys_of, pairs, views
from tests.registry.redis_server import RedisServer, started_redis
from tests.security.strangers import make_certificates

_R = TypeVar("_R")

SMALL: Final = 100
RECORDS: Final = KvRecords(SMALL)
TIMEOUT_S: Final = 0.3
_SLACK: Final = 100  # times: a busy machine; without a bound it were for ever


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with started_redis(tmp_path) as running:
        yield running


@pytest.mark.covers("W10")
def test_records_expire_unless_they_are_read(redis_server: RedisServer) -> None:
    redis_server.client.flushall()
    store = RedisPlace(redis_server).open(RECORDS, KvStoreLimits(ttl_s=5000))
    keys, blocks = keys_of(2), blocks_of(2, SMALL)
    store.write(pairs(keys, blocks))
    names = [REDIS_PREFIX + RECORDS.name(key) for key in keys]
    assert all(4_900_000 < redis_server.client.pttl(name) <= 5_000_000 for name in names)
    for name in names:
        redis_server.client.pexpire(name, 1_000_000)
    assert store.read(keys[:1], views(np.zeros((1, SMALL), np.uint8))).num_blocks == 1
    assert [redis_server.client.pttl(name) > 4_900_000 for name in names] == [True, False]
    redis_server.client.pexpire(names[0], 1)
    while redis_server.client.exists(names[0]):
        time.sleep(0.001)
    assert store.missing(keys) == [True, False]
    assert store.num_leading(keys) == 0
    store.close()


@pytest.mark.covers("R02", "W10")
def test_who_comes_when_the_server_has_dropped_the_identity_finds_that_of_those_who_write(
    redis_server: RedisServer,
) -> None:
    """FLUSHALL does, and so may its own eviction: nobody has read it since the nodes began. Routers would see two pools."""
    redis_server.client.flushall()
    place = RedisPlace(redis_server)
    store = place.open(RECORDS)
    before = store.identity()
    redis_server.client.flushall()
    assert store.write(pairs(keys_of(2), blocks_of(2, SMALL))) == 2
    late = place.open(RECORDS)
    assert late.identity() == before == store.identity()
    store.close()
    late.close()


@pytest.mark.covers("W10")
def test_names_without_values_count_until_they_are_the_oldest_and_then_no_more(redis_server: RedisServer) -> None:
    redis_server.client.flushall()
    place = RedisPlace(redis_server)
    store = place.open(RECORDS, KvStoreLimits(max_bytes=8 * RECORDS.record_bytes))
    keys, blocks = keys_of(40), blocks_of(40, SMALL)
    store.write(pairs(keys[:8], blocks[:8]))
    for key in keys[:8]:  # as a server short of memory does
        redis_server.client.delete(REDIS_PREFIX + RECORDS.name(key))
    for number in range(8, 40):
        store.write(pairs(keys[number : number + 1], blocks[number : number + 1]))
        assert len(place.names()) <= 8
    assert place.names() == set(keys[-8:])
    redis_server.client.delete(REDIS_PREFIX + RECORDS.name(keys[-8]))
    store.write(pairs([keys[-8], keys[0]], blocks[[-8, 0]]))  # one that has a name, and is the oldest
    assert place.names() == {*keys[-6:], keys[-8], keys[0]}
    store.close()


@pytest.mark.covers("W08")
@pytest.mark.parametrize("fault", ["killed", "frozen"])
def test_a_server_that_is_gone_or_hangs_fails_soon_and_serves_again_once_it_is_back(
    server: RedisServer, fault: str
) -> None:
    store = RedisPlace(server).open(RECORDS, KvStoreLimits(timeout_s=TIMEOUT_S))
    keys, blocks = keys_of(2), blocks_of(2, SMALL)
    into = np.zeros((2, SMALL), np.uint8)
    in_time(lambda: store.write(pairs(keys, blocks)))
    server.kill() if fault == "killed" else server.freeze()
    for call in (
        lambda: store.missing(keys),
        lambda: store.num_leading(keys),
        lambda: store.write(pairs(keys, blocks)),
        lambda: store.read(keys, views(into)),
    ):
        began_at = time.monotonic()
        with pytest.raises(KvStoreError, match=r"^redis: (Timeout|Connection)Error$"):
            call()
        assert time.monotonic() - began_at < _SLACK * TIMEOUT_S
    server.start() if fault == "killed" else server.thaw()
    in_time(lambda: store.write(pairs(keys, blocks)))
    assert in_time(lambda: store.read(keys, views(into))) == RunRead(2, is_corrupt=False)
    assert np.array_equal(into, blocks)
    store.close()


def in_time(call: Callable[[], _R]) -> _R:
    """What it gives as soon as this machine leaves time for it: who fails sooner than by the store's timeout fails the test."""
    give_up_at = time.monotonic() + _SLACK * TIMEOUT_S
    while True:
        began_at = time.monotonic()
        try:
            return call()
        except KvStoreError:
            if time.monotonic() - began_at < TIMEOUT_S or began_at > give_up_at:
                raise


@pytest.mark.covers("W08", "W10")
def test_a_server_out_of_memory_refuses_writes_and_is_read_all_the_same(server: RedisServer) -> None:
    store = RedisPlace(server).open(RECORDS)
    keys, blocks = keys_of(2), blocks_of(2, SMALL)
    into = np.zeros((2, SMALL), np.uint8)
    store.write(pairs(keys[:1], blocks[:1]))
    server.client.config_set("maxmemory", 1)
    with pytest.raises(KvStoreError, match=r"OutOfMemoryError|OOM"):
        store.write(pairs(keys, blocks))
    assert store.read(keys, views(into)) == RunRead(1, is_corrupt=False)
    assert np.array_equal(into[0], blocks[0])
    server.client.config_set("maxmemory", 0)
    assert store.write(pairs(keys, blocks)) == 1
    store.close()


@pytest.mark.covers("W10")
def test_a_server_whose_clock_was_set_back_keeps_the_bound_and_what_was_written_last(redis_server: RedisServer) -> None:
    """After a failover to a host that is behind, say: what was written was dropped before it was there, and not counted."""
    redis_server.client.flushall()
    place = RedisPlace(redis_server)
    store = place.open(RECORDS, KvStoreLimits(max_bytes=8 * RECORDS.record_bytes))
    keys, blocks = keys_of(40), blocks_of(40, SMALL)
    store.write(pairs(keys[:8], blocks[:8]))
    used = f"baton:{{kv}}:used:{RECORDS.record_bytes}"
    for name, score in redis_server.client.zrange(used, 0, -1, withscores=True):
        redis_server.client.zadd(used, {name: score + 3_600_000_000})
    for number in range(8, 40):
        store.write(pairs(keys[number : number + 1], blocks[number : number + 1]))
        assert len(place.names()) <= 8
    assert place.names() == set(keys[-8:])
    into = np.zeros((1, SMALL), np.uint8)
    assert store.read(keys[32:33], views(into)).num_blocks == 1  # which keeps it in use
    store.write(pairs(keys[:1], blocks[:1]))
    assert place.names() == {keys[32], *keys[34:], keys[0]}
    store.close()


@pytest.mark.covers("W08", "W10")
def test_a_lower_bound_makes_room_on_a_server_that_is_out_of_memory(server: RedisServer) -> None:
    """Or nothing but a flush would: each write was refused before it had dropped anything."""
    records = KvRecords(50_000)
    place = RedisPlace(server)
    keys, blocks = keys_of(101), blocks_of(101, 50_000)
    store = place.open(records)
    assert store.write(pairs(keys[:100], blocks[:100])) == 100
    store.close()
    server.client.config_set("maxmemory", server.client.info("memory")["used_memory"])
    store = place.open(records, KvStoreLimits(max_bytes=20 * records.record_bytes, timeout_s=60.0))
    for _ in range(1000):
        with contextlib.suppress(KvStoreError):  # the memory is given back by a thread of the server's
            store.write(pairs(keys[100:], blocks[100:]))
        assert len(place.names()) <= 20
        if keys[100] in place.names():
            break
    assert len(place.names()) == 20 and keys[100] in place.names()
    store.close()


@pytest.mark.covers("W08", "W10")
def test_of_a_server_that_takes_no_writes_a_broken_record_costs_no_more_than_itself(server: RedisServer) -> None:
    """A replica, or a primary that has lost its own: what was read in front of it was thrown away, and the pool given up."""
    place = RedisPlace(server)
    store = place.open(RECORDS)
    keys, blocks = keys_of(3), blocks_of(3, SMALL)
    store.write(pairs(keys, blocks))
    wrong = bytearray(place.look(RECORDS.name(keys[2])))
    wrong[-1] ^= 1
    place.lay(RECORDS.name(keys[2]), bytes(wrong))
    server.client.config_set("min-replicas-to-write", 1)
    into = np.zeros((3, SMALL), np.uint8)
    assert store.read(keys, views(into)) == RunRead(2, is_corrupt=True)
    assert np.array_equal(into[:2], blocks[:2])
    server.client.config_set("min-replicas-to-write", 0)
    assert store.read(keys, views(into)) == RunRead(2, is_corrupt=True)
    assert store.write(pairs(keys, blocks)) == 1
    store.close()


@pytest.mark.covers("W08", "W10")
def test_what_somebody_else_put_under_our_names_is_no_block_and_is_replaced(redis_server: RedisServer) -> None:
    redis_server.client.flushall()
    store = RedisPlace(redis_server).open(RECORDS)
    keys, blocks = keys_of(3), blocks_of(3, SMALL)
    names = [REDIS_PREFIX + RECORDS.name(key) for key in keys]
    redis_server.client.rpush(names[0], "a", "list")
    redis_server.client.set(names[1], b"x" * 10_000_000)
    redis_server.client.set(f"baton:{{kv}}:used:{RECORDS.record_bytes}", "no set")
    assert store.missing(keys) == [True, True, True]
    assert store.num_leading(keys) == store.num_leading(keys[1:]) == 0
    into = np.zeros((3, SMALL), np.uint8)
    assert store.read(keys, views(into)) == RunRead(0, is_corrupt=True)
    redis_server.client.rpush(names[0], "a", "list")
    assert store.write(pairs(keys, blocks)) == 3
    assert store.read(keys, views(into)) == RunRead(3, is_corrupt=False)
    redis_server.client.set(f"baton:{{kv}}:used:{RECORDS.record_bytes}", "no set")
    assert store.write(pairs(keys, blocks)) == 0  # which renews them
    store.close()


@pytest.mark.covers("W08")
def test_an_error_shows_no_password(server: RedisServer) -> None:
    server.client.config_set("requirepass", "hunter2")
    place = RedisPlace(server)
    server.url = server.url.replace("redis://", "redis://:hunter3@")
    store = place.open(RECORDS)
    with pytest.raises(KvStoreError) as raised:
        store.num_leading(keys_of(1))
    assert str(raised.value) == "redis: AuthenticationError"
    assert raised.value.__cause__ is None and raised.value.__suppress_context__
    store.close()


@pytest.mark.covers("W08")
def test_what_is_wrong_with_tls_is_said_and_is_not_that_nobody_is_there(tmp_path: Path) -> None:
    """All of it was a ConnectionError, as of a server that is down, and a wrong URL was looked for in the wrong place."""
    certs = make_certificates(tmp_path / "certs")
    key, authority = certs / "tls.key", certs / "ca.crt"
    flags = ["--tls-cert-file", f"{certs}/tls.crt", "--tls-key-file", str(key), "--tls-auth-clients", "no"]
    trusting = f"rediss://127.0.0.1:{{port}}/0?ssl_ca_certs={authority}"
    # The last --port wins: nothing is served but TLS.
    with started_redis(tmp_path, *flags, "--tls-port", "{port}", "--port", "0", url=trusting) as redis:
        over_tls = f"rediss://127.0.0.1:{redis.port}/0"
        for url, word in (
            (over_tls, "SSLError:CERTIFICATE_VERIFY_FAILED"),
            (f"{over_tls}?ssl_ca_certs={key}", "SSLError:NO_CERTIFICATE_OR_CRL_FOUND"),
            (f"redis://127.0.0.1:{redis.port}/0", "ConnectionError:CLOSED"),
        ):
            store = RedisKvStore(url, RECORDS, KvStoreLimits(timeout_s=60.0))
            with pytest.raises(KvStoreError, match=f"^redis: {word}$"):
                store.num_leading(keys_of(1))
            store.close()
        store = RedisKvStore(redis.url, RECORDS, KvStoreLimits(timeout_s=60.0))
        assert store.num_leading(keys_of(1)) == 0
        store.close()


@pytest.mark.covers("W08")
@pytest.mark.parametrize("answer", [b":x\r\n", b"$y\r\n", b"*z\r\n", b":-5\r\n", b":99999999999999999999\r\n", b"\r\n"])
def test_who_speaks_something_else_fails_as_a_store_does(answer: bytes) -> None:
    """A wrong address, a broken proxy: whatever it says costs a recompute, and no thread."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=repeat, args=(listener, answer))
        thread.start()
        url = f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
        store = RedisKvStore(url, RECORDS, KvStoreLimits(timeout_s=TIMEOUT_S))
        into = np.zeros((2, SMALL), np.uint8)
        for call in (
            store.identity,
            lambda: store.missing(keys_of(2)),
            lambda: store.num_leading(keys_of(2)),
            lambda: store.read(keys_of(2), views(into)),
            lambda: store.write(pairs(keys_of(2), blocks_of(2, SMALL))),
        ):
            with contextlib.suppress(KvStoreError):
                call()
        store.close()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def repeat(listener: socket.socket, answer: bytes) -> None:
    """Say the same to whatever is asked, on one connection after the other."""
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                while connection.recv(1 << 16):
                    connection.sendall(answer * 8)
