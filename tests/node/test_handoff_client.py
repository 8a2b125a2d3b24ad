"""Control calls to other nodes: each with its own time limit, none in another's way."""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import TypeVar

import grpc.aio
import pytest

from node import events as ev
from node import handoff_client
from node.handoff_client import HandoffClient
from proto import baton_pb2 as pb
from proto import baton_pb2_grpc as pb_grpc
from proto.attempt_key import AttemptKey, attempt_key
from runtime.credentials import Credentials
from tests.node.grpc_node import INCARNATION, GrpcNode, serve_node
from tests.node.test_validate import good_reserve
from tests.security.strangers import make_certificates
from tests.session.tcp_proxy import TcpProxy

T = TypeVar("T")
KEY = attempt_key(good_reserve().key)


class Outcomes:
    """What the client posted, to be waited for."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[ev.ReserveAnswered | ev.RenewAnswered] = asyncio.Queue()
        self.post = self._queue.put_nowait
        self.next = self._queue.get


def with_client(test: Callable[[HandoffClient, Outcomes], Coroutine[None, None, T]]) -> T:
    async def run() -> T:
        async with asyncio.timeout(100), asyncio.TaskGroup() as tasks:
            outcomes = Outcomes()
            client = HandoffClient(outcomes.post, tasks.create_task)
            try:
                return await test(client, outcomes)
            finally:
                await client.close()

    return asyncio.run(run())


def reserve(address: str, timeout_s: float, key: AttemptKey = KEY) -> ev.SendReserve:
    request = good_reserve()
    request.to_incarnation = INCARNATION
    return ev.SendReserve(key, address, request, timeout_s)


def grant(node: GrpcNode, event: ev.Event) -> None:
    if isinstance(event, ev.ReserveAsked):
        node.calls.answer_reserve(event.call_id, pb.ReserveReply(lease=pb.Lease(lease_id=4)))
    elif isinstance(event, ev.RenewAsked):
        node.calls.answer_renew(event.call_id, pb.RenewReply(life_ms=9))


def test_the_answers_of_reserve_and_renew_become_events() -> None:
    async def test(client: HandoffClient, outcomes: Outcomes) -> None:
        async with serve_node(pb.ROLE_DECODE, grant) as node:
            client.reserve(reserve(node.address, 60))
            assert await outcomes.next() == ev.ReserveAnswered(KEY, pb.ReserveReply(lease=pb.Lease(lease_id=4)))
            request = pb.RenewRequest(key=good_reserve().key, to_incarnation=INCARNATION, secret=bytes(16))
            client.renew(ev.SendRenew(KEY, node.address, request, 60))
            assert await outcomes.next() == ev.RenewAnswered(KEY, pb.RenewReply(life_ms=9))

    with_client(test)


@pytest.mark.covers("P04")
def test_a_silent_and_a_dead_peer_delay_nobody_else_and_end_within_their_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handoff_client, "CONNECT_TIMEOUT_S", 60.0)

    async def test(client: HandoffClient, outcomes: Outcomes) -> None:
        with closing(socket.create_server(("127.0.0.1", 0))) as listener:
            dead_address = f"127.0.0.1:{listener.getsockname()[1]}"
        async with serve_node(pb.ROLE_DECODE) as silent_node, serve_node(pb.ROLE_DECODE, grant) as node:
            silent, dead, alive = (AttemptKey(name, 0, 0) for name in ("silent", "dead", "alive"))
            client.reserve(reserve(silent_node.address, 3.0, silent))
            client.reserve(
                reserve(dead_address, 1.0, dead)
            )  # a port that refuses may be a node that restarts: it has its time
            client.reserve(reserve(node.address, 60.0, alive))
            first = await outcomes.next()
            assert first.key == alive and first.reply is not None  # although the others were asked first
            assert await outcomes.next() == ev.ReserveAnswered(dead, None)
            assert await outcomes.next() == ev.ReserveAnswered(silent, None)
            assert len(silent_node.events) == 1

    with_client(test)


def test_a_host_that_is_named_like_one_of_grpcs_schemes_holds_up_nobody() -> None:
    """An address of `ipv4:…` that gRPC could not read kept the loop for good once it was waited for."""

    async def test(client: HandoffClient, outcomes: Outcomes) -> None:
        async with serve_node(pb.ROLE_DECODE, grant) as node:
            client.reserve(reserve("ipv4:1", 0.2, nowhere := AttemptKey("nowhere", 0, 0)))
            client.reserve(reserve(node.address, 60.0, alive := AttemptKey("alive", 0, 0)))
            answers = [await outcomes.next(), await outcomes.next()]
            assert {each.key: each.reply is not None for each in answers} == {alive: True, nowhere: False}

    with_client(test)


@pytest.mark.covers("C04", "P04")
def test_a_peer_that_is_cut_off_is_found_within_seconds_and_one_that_lets_a_reserve_wait_is_not() -> None:
    """Cut off before the first call connects, or while a call waits. Each call may take a minute."""

    async def test(client: HandoffClient, outcomes: Outcomes) -> None:
        def grant_late(node: GrpcNode, event: ev.Event) -> None:
            # By then a server that had not been told of the client's pings would have closed the connection for too many of them.
            asyncio.get_running_loop().call_later(7.0, grant, node, event)

        async with (
            serve_node(pb.ROLE_DECODE) as silent_node,
            serve_node(pb.ROLE_DECODE, grant_late) as slow_node,
            TcpProxy(int(silent_node.address.rpartition(":")[2])) as before,
            TcpProxy(int(silent_node.address.rpartition(":")[2])) as meanwhile,
        ):
            before.black_hole()
            cut_before, cut, slow = (AttemptKey(name, 0, 0) for name in ("before", "meanwhile", "slow"))
            client.reserve(reserve(before.address, 60.0, cut_before))
            client.reserve(reserve(meanwhile.address, 60.0, cut))
            client.reserve(reserve(slow_node.address, 60.0, slow))
            while not silent_node.events:  # noqa: ASYNC110 - the node has no hook for it
                await asyncio.sleep(0.01)
            meanwhile.black_hole()
            async with asyncio.timeout(
                30
            ):  # half of what the calls may take, and what gRPC takes if it is told of no ping's end
                replies = {each.key: each.reply for each in [await outcomes.next() for _ in range(3)]}
            assert replies[cut_before] is None and replies[cut] is None
            assert replies[slow] is not None

    with_client(test)


def test_a_release_is_sent_again_until_it_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff_client, "RELEASE_TRIES", 9)  # 13 s: however long the node takes to start

    async def test(client: HandoffClient, _outcomes: Outcomes) -> None:
        arrived = asyncio.Event()
        with closing(socket.socket()) as keeper:  # of the port, which nobody else is to take; it does not listen
            keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            keeper.bind(("127.0.0.1", 0))
            with closing(socket.create_server(keeper.getsockname(), reuse_port=True)) as listener:
                address = f"127.0.0.1:{listener.getsockname()[1]}"  # connects, then says nothing: the first try fails
                request = pb.ReleaseRequest(key=good_reserve().key, to_incarnation=INCARNATION, ms_left=60_000)
                client.release(ev.SendRelease(address, request))
                loop = asyncio.get_running_loop()
                listener.setblocking(False)
                connection, _ = await loop.sock_accept(listener)
                connection.close()
            async with serve_node(pb.ROLE_DECODE, lambda _node, _event: arrived.set(), address) as node:
                await arrived.wait()
                event = node.events[0]  # again where the acknowledgement came too late
                assert isinstance(event, ev.ReleaseAsked)
                assert 0 < event.request.ms_left < 60_000  # time has passed since the first try
                assert request.ms_left == 60_000

    with_client(test)


def test_closing_cancels_what_is_under_way() -> None:
    async def test(client: HandoffClient, _outcomes: Outcomes) -> None:
        async with serve_node(pb.ROLE_DECODE) as silent_node:
            client.reserve(reserve(silent_node.address, 3600.0))
            await client.close()

    with_client(test)


def test_a_call_whose_channel_makes_room_for_others_fails_and_takes_nobody_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handoff_client, "MAX_CHANNELS", 1)

    async def test(client: HandoffClient, outcomes: Outcomes) -> None:
        with closing(socket.create_server(("127.0.0.1", 0))) as mute:  # accepts, and never speaks
            client.reserve(reserve(f"127.0.0.1:{mute.getsockname()[1]}", 5.0))
            await asyncio.sleep(0.05)
            async with serve_node(pb.ROLE_DECODE, grant) as node:
                client.reserve(reserve(node.address, 5.0))
                answers = [await outcomes.next(), await outcomes.next()]
        assert sorted(answer.reply is None for answer in answers) == [False, True]

    with_client(test)


@pytest.mark.covers("X03")
def test_a_node_is_reached_again_with_the_certificates_of_the_day(tmp_path: Path) -> None:
    """What a channel shows is read when it is made: one that fails must not be kept for ever."""
    first, second = (make_certificates(tmp_path / name) for name in ("first", "second"))
    shutil.copytree(first, tmp_path / "tls")
    credentials = Credentials(tmp_path / "tls")

    @asynccontextmanager
    async def served(directory: Path, address: str) -> AsyncIterator[str]:
        async with serve_node(pb.ROLE_DECODE, grant, "127.0.0.1:0") as node:
            front, host = grpc.aio.server(options=(("grpc.so_reuseport", 0),)), address.rpartition(":")[0]
            pb_grpc.add_NodeServicer_to_server(node.service, front)
            port = Credentials(directory).bind(front, address)
            await front.start()
            try:
                yield f"{host}:{port}"
            finally:
                await front.stop(None)

    async def run() -> None:
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            outcomes = Outcomes()
            client = HandoffClient(outcomes.post, tasks.create_task, credentials)

            async def granted(address: str) -> bool:
                client.reserve(reserve(address, 2.0))
                answer = await outcomes.next()
                return answer.reply is not None

            async with served(first, "127.0.0.1:0") as address:
                while not await granted(address):
                    pass
            for name in ("ca.crt", "tls.crt", "tls.key"):
                shutil.copy(second / name, tmp_path / "tls" / name)
            async with served(second, address):
                while not await granted(address):
                    pass
            await client.close()

    asyncio.run(run())
