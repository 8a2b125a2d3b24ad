"""gRPC servers with certificates count whom they refuse, and nobody else: real handshakes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, cast

import grpc
import grpc.aio
import httpx
import pytest

from bench.fleet import wait_until
from proto import baton_pb2 as pb
from proto.baton_pb2_grpc import (
    NodeServicer,
    NodeStub,
    RegistryServicer,
    RegistryStub,
    add_NodeServicer_to_server,
    add_RegistryServicer_to_server,
)
from runtime.credentials import NO_CREDENTIALS, Credentials
from runtime.grpc_server import GrpcServer
from runtime.unheard import Unheard
from tests.router.tiny_model import write_model_text
from tests.security.strangers import GARBAGE, members_context, say, stranger_channels

_OWN_CONNECTION: Final = (("grpc.use_local_subchannel_pool", 1),)  # else channels to one address share one
BOUND_S: Final = 100.0
PATIENCE_S: Final = 4.0  # many times what a handshake takes under load, and longer than this process stands still


class Answers(RegistryServicer, NodeServicer):
    """One call of each sort of handler that Baton has."""

    async def List(self, request: pb.ListRequest, context: object) -> pb.ListReply:
        return pb.ListReply()

    async def Drain(self, request: pb.DrainRequest, context: object) -> AsyncIterator[pb.DrainProgress]:
        for left in (2, 1):
            yield pb.DrainProgress(attempts=left)

    async def Session(self, request_iterator: object, context: grpc.aio.ServicerContext[pb.Frame, pb.Frame]) -> None:  # type: ignore[override]
        frame = await context.read()
        assert isinstance(frame, pb.Frame)
        await context.write(frame)


@asynccontextmanager
async def serving(credentials: Credentials, on_refused: Callable[[], None], unheard: Unheard) -> AsyncIterator[str]:
    server = GrpcServer(credentials, on_refused, unheard=unheard)
    answers: Any = cast(Any, Answers)()  # the other calls are nobody's
    add_RegistryServicer_to_server(answers, server.server)
    add_NodeServicer_to_server(answers, server.server)
    port = server.bind("127.0.0.1:0")
    await server.server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def list_often(channel: grpc.aio.Channel) -> None:
    for _ in range(3):
        await RegistryStub(channel).List(pb.ListRequest())


async def drain(channel: grpc.aio.Channel) -> None:
    told = [progress.attempts async for progress in NodeStub(channel).Drain(pb.DrainRequest())]
    assert told == [2, 1]


async def open_session(channel: grpc.aio.Channel) -> None:
    call = NodeStub(channel).Session()
    await call.write(pb.Frame(ack=7))
    answer = await call.read()
    assert isinstance(answer, pb.Frame) and answer.ack == 7
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.OK


KINDS: Final = (list_often, drain, open_session)


async def converse(credentials: Credentials, address: str) -> None:
    """Calls of every sort, each over a connection of its own, and then of all sorts over one."""
    for kinds in (*((kind,) for kind in KINDS), KINDS):
        async with credentials.channel(address, _OWN_CONNECTION) as channel:
            for kind in kinds:
                await kind(channel)


@pytest.mark.covers("X03")
def test_strangers_are_counted_and_members_are_not(ours: Path, others: Path) -> None:
    """No certificate, another authority's, no TLS at all, and garbage; a member before, between and after them."""
    num_refused = 0

    def refuse() -> None:
        nonlocal num_refused
        num_refused += 1

    async def run() -> None:
        credentials, unheard = Credentials(ours, "127.0.0.1"), Unheard(PATIENCE_S)
        async with serving(credentials, refuse, unheard) as address:
            await converse(credentials, address)
            strangers = stranger_channels(address, ours, others)
            for channel in strangers.values():
                async with channel:
                    with pytest.raises(grpc.aio.AioRpcError):
                        await RegistryStub(channel).List(pb.ListRequest(), timeout=60)
                await converse(credentials, address)
            for garbage in GARBAGE:
                await asyncio.to_thread(say, address, garbage)
            await converse(credentials, address)
            assert unheard.snapshot()["callers"] == (len(strangers) + 2) * (len(KINDS) + 1)
            async with asyncio.timeout(100):
                while unheard.snapshot()["waiting"]:  # noqa: ASYNC110 - its own timer counts, and tells nobody else
                    await asyncio.sleep(0.05)
            assert num_refused == len(strangers) + len(GARBAGE)

    asyncio.run(run())


@pytest.mark.covers("X03")
def test_without_certificates_nobody_is_refused(ours: Path) -> None:
    def refuse() -> None:
        raise AssertionError("there is nothing to refuse")

    async def run() -> None:
        unheard = Unheard(0.0)
        async with serving(NO_CREDENTIALS, refuse, unheard) as address:
            await converse(NO_CREDENTIALS, address)
            await asyncio.to_thread(say, address, GARBAGE[0])
            assert unheard.snapshot() == {"waiting": 0, "callers": 0}

    asyncio.run(run())


@pytest.mark.covers("X03", "O01")
def test_of_a_router_with_workers_one_counts_for_the_registry_of_all(ours: Path, tmp_path: Path) -> None:
    ready_file = tmp_path / "ready.json"
    flags = ["--model", str(write_model_text(tmp_path / "model")), "--port", "0", "--workers", "2"]
    flags += ["--tls-dir", str(ours), "--ready-file", str(ready_file), "--parent-pid", str(os.getpid())]
    command = [sys.executable, "-m", "router", *flags]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as router:
        try:
            wait_until("the router is ready", lambda: ready_file.exists() or router.poll() is not None, BOUND_S)
            ready = json.loads(ready_file.read_text())
            for garbage in GARBAGE:
                say(ready["registry"], garbage)

            def counted() -> list[float]:
                with httpx.Client(verify=members_context(ours), trust_env=False, timeout=60) as client:
                    page = client.get(f"{ready['url']}/metrics").text
                lines = re.findall(r'^baton_router_refused_grpc_total\{worker="\d"\} (\S+)$', page, re.MULTILINE)
                return sorted(map(float, lines))

            assert counted() == [0.0, 0.0]
            wait_until("each is counted once", lambda: counted() == [0.0, float(len(GARBAGE))], BOUND_S)
        finally:
            router.kill()
