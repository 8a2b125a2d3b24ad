"""Sessions over real streams that are cut, swallowed, refused, and attacked (rows R12, R14, C06, C10)."""

from __future__ import annotations

import asyncio
import logging
import operator
import random
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from proto import baton_pb2 as pb
from proto.baton_pb2_grpc import NodeStub
from runtime.session import PROTOCOL, Peer
from runtime.session_dialer import SessionDialer
from runtime.session_events import Loss
from tests.session.ends import (
    FOUND_S,
    NODE,
    PATIENT,
    ROUTER,
    TIMING,
    RouterRecorder,
    RunningNode,
    connected,
    running_node,
    running_router,
    to_node,
    to_router,
    until,
)
from tests.session.tcp_proxy import TcpProxy
from tests.stopping import resume, stop


def dict_of(value: object) -> dict[str, Any]:
    assert isinstance(value, dict)
    return value


def sent(dialer: SessionDialer, node: RunningNode) -> tuple[int, int]:
    """Highest numbers that the writers of either end took."""
    router_end, node_end = dict_of(dialer.snapshot()["peers"]), dict_of(node.sessions.snapshot()["peers"])
    return router_end["node"]["sent"], node_end["router"]["sent"]


@pytest.mark.covers("R12")
def test_frames_lost_with_their_stream_are_sent_again_and_delivered_once_in_order() -> None:
    async def scenario() -> None:
        async with connected() as (node, proxy, dialer, router):
            dialer.send(*NODE, to_node(0))
            node.send(0)
            await until(lambda: node.handler.got == [0] and router.got == [0])
            proxy.black_hole()
            for number in range(1, 50):
                dialer.send(*NODE, to_node(number))
                node.send(number)
            await until(lambda: sent(dialer, node) == (50, 50))
            assert (node.handler.got, router.got) == ([0], [0])
            proxy.cut()
            proxy.heal()
            took_s = await until(lambda: len(node.handler.got) >= 50 and len(router.got) >= 50)
            assert took_s < TIMING.grace_s
            dialer.send(*NODE, to_node(50))
            node.send(50)
            await until(lambda: len(node.handler.got) > 50 and len(router.got) > 50)
            assert node.handler.got == router.got == list(range(51))
            for snapshot in (dialer.snapshot(), node.sessions.snapshot()):
                assert snapshot["frames_resent"] in range(49, 51)  # the first one's acknowledgement may be lost, too
                assert snapshot["resumes"] == 1
            assert [what for what, _ in router.happened] == ["up", "broken", "up"]
            assert node.handler.lost == []

    asyncio.run(scenario())


@pytest.mark.covers("R12")
def test_many_cuts_under_traffic_lose_and_repeat_nothing() -> None:
    seed = random.SystemRandom().randrange(2**32)
    logging.getLogger(__name__).warning("seed=%d", seed)  # pytest shows it with a failure

    async def scenario() -> None:
        chance = random.Random(seed)
        async with connected() as (node, proxy, dialer, router):
            number = 0
            while proxy.num_cuts < 6:
                for _ in range(chance.randrange(1, 40)):
                    dialer.send(*NODE, to_node(number))
                    node.sessions.send(ROUTER, to_router(number, "x" * chance.randrange(5_000)))
                    number += 1
                await until(lambda: router.happened[-1][0] == "up")
                if chance.random() < 0.3:
                    proxy.cut()
                await asyncio.sleep(0)
            await until(lambda: len(node.handler.got) >= number and len(router.got) >= number)
            assert node.handler.got == router.got == list(range(number))
            assert dialer.snapshot()["resumes"] == proxy.num_cuts
            assert router.count("lost") == 0

    asyncio.run(scenario())


