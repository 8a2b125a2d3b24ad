"""gRPC's two services on real sockets against bytes that no process of ours would send: each call ends, the next one is served."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc
import grpc.aio
import pytest
from google.protobuf.message import DecodeError, Message

from node import events as ev
from proto import baton_pb2 as pb
from proto import baton_pb2_grpc as pb_grpc
from runtime.registry_server import RegistryServer
from runtime.session import Peer
from runtime.session_driver import CHANNEL_OPTIONS
from tests.node.grpc_node import INCARNATION, ROUTER, GrpcNode, serve_node
from tests.security.messages import random_message

EXAMPLES: Final = int(os.environ.get("FUZZ_EXAMPLES", "60"))
_CALL_S: Final = 10.0
UNARY: Final[dict[str, type[Message]]] = {
    "Reserve": pb.ReserveRequest,
    "Renew": pb.RenewRequest,
    "Release": pb.ReleaseRequest,
}
AT_THE_REGISTRY: Final[dict[str, type[Message]]] = {
    "Register": pb.NodeEntry,
    "Deregister": pb.PeerId,
    "List": pb.ListRequest,
}


class Hears:
    """A registry's handler."""

    def on_listed(self, entry: pb.NodeEntry) -> None: ...

    def on_missed(self, node: Peer) -> None: ...

    def on_unlisted(self, node: Peer) -> None: ...


def hostile(kind: type[Message], chance: random.Random) -> bytes:
    """Bytes of a message, nearly right, damaged, or nothing of the kind."""
    content = bytearray(random_message(kind, chance, chance.choice((0.0, 0.9, 1.0))).SerializeToString())
    way = chance.randrange(4)
    if way == 0 and content:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    elif way == 1:
        return chance.randbytes(chance.choice((1, 30, 3000)))
    elif way == 2:
        return bytes(content[: len(content) // 2])
    return bytes(content)


def allowed(kind: type[Message], data: bytes) -> set[grpc.StatusCode]:
    """How such a call may end: UNKNOWN is what gRPC answers by itself to what does not parse, and what a bug would look like."""
    try:
        kind.FromString(data)
    except DecodeError:
        return {grpc.StatusCode.UNKNOWN}
    return {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}


async def send(channel: grpc.aio.Channel, path: str, data: bytes) -> grpc.StatusCode:
    """How a call with these bytes ends."""
    try:
        call: Any = channel.unary_unary(path)  # of bytes: nothing is serialized
        await call(data, timeout=_CALL_S)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def answer(node: GrpcNode, event: ev.Event) -> None:
    """As a core would that has nothing."""
    if isinstance(event, ev.ReserveAsked):
        node.calls.answer_reserve(event.call_id, pb.ReserveReply(error=pb.PDError(code=pb.BUSY)))
    elif isinstance(event, ev.RenewAsked):
        node.calls.answer_renew(event.call_id, pb.RenewReply())


@pytest.mark.covers("X05", "H13")
def test_calls_of_any_bytes_end_and_a_node_goes_on() -> None:
    chance = random.Random(5)

    async def run() -> None:
        async with (
            serve_node(pb.ROLE_DECODE, answer) as node,
            grpc.aio.insecure_channel(node.address, options=CHANNEL_OPTIONS) as channel,
        ):
            for name, kind in UNARY.items():
                for _ in range(EXAMPLES):
                    data = hostile(kind, chance)
                    assert await send(channel, f"/baton.Node/{name}", data) in allowed(kind, data)
                huge = await send(channel, f"/baton.Node/{name}", bytes(32 << 20))
                assert huge is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await send(channel, "/baton.Node/Nothing", b"") is grpc.StatusCode.UNIMPLEMENTED
            good = pb.RenewRequest(to_incarnation=INCARNATION, secret=bytes(16))
            good.key.request_id = "r"
            assert isinstance(await pb_grpc.NodeStub(channel).Renew(good, timeout=_CALL_S), pb.RenewReply)
            assert node.routers.sessions.knows(ROUTER), "the honest router's session stands"

    asyncio.run(run())


@pytest.mark.covers("X05", "H13")
def test_streams_of_any_bytes_end_and_the_honest_routers_stands() -> None:
    chance = random.Random(6)

    async def frames(is_known: bool) -> AsyncIterator[bytes]:
        if is_known:
            peer = pb.PeerId(name="stranger", incarnation=1 + chance.randrange(9))
            hello = pb.Hello(peer=peer, to_incarnation=INCARNATION, session_id=1 + chance.randrange(99), protocol=1)
            yield pb.Frame(hello=hello).SerializeToString()
        for _ in range(chance.randrange(1, 6)):
            yield hostile(pb.Frame, chance)

    async def run() -> None:
        async with (
            serve_node(pb.ROLE_DECODE, answer) as node,
            grpc.aio.insecure_channel(node.address, options=CHANNEL_OPTIONS) as channel,
        ):
            for number in range(EXAMPLES):
                open_stream: Any = channel.stream_stream("/baton.Node/Session")
                try:
                    async for _ in open_stream(frames(number % 2 == 0), timeout=_CALL_S):
                        pass
                except grpc.aio.AioRpcError as error:
                    assert error.code() is not grpc.StatusCode.UNKNOWN, "a bug ended it"
            assert node.routers.sessions.knows(ROUTER)

    asyncio.run(run())


@pytest.mark.covers("X05", "R13")
def test_registrations_of_any_bytes_are_refused_and_the_registry_goes_on() -> None:
    chance = random.Random(7)

    async def run() -> None:
        server, registry = grpc.aio.server(), RegistryServer(Hears())
        pb_grpc.add_RegistryServicer_to_server(registry, server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            async with grpc.aio.insecure_channel(address) as channel:
                for name, kind in AT_THE_REGISTRY.items():
                    for _ in range(EXAMPLES):
                        data = hostile(kind, chance)
                        assert await send(channel, f"/baton.Registry/{name}", data) in allowed(kind, data)
                assert await pb_grpc.RegistryStub(channel).List(pb.ListRequest(), timeout=_CALL_S) is not None
        finally:
            registry.close()
            await server.stop(0)

    asyncio.run(run())
