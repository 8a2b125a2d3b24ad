"""Both ends of the embedded registry over real gRPC on 127.0.0.1."""

from __future__ import annotations

import asyncio
import operator
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import grpc.aio
import pytest

from deploy.finding import FindingConfig, list_nodes
from proto import baton_pb2 as pb
from proto.baton_pb2_grpc import RegistryStub, add_RegistryServicer_to_server
from runtime import registry_client
from runtime.credentials import NO_CREDENTIALS
from runtime.registry_client import EmbeddedRegistry, RegistryClient, RegistryUnreachable
from runtime.registry_server import TTL_S, RegistryServer
from runtime.session import Peer
from tests.registry.test_listing import draining, entry
from tests.session.ends import until
from tests.session.tcp_proxy import TcpProxy

NODE = Peer("decode-0", 1)
PATIENT_S = 60.0  # a ttl, and a call's timeout, for what is not about them: this process may be held up for seconds


@dataclass
class Recorder:
    happened: list[tuple[str, Peer]] = field(default_factory=list)

    def on_listed(self, entry: pb.NodeEntry) -> None:
        self.happened.append(("listed", Peer(entry.node.name, entry.node.incarnation)))

    def on_missed(self, node: Peer) -> None:
        self.happened.append(("missed", node))

    def on_unlisted(self, node: Peer) -> None:
        self.happened.append(("unlisted", node))


@dataclass
class RunningRegistry:
    port: int
    handler: Recorder
    registry: RegistryServer

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


@asynccontextmanager
async def running_registry(port: int = 0, ttl_s: float = PATIENT_S) -> AsyncIterator[RunningRegistry]:
    handler = Recorder()
    registry = RegistryServer(handler, ttl_s)
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    add_RegistryServicer_to_server(registry, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield RunningRegistry(port, handler, registry)
    finally:
        registry.close()
        await server.stop(None)


def never(sentence: str) -> None:
    raise AssertionError(sentence)


@pytest.fixture
def patient_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_client, "_CALL_TIMEOUT_S", PATIENT_S)


@pytest.mark.covers("R13")
@pytest.mark.usefixtures("patient_calls")
def test_a_node_is_listed_stays_so_and_is_gone_at_once_when_it_deregisters() -> None:
    """Unless this process is held up: the time by which it is late may be all that the ttl leaves."""

    async def scenario() -> None:
        async with running_registry(ttl_s=TTL_S) as running:
            num_asked = 0

            def current() -> pb.NodeEntry:
                nonlocal num_asked
                num_asked += 1
                return entry()

            client = RegistryClient([EmbeddedRegistry(running.address)], current, never)
            client.start()
            began = time.monotonic()
            ran_s = await until(lambda: num_asked >= 5)  # 2 s: longer than the ttl
            ran_s += await until(lambda: running.handler.happened[-1:] == [("listed", NODE)])
            assert running.registry.snapshot() == {"nodes": {"decode-0": "127.0.0.1:5001"}}
            goodbye = asyncio.create_task(client.deregister())
            ran_s += await until(goodbye.done)
            assert running.handler.happened[-1] == ("unlisted", NODE)
            was_held_up = time.monotonic() - began - ran_s > 0.5
            assert running.handler.happened == [("listed", NODE), ("unlisted", NODE)] or was_held_up

    asyncio.run(scenario())


@pytest.mark.covers("R13")
def test_a_node_that_goes_silent_is_gone_within_2_s_with_no_call_arriving_and_back_when_it_returns() -> None:
    async def scenario() -> None:
        async with running_registry(ttl_s=TTL_S) as running, TcpProxy(running.port) as proxy:
            client = RegistryClient([EmbeddedRegistry(proxy.address)], entry, never)
            client.start()
            await until(lambda: running.handler.happened[-1:] == [("listed", NODE)])
            proxy.black_hole()
            took_s = await until(lambda: running.handler.happened[-1] == ("missed", NODE))
            assert took_s < 4.0, "of which a busy machine gets half"
            proxy.heal()
            proxy.cut()  # what a partition swallowed is not waited for
            assert await until(lambda: running.handler.happened[-1] == ("listed", NODE)) < 3.0
            await client.deregister()

    asyncio.run(scenario())


@pytest.mark.covers("R13")
def test_a_router_that_starts_late_or_again_finds_the_node() -> None:
    async def scenario() -> None:
        async with running_registry() as first:
            port = first.port
        client = RegistryClient([EmbeddedRegistry(f"127.0.0.1:{port}")], entry, never)
        client.start()
        for _ in range(2):
            async with running_registry(port) as running:
                await until(partial(operator.contains, running.handler.happened, ("listed", NODE)))
                assert running.handler.happened == [("listed", NODE)]
        await client.deregister()  # nobody is there: bounded, and no error

    asyncio.run(scenario())


@pytest.mark.covers("R13")
def test_a_node_registers_at_every_router_beside_one_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_client, "_CALL_TIMEOUT_S", PATIENT_S)

    async def scenario() -> None:
        async with running_registry() as one, running_registry() as two, TcpProxy(one.port) as hole:
            hole.black_hole()
            client = RegistryClient(
                [EmbeddedRegistry(hole.address), EmbeddedRegistry(one.address), EmbeddedRegistry(two.address)],
                entry,
                never,
            )
            client.start()
            await until(lambda: bool(one.handler.happened and two.handler.happened))
            goodbye, told = asyncio.create_task(client.deregister()), [("listed", NODE), ("unlisted", NODE)]
            await until(lambda: one.handler.happened == two.handler.happened == told)
            hole.cut()
            await goodbye
            monkeypatch.undo()
            lonely = RegistryClient([EmbeddedRegistry(hole.address)], entry, never)
            async with asyncio.timeout(60):  # each is bounded by its call's own timeout
                await lonely.announce()
                await lonely.deregister()

    asyncio.run(scenario())


