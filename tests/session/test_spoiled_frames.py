"""Frames that arrive at a router and do not parse."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from proto import baton_pb2 as pb
from runtime import session_dialer
from tests.session.ends import connected, until


@pytest.mark.covers("R12", "R14")
def test_a_node_s_frame_that_does_not_parse_breaks_the_stream_and_the_session_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gRPC's client gives no frame for it, and no error."""
    is_next_spoiled = False

    def read(data: bytes) -> pb.Frame:
        nonlocal is_next_spoiled
        is_spoiled, is_next_spoiled = is_next_spoiled, False
        return pb.Frame.FromString(b"\xff" if is_spoiled else data)

    class Stub:
        def __init__(self, channel: grpc.aio.Channel) -> None:
            self.Session = channel.stream_stream("/baton.Node/Session", pb.Frame.SerializeToString, read)

    monkeypatch.setattr(session_dialer, "NodeStub", Stub)

    async def scenario() -> None:
        nonlocal is_next_spoiled
        async with connected() as (node, _, _, router):
            node.send(1)
            await until(lambda: router.got == [1])
            is_next_spoiled = True
            node.send(2)
            await until(lambda: router.got == [1, 2])
            assert [what for what, _ in router.happened] == ["up", "broken", "up"]

    asyncio.run(scenario())
