"""A node and a router with nothing but their ends of the session, over real gRPC on 127.0.0.1."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from proto import baton_pb2 as pb
from proto.baton_pb2_grpc import NodeServicer, add_NodeServicer_to_server
from runtime.session import Peer, SessionTiming
from runtime.session_dialer import SessionDialer
from runtime.session_driver import CHANNEL_OPTIONS
from runtime.session_events import Loss
from runtime.session_server import SessionServer
from tests.session.tcp_proxy import TcpProxy

if TYPE_CHECKING:
    from proto.baton_pb2_grpc import _MaybeAsyncIterator, _ServicerContext

NODE = Peer("node", 5)
ROUTER = Peer("router", 7)
TIMING = SessionTiming()  # for what is about silence
PATIENT = SessionTiming(
    silence_s=60.0, grace_s=90.0, dial_timeout_s=60.0
)  # for all else, on a machine that holds us up
FOUND_S = 2.0  # the design's bound for a silent peer; a busy machine gets as much again
_LOOK_S = 0.005  # what a thread that waits for nobody sleeps
_LATE_S = 0.006  # that it may be late of another thread's code
_LONG_S = 0.05  # for a wait, so that it matters


class _HeldUp:
    """How long the machine has kept this whole process from running: a thread is late then, and not where only the loop blocks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        threading.Thread(target=self._look, name="held-up", daemon=True).start()

    def _look(self) -> None:
        before = time.monotonic()
        while True:
            time.sleep(_LOOK_S)
            now = time.monotonic()
            self.seconds += max(0.0, now - before - _LOOK_S - _LATE_S)
            before = now


@cache
def _held_up() -> _HeldUp:
    return _HeldUp()


async def until(is_true: Callable[[], bool], within_s: float = 60.0) -> float:
    """Wait for it; the seconds it took without those in which this process was held up. TimeoutError if it does not come true."""
    began, held_up_s = time.monotonic(), _held_up().seconds
    async with asyncio.timeout(within_s):
        while not is_true():  # noqa: ASYNC110 - what is waited for is another process's or gRPC's
            await asyncio.sleep(0.001)
    took_s = time.monotonic() - began
    if took_s > _LONG_S:
        await asyncio.sleep(2 * _LOOK_S)  # until what was lost is known
    return max(0.0, took_s - (_held_up().seconds - held_up_s))


def to_node(number: int) -> pb.RouterMessage:
    return pb.RouterMessage(cancel=pb.Cancel(key=pb.AttemptKey(attempt=number)))


def to_router(number: int, text: str = "") -> pb.NodeMessage:
    return pb.NodeMessage(error=pb.PDError(retry_after_ms=number, message=text))


class NodeRecorder:
    """Handler of a node's end."""

    def __init__(self) -> None:
        self.got: list[int] = []
        self.lost: list[Peer] = []
        self.reply: Callable[[Peer, int], None] = lambda router, number: None

    def on_message(self, router: Peer, message: pb.RouterMessage) -> None:
        self.got.append(message.cancel.key.attempt)
        self.reply(router, message.cancel.key.attempt)

    def on_lost(self, router: Peer) -> None:
        self.lost.append(router)


class RouterRecorder:
    """Handler of a router's end; `happened` has "up", "broken" and "lost" of every node in order."""

    def __init__(self) -> None:
        self.got: list[int] = []
        self.happened: list[tuple[str, Peer]] = []
        self.losses: list[Loss] = []
        self.loads: dict[Peer, pb.LoadReport] = {}

    def on_up(self, node: Peer) -> None:
        self.happened.append(("up", node))

    def on_broken(self, node: Peer) -> None:
        self.happened.append(("broken", node))

    def on_lost(self, node: Peer, loss: Loss) -> None:
        self.happened.append(("lost", node))
        self.losses.append(loss)

    def on_message(self, node: Peer, message: pb.NodeMessage) -> None:
        self.got.append(message.error.retry_after_ms)

    def on_load(self, node: Peer, load: pb.LoadReport) -> None:
        self.loads[node] = load

    def count(self, what: str, node: Peer = NODE) -> int:
        return self.happened.count((what, node))


class _Servicer(NodeServicer):
    def __init__(self, sessions: SessionServer) -> None:
        self._sessions = sessions

    async def Session(  # type: ignore[override]  # grpc.aio also takes a coroutine that writes to the context
        self, request_iterator: _MaybeAsyncIterator[pb.Frame], context: _ServicerContext
    ) -> None:
        await self._sessions.Session(request_iterator, context)

    async def Reserve(self, request: pb.ReserveRequest, context: _ServicerContext) -> pb.ReserveReply:
        return pb.ReserveReply()

    async def Renew(self, request: pb.RenewRequest, context: _ServicerContext) -> pb.RenewReply:
        return pb.RenewReply()

    async def Drain(self, request: pb.DrainRequest, context: _ServicerContext) -> AsyncIterator[pb.DrainProgress]:
        yield pb.DrainProgress(has_ended=True)

    async def ChangeRole(self, request: pb.RoleRequest, context: _ServicerContext) -> AsyncIterator[pb.DrainProgress]:
        yield pb.DrainProgress(has_changed=True)

    async def Release(self, request: pb.ReleaseRequest, context: _ServicerContext) -> pb.ReleaseReply:
        return pb.ReleaseReply()


@dataclass
class RunningNode:
    peer: Peer
    port: int
    sessions: SessionServer
    handler: NodeRecorder
    server: grpc.aio.Server

    def entry(self, address: str | None = None) -> pb.NodeEntry:
        return pb.NodeEntry(node=self.peer.to_proto(), grpc_address=address or f"127.0.0.1:{self.port}")

    def send(self, number: int, router: Peer = ROUTER) -> None:
        self.sessions.send(router, to_router(number))


@asynccontextmanager
async def running_node(peer: Peer = NODE, timing: SessionTiming = PATIENT) -> AsyncIterator[RunningNode]:
    """A node that serves sessions on a port of its own."""
    handler = NodeRecorder()
    sessions = SessionServer(peer, handler, lambda: pb.LoadReport(running=3), timing)
    server = grpc.aio.server(options=(*CHANNEL_OPTIONS, ("grpc.so_reuseport", 0)))
    add_NodeServicer_to_server(_Servicer(sessions), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield RunningNode(peer, port, sessions, handler, server)
    finally:
        await sessions.close()
        await server.stop(None)


@asynccontextmanager
async def running_router(timing: SessionTiming = PATIENT) -> AsyncIterator[tuple[SessionDialer, RouterRecorder]]:
    """A router that dials whom it is told to."""
    handler = RouterRecorder()
    dialer = SessionDialer(ROUTER, handler, timing)
    try:
        yield dialer, handler
    finally:
        await dialer.close()


@asynccontextmanager
async def connected(
    timing: SessionTiming = PATIENT, of_router: SessionTiming | None = None
) -> AsyncIterator[tuple[RunningNode, TcpProxy, SessionDialer, RouterRecorder]]:
    """A node and a router with an open session through a proxy."""
    async with (
        running_node(timing=timing) as node,
        TcpProxy(node.port) as proxy,
        running_router(of_router or timing) as (dialer, router),
    ):
        dialer.dial(node.entry(proxy.address))
        await until(lambda: router.count("up") == 1)
        yield node, proxy, dialer, router
