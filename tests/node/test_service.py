"""What other processes may make a node do: checks before the core, one answer to each call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc
import pytest

from node import events as ev
from node.grammar_gate import GrammarGate
from node.grammar_threads import Flaw, GrammarThreads
from proto import baton_pb2 as pb
from proto import baton_pb2_grpc as pb_grpc
from tests.node.grpc_node import INCARNATION, ROUTER, GrpcNode, serve_node
from tests.node.test_validate import good_dispatch, good_reserve
from tests.session.ends import until

React = Callable[[GrpcNode, ev.Event], None]


def call(
    role: pb.Role.ValueType,
    test: Callable[[GrpcNode, pb_grpc.NodeAsyncStub], Coroutine[None, None, Any]],
    react: React | None = None,
) -> Any:
    async def run() -> Any:
        async with (
            asyncio.timeout(60),
            serve_node(role, react) as node,
            grpc.aio.insecure_channel(node.address) as channel,
        ):
            return await test(node, pb_grpc.NodeStub(channel))

    return asyncio.run(run())


def reserve_for(incarnation: int) -> pb.ReserveRequest:
    request = good_reserve()
    request.to_incarnation = incarnation
    return request


@pytest.mark.covers("C09")
def test_a_reserve_for_a_router_without_a_session_is_refused() -> None:
    async def test(node: GrpcNode, stub: pb_grpc.NodeAsyncStub) -> pb.ReserveReply:
        request = reserve_for(INCARNATION)
        request.router.incarnation += 1
        reply = await stub.Reserve(request)
        assert node.events == []
        return reply

    error = call(pb.ROLE_DECODE, test).error
    assert error.code == pb.BUSY and "session" in error.message


@pytest.mark.covers("C09")
def test_a_reserve_whose_router_was_lost_while_its_grammar_was_compiled_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(node: GrpcNode, stub: pb_grpc.NodeAsyncStub) -> pb.ReserveReply:
        async def flaw(_: GrammarGate, grammar: pb.Grammar) -> None:
            await node.routers.sessions.close()

        monkeypatch.setattr(GrammarGate, "flaw", flaw)
        request = reserve_for(INCARNATION)
        request.grammar.CopyFrom(pb.Grammar(kind=pb.Grammar.REGEX, text="a", end_token_ids=[1]))
        reply = await stub.Reserve(request)
        assert node.events == []
        return reply

    error = call(pb.ROLE_DECODE, test).error
    assert error.code == pb.BUSY and "session" in error.message


@pytest.mark.covers("A14")
def test_why_a_node_cannot_follow_a_grammar_now_is_in_its_log_and_what_is_wrong_with_a_grammar_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its operator saw BUSY every two seconds, and nothing of the memory that there was not."""
    flaws = [Flaw(pb.BUSY, "no memory"), Flaw(pb.INVALID, "'its text' is unclosed")]

    async def flaw(*_: object) -> Flaw:
        return flaws[len(caplog.messages)]

    async def test(node: GrpcNode, stub: pb_grpc.NodeAsyncStub) -> None:
        dispatch = good_dispatch()
        dispatch.sampling.grammar.CopyFrom(pb.Grammar(kind=pb.Grammar.REGEX, text="a", end_token_ids=[1]))
        for number in (1, 2):
            node.routers.on_message(ROUTER, pb.RouterMessage(dispatch=dispatch))
            await until(lambda number=number: len(caplog.messages) == number)  # type: ignore[misc]

    monkeypatch.setattr(GrammarThreads, "flaw", flaw)
    with caplog.at_level("INFO", logger="node.routers"):
        call(pb.ROLE_PREFILL, test)
    busy, invalid = caplog.messages
    assert busy.startswith("grammar_refused ") and busy.endswith('code=BUSY reason="no memory"')
    assert invalid.endswith("code=INVALID")


