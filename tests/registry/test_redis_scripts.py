"""What Redis decides in its scripts is what the pure list decides: the same sequences of calls, the same answers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from proto import baton_pb2 as pb
from runtime.listing import MAX_ENTRIES, Listing
from runtime.redis_scripts import KEEP_MS
from runtime.redis_store import RedisStore
from runtime.registry_record import encode_record
from runtime.session import Peer
from tests.registry.redis_server import RedisServer, started_redis
from tests.registry.test_listing import entry

TTL_S = 100.0
STEP_S = (
    40.0  # three of them are longer, and no life of nodes is; all of them are shorter than Redis keeps what is silent
)
PATIENCE_S = 20.0  # on any machine
NUM_LIVES = 12
NUM_CALLS = 80  # in each
NAMESPACE = "test"
ENTRIES, SEEN, ADDRESSES, GONE = (f"baton:{{{NAMESPACE}}}:{key}" for key in ("entries", "seen", "addresses", "gone"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with started_redis(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def redis(server: RedisServer) -> RedisServer:
    server.client.flushall()
    return server


def drawn_entry(rng: random.Random) -> pb.NodeEntry:
    """Of few names, processes and addresses, so that they meet."""
    incarnation = rng.randrange(1, 8)
    drawn = entry(rng.choice(("a", "b {x}", "ü")), incarnation, port=5000 + 10 * rng.randrange(3))
    drawn.started_ms = rng.choice((0, 7, 1000 + incarnation, 1000 + incarnation, 1010 - incarnation))
    return drawn


def let_time_pass(redis: RedisServer, seconds: float) -> None:
    """By Redis's clock: what was repeated was repeated longer ago."""
    for name in redis.client.zrange(SEEN, 0, -1):
        redis.client.zincrby(SEEN, -seconds * 1000, name)


@pytest.mark.covers("R13", "R16", "C06")
def test_redis_takes_and_refuses_as_the_list_does(redis: RedisServer, fresh_seed: int) -> None:
    """Several lives of a few nodes that take each other's names and addresses, go, fall silent and come back."""
    rng = random.Random(fresh_seed)
    ends = set()

    async def scenario() -> None:
        store = RedisStore(redis.url, NAMESPACE, TTL_S, PATIENCE_S)
        for _ in range(NUM_LIVES):
            redis.client.flushall()
            listing, now = Listing(TTL_S), 0.0
            for _ in range(NUM_CALLS):
                if rng.random() < 0.3:
                    let_time_pass(redis, STEP_S)
                    now += STEP_S
                    while (deadline := listing.next_deadline()) is not None and deadline <= now:
                        listing.expire(deadline)
                drawn = drawn_entry(rng)
                peer = Peer(drawn.node.name, drawn.node.incarnation)
                if rng.random() < 0.1:
                    if listing.deregister(peer):
                        await store.deregister(peer)
                        assert peer in (await store.read()).gone
                    continue
                expected = listing.register(drawn, now)
                answer = await store.register(drawn)
                assert answer == (expected if isinstance(expected, str) else "")
                ends.add(answer.rpartition(" ")[2])
                content = await store.read()
                assert {row.entry.SerializeToString() for row in content.rows} == {
                    each.SerializeToString() for each in listing.entries()
                }
                assert content.num_skipped == 0
        await store.hang_up()

    asyncio.run(scenario())
    assert ends == {"", "deregistered.", "listed."}, "it was taken, it was gone, it was older"


@pytest.mark.covers("X05", "R13")
def test_a_record_that_was_read_under_its_own_name_is_nobodys_under_another(redis: RedisServer) -> None:
    async def scenario() -> None:
        store = RedisStore(redis.url, NAMESPACE, TTL_S, PATIENCE_S)
        assert await store.register(entry()) == ""
        for num_others in (0, 1):
            content = await store.read()
            assert [row.entry for row in content.rows] == [entry()] and content.num_skipped == num_others
            redis.client.hset(ENTRIES, "other", encode_record(entry()))
            redis.client.zadd(SEEN, {"other": int(redis.client.time()[0]) * 1000})
        await store.hang_up()

    asyncio.run(scenario())


@pytest.mark.covers("R13", "C06")
def test_a_process_that_went_silent_does_not_come_back_once_another_has_its_name(redis: RedisServer) -> None:
    async def scenario() -> None:
        store = RedisStore(redis.url, NAMESPACE, TTL_S, PATIENCE_S)
        assert await store.register(entry()) == ""
        let_time_pass(redis, TTL_S)
        assert (await store.read()).rows == ()
        assert await store.register(entry(incarnation=2)) == ""
        let_time_pass(redis, TTL_S)
        assert "was replaced" in await store.register(entry())
        assert await store.register(entry(incarnation=2)) == "", "it was silent, and nobody followed"
        await store.hang_up()

    asyncio.run(scenario())


