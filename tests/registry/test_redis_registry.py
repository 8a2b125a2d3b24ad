"""Nodes and routers over a real redis-server that is killed, stopped, emptied, filled with garbage and full."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from proto import baton_pb2 as pb
from router.core import RouterCore
from router.entrance import RouterCoreConfig
from router.events import NodeListed, NodeMissed, NodeRef, NodeUnlisted, SessionUp
from router.placement import Placement
from runtime.redis_reader import RedisReader
from runtime.redis_store import CALL_TIMEOUT_S, RedisStore
from runtime.registry_client import RegistryClient
from runtime.registry_record import encode_record
from runtime.registry_server import TTL_S
from runtime.session import Peer
from tests.registry.redis_server import RedisServer, started_redis
from tests.registry.test_listing import entry
from tests.registry.test_registry import NODE, Recorder, never
from tests.session.ends import until
from tests.session.tcp_proxy import TcpProxy

NAMESPACE = "test"
ENTRIES, SEEN, ADDRESSES, GONE = (f"baton:{{{NAMESPACE}}}:{key}" for key in ("entries", "seen", "addresses", "gone"))
LISTED = [("listed", NODE)]
NEWCOMER = Peer("decode-1", 1)
WITHIN_S = (
    60.0  # for what the design wants within two seconds: on a machine that is held up, time stands still for the list
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with started_redis(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def redis(server: RedisServer) -> RedisServer:
    server.client.flushall()
    return server


@dataclass
class Router:
    """What a router hears."""

    handler: Recorder
    counts: Counter[str]
    reader: RedisReader

    @property
    def happened(self) -> list[tuple[str, Peer]]:
        return self.handler.happened


class Deciding(Recorder):
    """Beside a router's core whose session with each node comes up as soon as it is listed, and stays so."""

    def __init__(self) -> None:
        super().__init__()
        self._core = RouterCore(RouterCoreConfig(), Placement())

    @property
    def is_ready(self) -> bool:
        return not self._core.missing()

    def on_listed(self, entry: pb.NodeEntry) -> None:
        super().on_listed(entry)
        self._core.receive(NodeListed(entry), 0.0)
        self._core.receive(SessionUp(NodeRef(*NODE)), 0.0)

    def on_missed(self, node: Peer) -> None:
        super().on_missed(node)
        self._core.receive(NodeMissed(NodeRef(*node)), 0.0)

    def on_unlisted(self, node: Peer) -> None:
        super().on_unlisted(node)
        self._core.receive(NodeUnlisted(NodeRef(*node)), 0.0)


@asynccontextmanager
async def running_router(url: str, handler: Recorder | None = None, ttl_s: float = TTL_S) -> AsyncIterator[Router]:
    handler, counts = handler or Recorder(), Counter[str]()

    def count(name: str, number: int) -> None:
        counts[name] += number

    reader = RedisReader(handler, RedisStore(url, NAMESPACE, ttl_s), ttl_s, count)
    reader.start()
    try:
        yield Router(handler, counts, reader)
    finally:
        await reader.close()


@asynccontextmanager
async def running_node(
    url: str, what: pb.NodeEntry, timeout_s: float = CALL_TIMEOUT_S
) -> AsyncIterator[RegistryClient]:
    """`timeout_s`: longer where its goodbye must be heard, said by a process that may be held up."""
    client = RegistryClient([RedisStore(url, NAMESPACE, TTL_S, timeout_s)], lambda: what, never)
    client.start()
    try:
        yield client
    finally:
        await client.deregister()


def is_written(redis: RedisServer, name: str = "decode-0") -> bool:
    return bool(redis.client.hexists(ENTRIES, name))


async def looks(redis: RedisServer, number: int) -> None:
    """Wait until routers have looked so often, all of them together, as Redis counts."""

    def calls() -> int:
        stats = redis.client.info("commandstats")
        num_calls: int = stats.get("cmdstat_set", {"calls": 0})["calls"]
        return num_calls

    start = calls()
    await until(lambda: calls() >= start + number, WITHIN_S)


@pytest.mark.covers("R13", "R16")
def test_every_router_finds_a_node_keeps_it_and_forgets_it_at_its_goodbye(redis: RedisServer) -> None:
    async def scenario() -> None:
        async with running_router(redis.url) as one, running_router(redis.url) as two:
            async with running_node(redis.url, entry(), WITHIN_S):
                await until(lambda: bool(one.happened and two.happened), WITHIN_S)
                await looks(redis, 16)  # of two routers, four times a second: 2 s, longer than the ttl
                assert one.happened == two.happened == LISTED
                assert one.reader.snapshot() == {"nodes": {"decode-0": "127.0.0.1:5001"}}
            await until(lambda: len(one.happened) == len(two.happened) == 2, WITHIN_S)
            assert one.happened == two.happened == [*LISTED, ("unlisted", NODE)]
            assert not one.counts["skipped_values"] and not two.counts["skipped_values"]

    asyncio.run(scenario())