@pytest.mark.covers("R14", "C10")
def test_a_black_hole_is_found_within_2_s_by_both_ends_and_delays_nobody_else() -> None:
    async def scenario() -> None:
        async with connected(TIMING) as (node, proxy, dialer, router), running_node(Peer("other", 9), TIMING) as other:
            got = other.handler.got
            dialer.dial(other.entry())
            await until(lambda: router.count("up", other.peer) == 1)
            proxy.black_hole()
            loop = asyncio.get_running_loop()
            start, ran_s, slowest_s, number = loop.time(), 0.0, 0.0, 0
            while not (router.count("lost") and node.handler.lost):
                dialer.send(*other.peer, to_node(number))
                took_s = await until(partial(operator.contains, got, number))
                ran_s, slowest_s, number = ran_s + took_s, max(slowest_s, took_s), number + 1
                assert ran_s < 2 * FOUND_S
            assert loop.time() - start > 1.0, "by silence, not by a reset"
            assert node.handler.lost == [ROUTER]
            assert slowest_s < 1.0, "less than what finds the black hole"
            was_held_up = loop.time() - start - ran_s > 0.5  # then it was the other one that heard nothing of us
            assert router.count("broken", other.peer) == 0 or was_held_up
            proxy.heal()
            proxy.cut()
            await until(lambda: router.count("up") == 2)  # healed without a restart: a new session

    asyncio.run(scenario())


@pytest.mark.covers("R14")
def test_a_node_is_up_at_once_beside_many_that_never_answer() -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            node = await stack.enter_async_context(running_node())
            dialer, router = await stack.enter_async_context(running_router())
            proxies = [await stack.enter_async_context(TcpProxy(node.port)) for _ in range(20)]
            for number, proxy in enumerate(proxies):
                proxy.black_hole()
                dialer.dial(pb.NodeEntry(node=Peer(f"hole-{number}", 1).to_proto(), grpc_address=proxy.address))
            await until(lambda: all(proxy.num_connections for proxy in proxies))
            dialer.dial(node.entry())
            await until(
                lambda: router.count("up") == 1, PATIENT.dial_timeout_s / 2
            )  # none of them has been given up yet

    asyncio.run(scenario())


@pytest.mark.covers("R12")
def test_a_node_whose_port_refuses_is_lost_at_once() -> None:
    async def scenario() -> None:
        async with running_node() as node, running_router() as (dialer, router):
            dialer.dial(node.entry())
            await until(lambda: NODE in router.loads)
            assert router.loads[NODE].running == 3
            await node.server.stop(None)
            await until(lambda: router.count("lost") == 1, PATIENT.grace_s / 2)
            assert [what for what, _ in router.happened] == ["up", "broken", "lost"]
            assert router.losses == [Loss.DIED]

    asyncio.run(scenario())


@pytest.mark.covers("C06")
def test_a_restarted_node_at_the_same_address_gets_nothing_that_was_meant_for_the_old_one() -> None:
    async def scenario() -> None:
        async with connected() as (node, proxy, dialer, router), running_node(Peer("node", 6)) as restarted:
            proxy.black_hole()
            for number in range(10):
                dialer.send(*NODE, to_node(number))
            await until(lambda: sent(dialer, node)[0] == 10)
            proxy.target_port = restarted.port
            proxy.cut()
            proxy.heal()
            await until(lambda: router.count("lost") == 1, PATIENT.grace_s / 2)  # by the refusal, not by the grace
            assert router.losses == [Loss.DIED]
            assert router.count("up", restarted.peer) == 0
            dialer.dial(restarted.entry(proxy.address))
            dialer.send(*NODE, to_node(10))  # dropped: the old process is forgotten
            await until(lambda: router.count("up", restarted.peer) == 1)
            dialer.send(*restarted.peer, to_node(11))
            await until(lambda: bool(restarted.handler.got))
            assert restarted.handler.got == [11]
            assert router.count("lost") == 1
            assert dialer.snapshot()["frames_resent"] == 0

    asyncio.run(scenario())


@pytest.mark.covers("C06")
def test_dialing_another_incarnation_loses_the_session_with_the_old_one() -> None:
    async def scenario() -> None:
        async with connected() as (_, _, dialer, router):
            dialer.dial(pb.NodeEntry(node=Peer("node", 6).to_proto(), grpc_address="127.0.0.1:9"))
            assert router.happened[-1] == ("lost", NODE)

    asyncio.run(scenario())


