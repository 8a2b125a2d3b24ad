"""A node process that drains: what its router hears, in which order, and the exit code. Its core does what the test says."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from proto import baton_pb2 as pb
from proto.baton_pb2_grpc import add_RegistryServicer_to_server
from runtime.registry_server import RegistryServer
from runtime.session import Peer, SessionTiming
from runtime.session_dialer import SessionDialer
from runtime.session_events import Loss
from tests import forked
from tests.node.test_process import PATIENCE
from tests.session.ends import until

NUM_WORDS = 2_000  # more than one frame or one acknowledgement holds
# Asked to drain, it says a lot to the router that spoke to it last; `drains` or not.
NODE = (
    PATIENCE
    + """
import sys
import node.drain
from node import events as ev
from node.config import NodeConfig
from node.process import run_node
from prefill_node.core import PrefillCore
from proto import baton_pb2 as pb
from runtime.config import load

node.drain.DELIVERY_S = 60.0

class TalkativeCore(PrefillCore):
    def receive(self, event, now):
        match event:
            case ev.FromRouter(router):
                self.router = router
            case ev.DrainAsked():
                words = [pb.NodeMessage(error=pb.PDError(message=str(i))) for i in range({num_words})]
                return [ev.ToRouter(self.router, each) for each in words] + [ev.Drained()] * {drains}
        return []

def make_core(parts):
    return TalkativeCore(parts.identity, parts.limits, parts.scheduler, parts.pool, parts.fingerprint, parts.key_seed)

sys.exit(run_node("prefill", load(NodeConfig, "baton prefill", "", sys.argv[1:]), {{"prefill": make_core, "decode": make_core}}))
"""
)


class TestRouter:
    """A registry and the session with whoever registers; writes down what it hears."""

    __test__ = False

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.dialer = SessionDialer(Peer("router", 1), self, SessionTiming(silence_s=100, grace_s=100))

    def on_listed(self, entry: pb.NodeEntry) -> None:
        self.heard.append("draining" if entry.draining else "listed")
        self.dialer.dial(entry)

    def on_missed(self, node: Peer) -> None:
        self.heard.append("missed")

    def on_unlisted(self, node: Peer) -> None:
        self.heard.append("unlisted")

    def on_up(self, node: Peer) -> None:
        cancel = pb.Cancel(key=pb.AttemptKey(request_id="hello"), ms_left=1000)
        self.dialer.send(node.name, node.incarnation, pb.RouterMessage(cancel=cancel))
        self.heard.append("up")

    def on_broken(self, node: Peer) -> None:
        self.heard.append("broken")

    def on_lost(self, node: Peer, loss: Loss) -> None:
        self.heard.append("lost")

    def on_load(self, node: Peer, load: pb.LoadReport) -> None:
        pass

    def on_message(self, node: Peer, message: pb.NodeMessage) -> None:
        self.heard.append(message.error.message)


@asynccontextmanager
async def node_of_a_router(
    model_dir: Path, drains: bool, *flags: str
) -> AsyncIterator[tuple[TestRouter, asyncio.subprocess.Process]]:
    """The node has taken a message of the router's."""
    router = TestRouter()
    registry, server = RegistryServer(router, ttl_s=100), grpc.aio.server()
    add_RegistryServicer_to_server(registry, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    program = NODE.format(num_words=NUM_WORDS, drains=drains)
    arguments = ["--model", str(model_dir), "--router", address, "--threads", "1", "--num-blocks", "300", *flags]
    process = await forked.create_process(sys.executable, "-c", program, *arguments)
    try:
        async with asyncio.timeout(250):
            await until(lambda: "up" in router.heard, within_s=100)
            await until(lambda: acknowledged(router) == 1, within_s=60)
            yield router, process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await router.dialer.close()
        registry.close()
        await server.stop(None)


def acknowledged(router: TestRouter) -> int:
    """Messages of the router that the node has taken."""
    (session,) = router.dialer.snapshot()["peers"].values()  # type: ignore[attr-defined]
    return int(session["acked"])


def run(test: Callable[[], object]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


@pytest.mark.covers("D08", "C03")
def test_a_drained_node_tells_its_routers_first_delivers_every_word_and_exits_0(model_dir: Path) -> None:
    async def scene() -> None:
        async with node_of_a_router(model_dir, True) as (router, process):
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
            await until(lambda: "lost" in router.heard, within_s=60)
            words = [str(i) for i in range(NUM_WORDS)]
            assert router.heard[:-2] == ["listed", "up", "draining", *words]
            assert set(router.heard[-2:]) == {"unlisted", "lost"}

    run(scene)


@pytest.mark.covers("D08")
def test_a_node_that_cannot_drain_delivers_and_exits_0_soon_after_its_deadline(model_dir: Path) -> None:
    async def scene() -> None:
        async with node_of_a_router(model_dir, False, "--drain-timeout-s", "2.5") as (router, process):
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
            assert str(NUM_WORDS - 1) in router.heard

    run(scene)


@pytest.mark.covers("D08")
def test_a_second_signal_ends_a_draining_node_now(model_dir: Path) -> None:
    async def scene() -> None:
        async with node_of_a_router(model_dir, False) as (router, process):
            process.send_signal(signal.SIGTERM)
            await until(lambda: str(NUM_WORDS - 1) in router.heard, within_s=60)
            assert process.returncode is None
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 128 + signal.SIGTERM

    run(scene)


@pytest.mark.covers("D08", "C03")
def test_ctrl_c_ends_a_node_at_once_in_good_order(model_dir: Path) -> None:
    async def scene() -> None:
        async with node_of_a_router(model_dir, False) as (router, process):
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 0
            await until(lambda: {"lost", "unlisted"} <= set(router.heard), within_s=60)
            assert "draining" not in router.heard and "0" not in router.heard

    run(scene)