@pytest.mark.covers("R13", "C08")
def test_a_node_that_cannot_reach_redis_gets_work_while_its_session_is_up_and_none_behind_its_goodbye(
    redis: RedisServer,
) -> None:
    async def scenario() -> None:
        mixed, handler = entry(), Deciding()
        mixed.role = pb.ROLE_MIXED
        async with TcpProxy(redis.port) as proxy, running_router(redis.url, handler) as router:
            async with running_node(f"redis://{proxy.address}/0", mixed, WITHIN_S):
                await until(lambda: router.happened == LISTED, WITHIN_S)
                proxy.black_hole()
                await until(lambda: router.happened == [*LISTED, ("missed", NODE)], WITHIN_S)
                assert handler.is_ready
                proxy.heal()
                proxy.cut()
                await until(lambda: router.happened[2:] == LISTED, WITHIN_S)
                assert handler.is_ready
            await until(lambda: router.happened[3:] == [("unlisted", NODE)], WITHIN_S)
            assert not handler.is_ready

    asyncio.run(scenario())


@pytest.mark.covers("R13")
def test_a_node_that_goes_silent_is_gone_and_back_when_it_returns(redis: RedisServer) -> None:
    async def scenario() -> None:
        async with (
            TcpProxy(redis.port) as proxy,
            running_router(redis.url) as router,
            running_node(f"redis://{proxy.address}/0", entry()),
        ):
            await until(lambda: router.happened == LISTED, WITHIN_S)
            proxy.black_hole()
            await until(
                lambda: len(router.happened) == 2, WITHIN_S
            )  # within 2 s: test_polled_listing.py has the exact figure
            assert router.happened[1] == ("missed", NODE)
            proxy.heal()
            proxy.cut()
            await until(lambda: len(router.happened) == 3, WITHIN_S)
            assert router.happened[2] == ("listed", NODE)

    asyncio.run(scenario())


@pytest.mark.covers("C06", "R13")
def test_of_two_processes_under_one_name_the_newer_stays_and_the_older_is_told(redis: RedisServer) -> None:
    """Both go on repeating themselves."""
    older, newer = entry(incarnation=1), entry(incarnation=2)
    older.started_ms, newer.started_ms = 1_000, 2_000
    told: list[str] = []

    async def scenario() -> None:
        async with running_router(redis.url) as router:
            client = RegistryClient([RedisStore(redis.url, NAMESPACE, TTL_S)], lambda: older, told.append)
            client.start()
            await until(lambda: router.happened == LISTED, WITHIN_S)
            async with running_node(redis.url, newer):
                await until(lambda: bool(told), WITHIN_S)
                assert told == ["node.incarnation 0000000000000001 of decode-0 was replaced or deregistered."]
                await client.deregister()
                await looks(redis, 8)
                assert router.happened == [*LISTED, ("unlisted", NODE), ("listed", Peer("decode-0", 2))]

    asyncio.run(scenario())


async def _dies(redis: RedisServer, router: Router, seconds: float) -> None:
    redis.kill()
    await asyncio.sleep(seconds)  # the outage itself: nothing happens in it that could be waited for


async def _hangs(redis: RedisServer, router: Router, seconds: float) -> None:
    before = router.counts["failed_reads"]
    redis.freeze()
    await until(lambda: router.counts["failed_reads"] >= before + 3, WITHIN_S)  # each took its whole timeout


async def _is_full(redis: RedisServer, router: Router, seconds: float) -> None:
    """Routers can still read, and would see everybody fall silent."""
    redis.client.config_set("maxmemory", 1)
    await until(lambda: router.counts["failed_reads"] >= 6, WITHIN_S)


async def _is_a_lone_primary(redis: RedisServer, router: Router, seconds: float) -> None:
    """Set to take no write without a replica."""
    redis.client.config_set("min-replicas-to-write", 1)
    await until(lambda: router.counts["failed_reads"] >= 6, WITHIN_S)


async def _is_emptied(redis: RedisServer, router: Router, seconds: float) -> None:
    redis.client.flushall()
    redis.client.script_flush()
    assert not is_written(redis)


Fault = Callable[[RedisServer, Router, float], Awaitable[None]]


async def outage(folder: Path, fault: Fault, mend: Callable[[RedisServer], object], seconds: float = 0.0) -> None:
    """A cluster lives through it, with a node that starts meanwhile."""
    with started_redis(folder) as redis:
        async with running_router(redis.url) as router, running_node(redis.url, entry()):
            await until(lambda: router.happened == LISTED, WITHIN_S)
            await fault(redis, router, seconds)
            assert router.happened == LISTED
            async with running_node(redis.url, entry("decode-1", port=6001)):
                mend(redis)
                await until(partial(is_written, redis), WITHIN_S)
                await until(lambda: ("listed", NEWCOMER) in router.happened, WITHIN_S)
                await looks(redis, 14)  # 3.5 s: beyond every term
                assert router.happened == [*LISTED, ("listed", NEWCOMER)]