@pytest.mark.covers("C10")
def test_a_node_whose_loop_hangs_is_found_within_2_s_and_taken_back_when_it_goes_on() -> None:
    async def scenario() -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.session.node_process",
            str(NODE.incarnation),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        try:
            assert process.stdout is not None and process.stdin is not None
            port = int(await process.stdout.readline())
            async with running_router(TIMING) as (dialer, router):

                def is_answered(number: int) -> bool:
                    """Asked again and again: the machine, too, may hold the process up for longer than the grace."""
                    dialer.send(*NODE, to_node(number))
                    return number in router.got

                dialer.dial(pb.NodeEntry(node=NODE.to_proto(), grpc_address=f"127.0.0.1:{port}"))
                await until(partial(is_answered, 1))
                losses = len(router.losses)
                stop(process.pid)
                took_s = await until(lambda: len(router.losses) > losses)
                assert took_s < 2 * FOUND_S
                assert router.happened[-2:] == [("broken", NODE), ("lost", NODE)]
                assert set(router.losses) == {Loss.UNKNOWN}, "by silence"
                dialer.send(*NODE, to_node(2))  # dropped
                resume(process.pid)
                await until(partial(is_answered, 3))
                assert set(router.got) == {1, 3}
        finally:
            process.kill()
            await process.wait()

    asyncio.run(scenario())


@pytest.mark.covers("R12")
def test_over_its_bound_of_unacknowledged_messages_a_session_is_lost_at_both_ends() -> None:
    async def scenario() -> None:
        timing = replace(PATIENT, max_unacked_messages=100)
        async with running_node(timing=timing) as node, running_router() as (dialer, router):
            dialer.dial(node.entry())
            await until(lambda: router.count("up") == 1)
            for number in range(101):
                node.send(number)
            assert node.handler.lost == [ROUTER]
            await until(lambda: router.count("lost") == 1)
            await until(lambda: router.count("up") == 2)

    asyncio.run(scenario())


def test_a_message_is_on_its_way_as_soon_as_it_is_given() -> None:
    """And does not wait for anything that the session does from time to time."""

    async def scenario() -> None:
        rare = replace(PATIENT, ack_s=300.0, keepalive_s=300.0, silence_s=600.0, grace_s=900.0)
        async with running_node(timing=rare) as node, running_router(rare) as (dialer, router):
            node.handler.reply = lambda peer, number: node.send(number)
            dialer.dial(node.entry())
            await until(lambda: router.count("up") == 1)
            for number in range(100):
                dialer.send(*NODE, to_node(number))
                await until(partial(operator.contains, router.got, number))

    asyncio.run(scenario())


HELLO = pb.Hello(
    peer=ROUTER.to_proto(), to_incarnation=NODE.incarnation, session_id=3, protocol=PROTOCOL
).SerializeToString()
GAP = pb.Frame(seq=9, router=to_node(1)).SerializeToString()
WRONG_NODE = pb.Frame(hello=pb.Hello(peer=ROUTER.to_proto(), to_incarnation=4, session_id=3, protocol=PROTOCOL))
WRONG_PROTOCOL = pb.Frame(hello=pb.Hello(peer=ROUTER.to_proto(), to_incarnation=5, session_id=3, protocol=99))
GOOD_HELLO = b"\x1a" + bytes([len(HELLO)]) + HELLO  # field 3 of Frame