@pytest.mark.covers("R13")
def test_a_full_registry_refuses_a_newcomer_and_renews_who_is_there(redis: RedisServer) -> None:
    async def scenario() -> None:
        store = RedisStore(redis.url, NAMESPACE, TTL_S, PATIENCE_S)
        assert await store.register(entry()) == ""
        now_ms = int(redis.client.time()[0]) * 1000
        redis.client.zadd(SEEN, {f"node {i}": now_ms for i in range(MAX_ENTRIES - 1)})
        assert (
            await store.register(entry("decode-1", port=6001))
            == f"{MAX_ENTRIES} nodes are registered, that is the most."
        )
        assert await store.register(entry()) == ""
        await store.hang_up()

    asyncio.run(scenario())


@pytest.mark.covers("R13")
def test_a_wrong_entry_is_refused_with_the_lists_sentence_and_writes_nothing(redis: RedisServer) -> None:
    async def scenario() -> None:
        store = RedisStore(redis.url, NAMESPACE, TTL_S, PATIENCE_S)
        assert await store.register(entry(num_blocks=0)) == "num_blocks is 0, it must be at least 1."
        await store.hang_up()

    asyncio.run(scenario())
    assert redis.client.dbsize() == 0


@pytest.mark.covers("R16")
def test_two_clusters_share_a_redis_and_see_nothing_of_each_other(redis: RedisServer) -> None:
    async def scenario() -> None:
        stores = [RedisStore(redis.url, name, TTL_S, PATIENCE_S) for name in ("blue", "green")]
        for store, blocks in zip(stores, (10, 20), strict=True):
            assert await store.register(entry(num_blocks=blocks)) == ""
        for store, blocks in zip(stores, (10, 20), strict=True):
            assert [row.entry.num_blocks for row in (await store.read()).rows] == [blocks]
            await store.hang_up()

    asyncio.run(scenario())
    assert all(key.startswith((b"baton:{blue}:", b"baton:{green}:")) for key in redis.client.scan_iter())


@pytest.mark.covers("X05")
def test_what_is_left_of_old_entries_and_garbage_is_forgotten(redis: RedisServer) -> None:
    """Nothing grows for ever, and a cluster that is gone leaves nothing behind."""

    async def scenario() -> None:
        store = RedisStore(redis.url, NAMESPACE, TTL_S, PATIENCE_S)
        await store.register(entry("decode-1", port=6001))
        await store.deregister(Peer("decode-2", 2))
        now_ms = int(redis.client.time()[0]) * 1000
        for key in (SEEN, GONE):
            redis.client.zadd(key, dict.fromkeys(redis.client.zrange(key, 0, -1), now_ms - KEEP_MS - 1000))
        redis.client.zadd(SEEN, {b"\xff": float("inf"), b"b": now_ms + 100_000, b"c": float("-inf")})
        redis.client.zadd(GONE, {b"x": float("inf")})
        await store.register(entry())
        await store.hang_up()

    asyncio.run(scenario())
    assert redis.client.zrange(SEEN, 0, -1) == [b"decode-0"]
    assert redis.client.hgetall(ADDRESSES) == {b"127.0.0.1:5001": b"decode-0"}
    assert redis.client.hkeys(ENTRIES) == [b"decode-0"]
    assert redis.client.zcard(GONE) == 0
    assert all(0 < redis.client.pttl(key) <= KEEP_MS for key in redis.client.scan_iter())


@pytest.mark.covers("C08")
def test_who_is_cancelled_in_a_call_ends_whenever_that_is(redis: RedisServer) -> None:
    """A library that waits by asyncio.wait_for loses cancellations before Python 3.12 (python/cpython#86296)."""

    async def call_again_and_again(store: RedisStore) -> None:
        while True:
            await store.read()

    async def scenario() -> None:
        for num_turns in range(100):
            store = RedisStore(redis.url, NAMESPACE, TTL_S, PATIENCE_S)
            task = asyncio.create_task(call_again_and_again(store))
            for _ in range(num_turns % 50):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task], timeout=60)
            assert task.cancelled(), f"after {num_turns % 50} turns of the loop"
            await store.hang_up()

    asyncio.run(scenario())
