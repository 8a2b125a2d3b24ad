"""What of a role must be gone before the next one begins: in scheduler and pool, and at the node's port."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest

from engine.block_pool import BlockPool
from engine.scheduler import Scheduler
from node.events import RenewAsked, ReserveAsked
from node.port import NodePort
from node.roles import find_leftover
from proto import baton_pb2 as pb
from proto import baton_pb2_grpc as pb_grpc
from proto.block_key import block_keys
from tests.engine_pure.checked_node import KEY_SEED, SIZES, CheckedNode, make_spec
from tests.node.grpc_node import INCARNATION, GrpcNode, serve_node
from tests.node.test_service import reserve_for
from tests.session.ends import until


def leased(scheduler: Scheduler, pool: BlockPool) -> None:
    pool.lease(2)


def quarantined(scheduler: Scheduler, pool: BlockPool) -> None:
    pool.quarantine(pool.lease(3))


def used(scheduler: Scheduler, pool: BlockPool) -> None:
    pool.allocate(1)


def promised(scheduler: Scheduler, pool: BlockPool) -> None:
    pool.promise(4)


def reserved(scheduler: Scheduler, pool: BlockPool) -> None:
    scheduler.reserve_slots(1)


def waiting(scheduler: Scheduler, pool: BlockPool) -> None:
    scheduler.submit(make_spec("a", [1], 1, SIZES))


LEFT: dict[str, Callable[[Scheduler, BlockPool], None]] = {
    "2 leased blocks": leased,
    "3 quarantined blocks": quarantined,
    "1 blocks in use": used,
    "4 promised blocks": promised,
    "1 reserved slots": reserved,
    "1 sequences": waiting,
}


@pytest.mark.covers("C11")
@pytest.mark.parametrize("left", LEFT)
def test_whatever_somebody_may_touch_is_named_and_a_cached_block_is_nobodys(left: str) -> None:
    node = CheckedNode(SIZES)
    node.submit(make_spec("before", list(range(12)), 2, SIZES))
    node.run_to_the_end()
    assert node.pool.counts().cached and not find_leftover(node.scheduler, node.pool, {"kv_looks": 0})
    LEFT[left](node.scheduler, node.pool)
    assert find_leftover(node.scheduler, node.pool, {}) == left


@pytest.mark.covers("C11")
def test_questions_to_the_kv_pool_are_left_until_they_are_answered() -> None:
    node = CheckedNode(SIZES)
    snapshot = {"kv_looks": 1, "kv_fetches": 2, "attempts": 7}
    assert find_leftover(node.scheduler, node.pool, snapshot) == "3 questions to the KV pool"


@pytest.mark.covers("C11", "S14")
def test_a_scheduler_takes_a_role_between_sequences_and_keeps_slots_pool_and_cache() -> None:
    sizes = replace(SIZES, max_beside_decodes=3, resumes=False)
    node = CheckedNode(sizes)
    tokens = [2] * 20
    node.submit(make_spec("first", tokens, 3, sizes))
    with pytest.raises(ValueError, match="sequences"):
        node.scheduler.take_role(True, None)
    node.run_to_the_end()
    assert node.scheduler.reserve_slots(1)
    with pytest.raises(ValueError, match="slots"):
        node.scheduler.take_role(True, None)
    node.scheduler.unreserve_slots(1)
    assert node.scheduler.num_prompt_tokens == len(tokens)
    node.scheduler.take_role(True, None)
    assert node.scheduler.resumes_preempted and node.scheduler.num_prompt_tokens == 0

    node.submit(make_spec("a", [1] * 8, 3, sizes))
    assert node.plan() is not None
    node.submit(make_spec("b", tokens, 2, sizes))
    plan = node.plan()
    num_cached = len(block_keys(KEY_SEED, tokens[:-1], sizes.block_size)) * sizes.block_size
    assert plan is not None and len(plan.decodes) == 1, "it decodes"
    assert [(each.start, len(each.token_ids)) for each in plan.chunks] == [(num_cached, len(tokens) - num_cached)]
    assert num_cached and len(tokens) - num_cached > 3, "the old role's bound would show"
    node.run_to_the_end()
    assert node.finished["a"] == node.finished["b"] == "length" and node.is_idle()


def on_a_port(test: Callable[[GrpcNode, NodePort, pb_grpc.NodeAsyncStub], object]) -> None:
    """A node whose port is open, to a first incarnation."""

    async def scene() -> None:
        async with asyncio.timeout(60), serve_node(pb.ROLE_DECODE) as node:
            port = NodePort("n0", node.service)
            server = grpc.aio.server()
            pb_grpc.add_NodeServicer_to_server(port, server)
            address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            await server.start()
            try:
                async with grpc.aio.insecure_channel(address) as channel:
                    await test(node, port, pb_grpc.NodeStub(channel))  # type: ignore[misc]
            finally:
                await server.stop(None)

    asyncio.run(scene())


@pytest.mark.covers("C11", "C06")
def test_between_two_roles_the_port_refuses_as_who_drains_and_an_operator_is_heard() -> None:
    async def scene(node: GrpcNode, port: NodePort, stub: pb_grpc.NodeAsyncStub) -> None:
        port.close()
        error = (await stub.Reserve(reserve_for(INCARNATION))).error
        assert error.code == pb.DRAINING and error.retryable and error.key.request_id == "r1"
        assert (await stub.Renew(pb.RenewRequest())).life_ms == 0
        await stub.Release(pb.ReleaseRequest())
        assert not node.events, "no core hears of it"
        # Nothing is said: whoever writes to a stream while it is refused finds INTERNAL, which gRPC makes of that.
        assert await stub.Session().code() is grpc.StatusCode.ABORTED, "a router dials again"
        assert isinstance(await stub.Drain(pb.DrainRequest(timeout_ms=9000)).read(), pb.DrainProgress)
        assert node.ending.is_draining

        port.turn_to(node.service)
        reserve = asyncio.ensure_future(_answer(stub.Reserve(reserve_for(INCARNATION))))
        await until(lambda: bool(node.events))
        assert isinstance(node.events[0], ReserveAsked)
        reserve.cancel()

    on_a_port(scene)


@pytest.mark.covers("C11")
def test_calls_that_the_core_did_not_come_to_read_are_answered_when_its_incarnation_goes() -> None:
    async def scene(node: GrpcNode, port: NodePort, stub: pb_grpc.NodeAsyncStub) -> None:
        renewal = pb.RenewRequest(to_incarnation=INCARNATION, key=reserve_for(0).key, secret=bytes(16))
        calls = [asyncio.ensure_future(_answer(stub.Reserve(reserve_for(INCARNATION))))]
        calls.append(asyncio.ensure_future(_answer(stub.Renew(renewal))))
        await until(lambda: len(node.events) == 2)
        assert {type(event) for event in node.events} == {ReserveAsked, RenewAsked}
        node.calls.close()
        refused, renewed = [await call for call in calls]
        assert refused.error.code == pb.DRAINING and renewed == pb.RenewReply(life_ms=0)

    on_a_port(scene)


async def _answer(call: Any) -> Any:
    return await call