def test_each_reserve_gets_the_cores_answer_to_that_call() -> None:
    def react(node: GrpcNode, event: ev.Event) -> None:
        assert isinstance(event, ev.ReserveAsked)
        if len(node.events) == 2:  # both are waiting: answer the later one first
            for asked in reversed(node.events):
                assert isinstance(asked, ev.ReserveAsked)
                lease = pb.Lease(num_blocks=asked.request.num_tokens)
                node.calls.answer_reserve(asked.call_id, pb.ReserveReply(lease=lease))

    async def test(_: GrpcNode, stub: pb_grpc.NodeAsyncStub) -> list[int]:
        requests = [reserve_for(INCARNATION), reserve_for(INCARNATION)]
        requests[1].num_tokens = 3
        replies = await asyncio.gather(*(stub.Reserve(request) for request in requests))
        return [reply.lease.num_blocks for reply in replies]

    assert call(pb.ROLE_DECODE, test, react) == [17, 3]


@pytest.mark.covers("C06")
def test_what_is_meant_for_an_earlier_incarnation_never_reaches_the_core() -> None:
    async def test(node: GrpcNode, stub: pb_grpc.NodeAsyncStub) -> None:
        reply = await stub.Reserve(reserve_for(INCARNATION - 1))
        assert reply.error.code == pb.TRANSFER_FAILED and reply.error.retryable
        assert reply.error.key == good_reserve().key
        renewal = await stub.Renew(pb.RenewRequest(key=good_reserve().key, to_incarnation=1, secret=bytes(16)))
        assert renewal.life_ms == 0  # there is no such lease
        await stub.Release(pb.ReleaseRequest(key=good_reserve().key, to_incarnation=1))
        assert node.events == []
        assert node.counters.counts()["wrong_incarnation"] == 3

    call(pb.ROLE_DECODE, test)


@pytest.mark.covers("C06")
def test_a_session_meant_for_an_earlier_incarnation_is_refused() -> None:
    async def test(node: GrpcNode, stub: pb_grpc.NodeAsyncStub) -> grpc.StatusCode:
        hello = pb.Hello(
            peer=pb.PeerId(name="router", incarnation=5), to_incarnation=INCARNATION - 1, session_id=9, protocol=1
        )

        async def frames() -> AsyncIterator[pb.Frame]:
            yield pb.Frame(hello=hello)
            await asyncio.Event().wait()

        with pytest.raises(grpc.aio.AioRpcError) as error:
            async for _ in stub.Session(frames()):
                pass
        assert node.events == []
        return error.value.code()

    assert call(pb.ROLE_DECODE, test) is grpc.StatusCode.NOT_FOUND


def test_a_malformed_reserve_is_answered_with_an_error_that_names_the_field() -> None:
    async def test(node: GrpcNode, stub: pb_grpc.NodeAsyncStub) -> pb.PDError:
        request = reserve_for(INCARNATION)
        request.block_keys.append(b"short")
        reply = await stub.Reserve(request)
        assert node.events == []
        return reply.error

    error = call(pb.ROLE_DECODE, test)
    assert error.code == pb.INTERNAL and not error.retryable
    assert error.message.startswith("PD Error") and "block_keys" in error.message


@pytest.mark.covers("O01", "O05")
def test_a_reserve_or_a_dispatch_that_the_core_never_hears_of_is_counted_and_logged_by_its_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(node: GrpcNode, stub: pb_grpc.NodeAsyncStub) -> None:
        strange = reserve_for(INCARNATION)
        strange.router.incarnation += 1
        wrong = reserve_for(INCARNATION)
        wrong.block_keys.append(b"short")
        codes = [
            (await stub.Reserve(each)).error.code for each in (strange, wrong, reserve_for(INCARNATION - 1), wrong)
        ]
        assert codes == [pb.BUSY, pb.INTERNAL, pb.TRANSFER_FAILED, pb.INTERNAL]
        counted = {"BUSY": 1, "INTERNAL": 2, "TRANSFER_FAILED": 1}
        assert node.counters.counts_by_code()["reserve_refused"] == counted
        dispatch = good_dispatch()
        dispatch.prompt_token_ids.append(10**6)
        node.routers.on_message(ROUTER, pb.RouterMessage(dispatch=dispatch))
        assert node.events == []
        said = {record.getMessage().split()[0]: record.getMessage() for record in caplog.records}
        assert f" request={good_reserve().key.request_id} " in said["call_refused"]
        assert f" request={dispatch.request_id} " in said["dispatch_refused"]

    with caplog.at_level("INFO"):
        call(pb.ROLE_DECODE, test)