ATTACKS: dict[str, tuple[list[bytes], grpc.StatusCode]] = {
    "random bytes": ([b"\xff\xfe\xfd" * 50], grpc.StatusCode.INVALID_ARGUMENT),
    "no Hello": ([GAP], grpc.StatusCode.INVALID_ARGUMENT),
    "empty frame": ([b""], grpc.StatusCode.INVALID_ARGUMENT),
    "another node is meant": ([WRONG_NODE.SerializeToString()], grpc.StatusCode.NOT_FOUND),
    "another protocol": ([WRONG_PROTOCOL.SerializeToString()], grpc.StatusCode.FAILED_PRECONDITION),
    "random bytes behind a Hello": ([GOOD_HELLO, b"\xff" * 99], grpc.StatusCode.ABORTED),
    "a gap": ([GOOD_HELLO, GAP], grpc.StatusCode.ABORTED),
    "two Hellos": ([GOOD_HELLO, GOOD_HELLO], grpc.StatusCode.ABORTED),
    "nothing at all": ([], grpc.StatusCode.DEADLINE_EXCEEDED),
}


@pytest.mark.covers("R12", "C06")
def test_hostile_streams_end_alone_with_a_status_that_says_why() -> None:
    async def attack(node: RunningNode, case: str) -> None:
        frames, expected = ATTACKS[case]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{node.port}") as channel:
            stream: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream("/baton.Node/Session")
            call = stream()
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                for frame in frames:
                    await call.write(frame)
                while await call.read() is not grpc.aio.EOF:
                    pass
            assert failure.value.code() is expected, f"{case}: {failure.value.details()}"

    async def scenario() -> None:
        honest = Peer("honest", 8)
        handler = RouterRecorder()
        hasty = replace(PATIENT, silence_s=1.0)  # for who says nothing at all
        async with running_node() as node, running_node(Peer("hasty", 6), hasty) as other:
            dialer = SessionDialer(honest, handler, PATIENT)
            for each in (node, other):
                dialer.dial(each.entry())
            await until(lambda: all(handler.count("up", each.peer) == 1 for each in (node, other)))
            for case in ATTACKS:
                await attack(other if case == "nothing at all" else node, case)
            for each in (node, other):
                dialer.send(*each.peer, to_node(1))
            await until(lambda: node.handler.got == other.handler.got == [1])
            assert [each for each in handler.happened if each[1] == NODE] == [("up", NODE)]
            await dialer.close()

    asyncio.run(scenario())


@pytest.mark.covers("R12")
def test_a_router_that_reads_nothing_holds_up_its_own_stream_only_and_is_lost() -> None:
    async def scenario() -> None:
        async with (
            connected(TIMING, PATIENT) as (node, _, dialer, router),
            grpc.aio.insecure_channel(f"127.0.0.1:{node.port}") as channel,
        ):
            stuck = Peer("stuck", 8)
            call = NodeStub(channel).Session()
            hello = pb.Hello(peer=stuck.to_proto(), to_incarnation=NODE.incarnation, session_id=4, protocol=PROTOCOL)
            await call.write(pb.Frame(hello=hello))
            await until(lambda: "stuck" in dict_of(node.sessions.snapshot()["peers"]))
            for number in range(10):
                node.sessions.send(stuck, to_router(number, "x" * 1_000_000))
            dialer.send(*NODE, to_node(1))
            await until(lambda: node.handler.got == [1])
            assert dict_of(dict_of(node.sessions.snapshot()["peers"])["stuck"])["sent"] != 10, "the stream is full"
            await until(lambda: node.handler.lost == [stuck])
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                while await call.read() is not grpc.aio.EOF:
                    pass
            assert failure.value.code() is grpc.StatusCode.ABORTED
            assert router.count("broken") == 0

    asyncio.run(scenario())


@pytest.mark.covers("R12")
def test_a_router_that_opens_another_session_has_given_up_the_older() -> None:
    async def scenario() -> None:
        async with connected() as (node, _, _, router), grpc.aio.insecure_channel(f"127.0.0.1:{node.port}") as channel:
            call = NodeStub(channel).Session()
            await call.write(pb.Frame.FromString(GOOD_HELLO))
            frame = await call.read()
            assert isinstance(frame, pb.Frame) and frame.hello.session_id == 3
            assert node.handler.lost == [ROUTER]
            await until(lambda: router.count("lost") == 1)
            call.cancel()

    asyncio.run(scenario())
