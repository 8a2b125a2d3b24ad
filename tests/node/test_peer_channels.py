"""What is left of nodes that have gone, at those who called them: nothing that works, and nothing that adds up."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Callable, Coroutine
from contextlib import closing

import pytest

from node import events as ev
from node import handoff_client
from node.handoff_client import HandoffClient
from proto import baton_pb2 as pb
from proto.attempt_key import attempt_key
from tests.node.grpc_node import INCARNATION
from tests.node.test_validate import good_reserve

_LATER_S = 2.0  # gRPC connects some four times a second


def with_client(test: Callable[[HandoffClient], Coroutine[None, None, None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            client = HandoffClient(lambda _answer: None, tasks.create_task)
            try:
                await test(client)
            finally:
                await client.close()

    asyncio.run(run())


async def all_answered(client: HandoffClient) -> None:
    while client.num_under_way:  # noqa: ASYNC110 - it has no hook for it
        await asyncio.sleep(0.01)


def release(address: str) -> ev.SendRelease:
    request = pb.ReleaseRequest(key=good_reserve().key, to_incarnation=INCARNATION, ms_left=60_000)
    return ev.SendRelease(address, request)


def test_who_has_gone_is_not_connected_to_once_the_last_call_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """For half an hour gRPC went on, four times a second for each node that was ever there."""
    monkeypatch.setattr(handoff_client, "RELEASE_TRIES", 2)

    async def test(client: HandoffClient) -> None:
        num_connections = 0

        def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal num_connections
            num_connections += 1
            writer.transport.abort()

        async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            client.release(release(f"{host}:{port}"))
            await all_answered(client)
            await asyncio.sleep(0.1)  # for what is under way
            assert (before := num_connections) > 0
            await asyncio.sleep(_LATER_S)
            assert num_connections == before

    with_client(test)


def test_nothing_is_kept_of_connections_that_did_not_come_about_in_time() -> None:
    """What was cancelled while it waited for a channel gRPC kept for ever."""

    def num_kept() -> int:
        gc.collect()
        return sum(type(each).__name__ == "CallbackWrapper" for each in gc.get_objects())

    async def test(client: HandoffClient) -> None:
        with closing(socket.create_server(("127.0.0.1", 0))) as listener:
            dead_address = f"127.0.0.1:{listener.getsockname()[1]}"
        before = num_kept()
        for _ in range(10):
            for _ in range(4):  # of which the first to give up takes the connection from no other
                client.reserve(ev.SendReserve(attempt_key(good_reserve().key), dead_address, good_reserve(), 0.1))
            await all_answered(client)
        await asyncio.sleep(0.1)
        assert num_kept() <= before + 4

    with_client(test)