def test_a_prefill_node_takes_no_reserve() -> None:
    async def test(node: GrpcNode, stub: pb_grpc.NodeAsyncStub) -> pb.PDError:
        reply = await stub.Reserve(reserve_for(INCARNATION))
        assert node.events == []
        return reply.error

    assert "ROLE_PREFILL" in call(pb.ROLE_PREFILL, test).message


def test_a_renewal_without_a_secret_is_an_invalid_argument() -> None:
    async def test(_: GrpcNode, stub: pb_grpc.NodeAsyncStub) -> grpc.StatusCode:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Renew(pb.RenewRequest(key=good_reserve().key, to_incarnation=INCARNATION))
        return error.value.code()

    assert call(pb.ROLE_DECODE, test) is grpc.StatusCode.INVALID_ARGUMENT


def test_a_release_is_acknowledged_and_reaches_the_core() -> None:
    async def test(node: GrpcNode, stub: pb_grpc.NodeAsyncStub) -> None:
        request = pb.ReleaseRequest(key=good_reserve().key, to_incarnation=INCARNATION, ms_left=5)
        await stub.Release(request)
        assert node.events == [ev.ReleaseAsked(request)]

    call(pb.ROLE_DECODE, test)


@pytest.mark.covers("H06")
def test_an_answer_to_a_caller_that_hung_up_has_no_effect() -> None:
    async def test(node: GrpcNode, stub: pb_grpc.NodeAsyncStub) -> None:
        reserve = stub.Reserve(reserve_for(INCARNATION))
        await until(lambda: bool(node.events), within_s=60)
        assert reserve.cancel()
        assert await reserve.code() is grpc.StatusCode.CANCELLED
        (asked,) = node.events
        assert isinstance(asked, ev.ReserveAsked)
        node.calls.answer_reserve(asked.call_id, pb.ReserveReply())
        node.calls.answer_reserve(asked.call_id, pb.ReserveReply())

    call(pb.ROLE_DECODE, test)


async def _say(stub: pb_grpc.NodeAsyncStub, message: pb.RouterMessage) -> pb.NodeMessage:
    """Open a session, send one message, return the first answer."""
    hello = pb.Hello(
        peer=pb.PeerId(name="another", incarnation=5), to_incarnation=INCARNATION, session_id=9, protocol=1
    )
    stream = stub.Session()
    await stream.write(pb.Frame(hello=hello))
    await stream.write(pb.Frame(seq=1, router=message))
    while isinstance(frame := await stream.read(), pb.Frame):
        if frame.WhichOneof("body") == "node":
            stream.cancel()
            return frame.node
    raise AssertionError("the stream ended")


def test_a_sound_dispatch_reaches_the_core_and_its_answer_the_router() -> None:
    def react(node: GrpcNode, event: ev.Event) -> None:
        if isinstance(event, ev.FromRouter):
            assert event.message.dispatch == good_dispatch()
            node.routers.send(event.router, pb.NodeMessage(tokens=pb.TokenBatch(from_receiver=True)))

    async def test(_: GrpcNode, stub: pb_grpc.NodeAsyncStub) -> pb.NodeMessage:
        return await _say(stub, pb.RouterMessage(dispatch=good_dispatch()))

    assert call(pb.ROLE_PREFILL, test, react).tokens.from_receiver


def test_a_bad_dispatch_ends_with_an_error_that_is_not_retryable_and_names_the_field() -> None:
    async def test(node: GrpcNode, stub: pb_grpc.NodeAsyncStub) -> pb.PDError:
        dispatch = good_dispatch()
        dispatch.prompt_token_ids.append(100)
        answer = await _say(stub, pb.RouterMessage(dispatch=dispatch))
        assert node.events == []
        return answer.error

    error = call(pb.ROLE_PREFILL, test)
    assert (error.code, error.retryable) == (pb.INTERNAL, False)
    assert error.key == pb.AttemptKey(request_id="r1", choice=0, attempt=1)
    assert list(error.completion_token_ids) == [5, 0]
    assert "prompt_token_ids" in error.message
