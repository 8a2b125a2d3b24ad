"""A node's end is closed whatever its routers do, and in whatever state their sessions are."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import grpc.aio
import pytest

from proto import baton_pb2 as pb
from proto.baton_pb2_grpc import NodeStub
from runtime.session import PROTOCOL, Peer
from tests.session.ends import NODE, TIMING, RunningNode, connected, to_router, until


def peers(node: RunningNode) -> dict[str, Any]:
    return cast(dict[str, Any], node.sessions.snapshot()["peers"])


@pytest.mark.covers("R12", "D08")
def test_a_router_that_reads_nothing_does_not_hold_up_a_node_that_ends() -> None:
    async def scenario() -> None:
        async with (
            connected() as (node, _, _, _),
            grpc.aio.insecure_channel(f"127.0.0.1:{node.port}") as channel,
        ):
            stuck = Peer("stuck", 8)
            call = NodeStub(channel).Session()
            hello = pb.Hello(peer=stuck.to_proto(), to_incarnation=NODE.incarnation, session_id=4, protocol=PROTOCOL)
            await call.write(pb.Frame(hello=hello))
            await until(lambda: "stuck" in peers(node))
            for number in range(10):
                node.sessions.send(stuck, to_router(number, "x" * 1_000_000))
            await asyncio.sleep(0.3)
            assert peers(node)["stuck"]["sent"] != 10, "the stream is full"
            async with asyncio.timeout(60):
                await node.sessions.close()

    asyncio.run(scenario())


def test_a_session_whose_grace_ends_as_it_is_closed_is_closed_once() -> None:
    async def scenario() -> None:
        async with connected(TIMING) as (node, proxy, _, _):
            proxy.black_hole()
            grace_ends_at = peers(node)["router"]["heard_at"] + TIMING.grace_s
            await asyncio.sleep(grace_ends_at - time.monotonic() - 0.05)
            time.sleep(0.1)  # noqa: ASYNC251 - nothing else has a turn meanwhile, its alarm neither
            await node.sessions.close()
            assert peers(node) == {}

    asyncio.run(scenario())


@pytest.mark.covers("R12", "C11")
def test_a_stream_whose_hello_comes_behind_the_end_of_the_incarnation_opens_no_session() -> None:
    """As while a node changes its role: the process and its port stay, and nobody would do what the router asks there."""

    async def scenario() -> None:
        async with (
            connected() as (node, _, _, _),
            grpc.aio.insecure_channel(f"127.0.0.1:{node.port}") as channel,
        ):
            call = NodeStub(channel).Session(metadata=(("opened", "first"),))
            await call.wait_for_connection()
            await asyncio.sleep(0.3)
            await node.sessions.close()
            late = Peer("late", 8)
            hello = pb.Hello(peer=late.to_proto(), to_incarnation=NODE.incarnation, session_id=4, protocol=PROTOCOL)
            await call.write(pb.Frame(hello=hello))
            with pytest.raises(grpc.aio.AioRpcError, match="this incarnation of the node has ended") as ended:
                await call.read()
            assert ended.value.code() is grpc.StatusCode.ABORTED
            assert peers(node) == {}

    asyncio.run(scenario())
