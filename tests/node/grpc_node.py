"""A node's gRPC service on a free port, with the test in the place of the core."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from engine.grammars import Grammars
from node import events as ev
from node.ending import Ending
from node.grammar_gate import GrammarGate
from node.grammar_threads import GrammarThreads
from node.handoff_client import SERVER_OPTIONS
from node.identity import NodeIdentity
from node.metrics import Counters
from node.roles import ROLES, RoleName
from node.routers import Routers
from node.service import NodeService, PendingCalls
from node.validate import Bounds
from proto import baton_pb2 as pb
from proto import baton_pb2_grpc as pb_grpc
from runtime.session import PROTOCOL, Peer, SessionTiming
from tests.node.scripted_core import ScriptedCore

INCARNATION = 77
ROUTER = Peer("router", 3)
ROLE_NAMES: dict[int, RoleName] = {role: name for name, role in ROLES.items()}


@dataclass(slots=True)
class GrpcNode:
    """What the test holds: the address, the calls to answer, the events that came."""

    address: str
    calls: PendingCalls
    counters: Counters
    routers: Routers
    ending: Ending
    service: NodeService
    events: list[ev.Event] = field(default_factory=list)


async def _open_session(address: str) -> asyncio.Task[None]:
    """Be the router whose attempts the tests reserve for: without a session nobody gets a lease."""
    is_open = asyncio.Event()

    async def hold() -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            stream = pb_grpc.NodeStub(channel).Session()
            peer = pb.PeerId(name=ROUTER.name, incarnation=ROUTER.incarnation)
            hello = pb.Hello(peer=peer, to_incarnation=INCARNATION, session_id=1, protocol=PROTOCOL)
            await stream.write(pb.Frame(hello=hello))
            while True:
                await stream.read()
                is_open.set()
                await stream.write(pb.Frame())

    task = asyncio.create_task(hold())
    await is_open.wait()
    return task


@asynccontextmanager
async def serve_node(
    role: pb.Role.ValueType,
    react: Callable[[GrpcNode, ev.Event], None] | None = None,
    address: str = "127.0.0.1:0",
) -> AsyncIterator[GrpcNode]:
    """Serve; `react` is called with each event, on the loop, after the service has waited for its answer."""
    loop = asyncio.get_running_loop()

    def post(event: ev.Event) -> None:
        node.events.append(event)
        if react is not None:
            loop.call_soon(react, node, event)

    identity, counters, calls = NodeIdentity("n0", INCARNATION), Counters(), PendingCalls()
    bounds = Bounds(role=role, vocab_size=100, max_model_len=64)
    threads = GrammarThreads(Grammars(Path("nowhere"), 100))
    gate = GrammarGate(post, threads)
    routers = Routers(identity, bounds, counters, gate, pb.LoadReport, SessionTiming())
    server = grpc.aio.server(options=SERVER_OPTIONS)
    ending = Ending(25.0, ROLE_NAMES[role], ("decode", "mixed", "prefill"))
    ending.take_up(ScriptedCore())
    service = NodeService(identity, bounds, counters, gate, routers.sessions, calls, ending)
    pb_grpc.add_NodeServicer_to_server(service, server)
    node = GrpcNode(f"127.0.0.1:{server.add_insecure_port(address)}", calls, counters, routers, ending, service)
    await server.start()
    stream = await _open_session(node.address)
    try:
        yield node
    finally:
        stream.cancel()
        await routers.sessions.close()
        await gate.close()
        await threads.stop()
        await server.stop(None)