@pytest.mark.covers("C08", "R13")
def test_a_redis_that_dies_hangs_forgets_or_takes_no_writes_unlists_nobody_and_takes_newcomers_once_it_is_back(
    tmp_path: Path,
) -> None:
    """Every outage in a Redis of its own, side by side."""

    async def scenario() -> None:
        faults: list[tuple[Fault, Callable[[RedisServer], object], float]] = [
            (_dies, RedisServer.start, 0.0),
            (_dies, RedisServer.start, 0.4),
            (_dies, RedisServer.start, 2.5),
            (_hangs, RedisServer.thaw, 0.0),
            (_is_full, lambda redis: redis.client.config_set("maxmemory", 0), 0.0),
            (_is_a_lone_primary, lambda redis: redis.client.config_set("min-replicas-to-write", 0), 0.0),
            (_is_emptied, lambda redis: None, 0.0),
        ]
        async with asyncio.TaskGroup() as tasks:
            for i, fault in enumerate(faults):
                folder = tmp_path / str(i)
                folder.mkdir()
                tasks.create_task(outage(folder, *fault), name=f"{fault[0].__name__} {fault[2]}")

    asyncio.run(scenario())


@pytest.mark.covers("X05", "R13")
def test_garbage_is_left_out_and_counted_and_a_key_of_another_type_is_put_right(
    redis: RedisServer, fresh_seed: int
) -> None:
    """Written by somebody else, again and again, beside a node that lives."""
    rng = random.Random(fresh_seed)

    def scatter() -> None:
        now_ms = int(redis.client.time()[0]) * 1000 + 900
        for i in range(20):
            name = rng.choice((rng.randbytes(rng.randrange(8)), b"x" * 5000, b"decode-9", str(i).encode()))
            redis.client.hset(ENTRIES, name, rng.choice((rng.randbytes(50), b"", bytes(1 << 20), b"1 1 a:1\n\x0a\xff")))
            redis.client.hset(ADDRESSES, b"127.0.0.1:%d" % rng.randrange(5000, 5003), name)
            redis.client.zadd(SEEN, {name: now_ms - rng.randrange(1000)})
            redis.client.zadd(GONE, {rng.randbytes(rng.randrange(30)): now_ms, b"y" * 5000: now_ms})
            redis.client.zadd(GONE, {b"0000000000000001 nobody": float("inf"), b"1 decode-0": now_ms})

    async def scenario() -> None:
        async with running_router(redis.url) as router, running_node(redis.url, entry()):
            await until(lambda: router.happened == LISTED, WITHIN_S)

            def has_skipped(more_than: int) -> bool:
                return router.counts["skipped_values"] > more_than

            for _ in range(4):
                scatter()
                await until(partial(has_skipped, router.counts["skipped_values"]), WITHIN_S)
            for key, others in {ENTRIES: "set", SEEN: "lpush", ADDRESSES: "sadd", GONE: "set"}.items():
                redis.client.delete(key)
                getattr(redis.client, others)(key, b"something else")
            await until(lambda: redis.client.type(SEEN) == b"zset" and is_written(redis), WITHIN_S)
            await looks(redis, 8)
            assert router.happened == LISTED
            assert router.reader.snapshot() == {"nodes": {"decode-0": "127.0.0.1:5001"}}

    asyncio.run(scenario())


@pytest.mark.covers("X05", "R13")
def test_an_entry_that_no_node_of_ours_would_write_is_refused_and_logged_once(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    bad = entry("decode-1", port=6001, num_blocks=0)

    async def scenario() -> None:
        # A long ttl: an entry that this process, held up, does not repeat in time would go and come again.
        async with running_router(redis.url, ttl_s=WITHIN_S) as router, running_node(redis.url, entry()):
            for _ in range(4):
                redis.client.hset(ENTRIES, "decode-1", encode_record(bad))
                redis.client.zadd(SEEN, {"decode-1": int(redis.client.time()[0]) * 1000})
                await looks(redis, 2)
            assert router.happened == LISTED

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    (line,) = [record.getMessage() for record in caplog.records if "registration_refused" in record.getMessage()]
    assert "decode-1" in line and "num_blocks is 0" in line


@pytest.mark.covers("X05")
def test_a_server_that_does_not_speak_redis_is_a_registry_that_is_down(fresh_seed: int) -> None:
    rng = random.Random(fresh_seed)
    unhashable = b"%1\r\n*1\r\n+a\r\n+b\r\n"  # a key of a map that no dictionary takes
    openings = (
        b"*4\r\n",
        b"$5\r\n",
        b"$-5\r\n",
        b"*-1\r\n",
        b":x\r\n",
        b"+OK\r\n",
        b"-ERR\r\n",
        b"$99999999999\r\n",
        b"",
        b"*1\r\n" * 2000,
    )

    is_first = True

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal is_first
        try:
            while await reader.read(1 << 16):
                if is_first:
                    is_first = False
                    writer.write(unhashable)
                    continue
                writer.write(rng.choice(openings) + rng.randbytes(rng.randrange(60)) + rng.choice((b"", b"\r\n")))
        finally:  # who is still read at the end of the test is cancelled
            writer.transport.abort()

    async def scenario() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
        async with server, running_router(url) as router, running_node(url, entry()):
            await until(lambda: router.counts["failed_reads"] >= 10, WITHIN_S)
            assert router.happened == []

    asyncio.run(scenario())