@pytest.mark.covers("R13")
def test_a_refused_node_hears_the_sentence_once() -> None:
    async def scenario() -> None:
        async with running_registry() as one, running_registry() as two:
            heard: list[str] = []
            bad = entry(num_blocks=0)
            client = RegistryClient(
                [EmbeddedRegistry(one.address), EmbeddedRegistry(two.address)], lambda: bad, heard.append
            )
            client.start()
            await until(lambda: bool(heard))
            await client.deregister()
            assert heard == ["num_blocks is 0, it must be at least 1."]
            assert one.handler.happened == two.handler.happened == []

    asyncio.run(scenario())


@pytest.mark.covers("R13")
def test_who_follows_a_dead_process_after_a_clock_was_set_back_is_listed_once_that_is_missed() -> None:
    async def scenario() -> None:
        async with running_registry(ttl_s=0.5) as running:
            dead, follower = entry(incarnation=1), entry(incarnation=2)
            dead.started_ms, follower.started_ms = 7_200_000, 3_600_000
            assert await EmbeddedRegistry(running.address).register(dead) == ""
            client = RegistryClient([EmbeddedRegistry(running.address)], lambda: follower, never)
            client.start()
            await until(lambda: ("listed", Peer(NODE.name, 2)) in running.handler.happened)
            assert ("missed", NODE) in running.handler.happened
            await client.deregister()

    asyncio.run(scenario())


@pytest.mark.covers("R13")
def test_who_is_older_than_a_living_process_of_its_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_client, "OLDER_PATIENCE_S", 0.7)

    async def scenario() -> None:
        async with running_registry() as running:
            living, older = entry(incarnation=1), entry(incarnation=2)
            living.started_ms, older.started_ms = 7_200_000, 3_600_000
            assert await EmbeddedRegistry(running.address).register(living) == ""
            told: list[str] = []
            client = RegistryClient([EmbeddedRegistry(running.address)], lambda: older, told.append)
            client.start()
            await until(lambda: bool(told))
            assert "started before the one that is listed" in told[0]
            await client.deregister()

    asyncio.run(scenario())


@pytest.mark.covers("D08")
@pytest.mark.usefixtures("patient_calls")
def test_a_changed_entry_is_announced_at_once_whichever_router_is_down_and_everybody_can_read_the_list() -> None:
    async def scenario() -> None:
        current = entry()
        async with running_registry() as one, running_registry() as two, TcpProxy(one.port) as hole:
            hole.black_hole()
            registries = [EmbeddedRegistry(each.address) for each in (hole, one, two)]
            client = RegistryClient(registries, lambda: current, never)
            client.start()
            await until(lambda: len(one.handler.happened) == len(two.handler.happened) == 1)
            current = draining(entry())
            announcement = asyncio.create_task(client.announce())  # until it is over nothing is repeated
            await until(lambda: one.handler.happened == two.handler.happened == [("listed", NODE)] * 2)
            assert not announcement.done(), "the third has not answered"
            hole.cut()
            await announcement
            async with grpc.aio.insecure_channel(one.address) as channel:
                assert list((await RegistryStub(channel).List(pb.ListRequest())).nodes) == [draining(entry())]
            goodbye = asyncio.create_task(client.deregister())
            await until(lambda: two.handler.happened[-1] == ("unlisted", NODE))
            async with grpc.aio.insecure_channel(two.address) as channel:
                assert not (await RegistryStub(channel).List(pb.ListRequest())).nodes
            hole.cut()
            await goodbye

    asyncio.run(scenario())


@pytest.mark.covers("R13", "C06")
def test_the_same_address_with_a_new_incarnation_is_unlisted_and_listed() -> None:
    async def scenario() -> None:
        async with running_registry(ttl_s=TTL_S) as running, grpc.aio.insecure_channel(running.address) as channel:
            stub = RegistryStub(channel)
            reply = await stub.Register(entry())
            assert (reply.ttl_ms, reply.refused) == (1500, "")
            await stub.Register(entry(incarnation=2))
            restarted = Peer("decode-0", 2)
            assert running.handler.happened == [("listed", NODE), ("unlisted", NODE), ("listed", restarted)]

    asyncio.run(scenario())


@pytest.mark.covers("R13", "C06")
def test_a_registry_whose_answer_does_not_parse_is_one_that_is_not_there() -> None:
    async def answer(request: bytes, context: object) -> bytes:
        return b"\x08"

    async def scenario() -> None:
        server = grpc.aio.server()
        method: Any = grpc.unary_unary_rpc_method_handler(answer)
        methods = dict.fromkeys(("Register", "List"), method)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("baton.Registry", methods),))
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            registry = EmbeddedRegistry(address)
            with pytest.raises(RegistryUnreachable, match="does not parse"):
                await registry.register(entry())
            await registry.hang_up()
            with pytest.raises(ValueError, match=f"--router {address}: the reply does not parse"):
                await list_nodes(FindingConfig(node="decode-0", router=(address,)), NO_CREDENTIALS)
        finally:
            await server.stop(None)

    asyncio.run(scenario())
