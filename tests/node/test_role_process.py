"""A node process that takes other roles: what its router hears, in which order, and how it ends meanwhile."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from proto import baton_pb2 as pb
from proto.baton_pb2_grpc import NodeStub, add_RegistryServicer_to_server
from runtime.registry_server import RegistryServer
from runtime.session import Peer
from tests import forked
from tests.node.test_draining_process import NODE, TestRouter, node_of_a_router, run
from tests.node.test_process import PATIENT_NODE
from tests.session.ends import until


class RoleRouter(TestRouter):
    """Keeps what is listed, and forgets whom it has lost, as a router does."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[pb.NodeEntry] = []

    def on_listed(self, entry: pb.NodeEntry) -> None:
        self.entries.append(entry)
        super().on_listed(entry)

    def on_unlisted(self, node: Peer) -> None:
        super().on_unlisted(node)
        self.dialer.hang_up(*node)


@asynccontextmanager
async def node_of_all_roles(
    model_dir: Path, *more: str
) -> AsyncIterator[tuple[RoleRouter, asyncio.subprocess.Process]]:
    """`baton prefill`, which its router has a session with."""
    router = RoleRouter()
    registry, server = RegistryServer(router, ttl_s=100), grpc.aio.server()
    add_RegistryServicer_to_server(registry, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    arguments = ["--model", str(model_dir), "--router", address, "--threads", "1", "--num-blocks", "300"]
    command = [sys.executable, "-c", PATIENT_NODE, "deploy.node_process", "prefill", *arguments, *more]
    process = await forked.create_process(*command)
    try:
        async with asyncio.timeout(250):
            await until(lambda: "up" in router.heard, within_s=100)
            yield router, process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await router.dialer.close()
        registry.close()
        await server.stop(None)


async def change(address: str, role: pb.Role.ValueType, timeout_ms: int = 90_000) -> list[pb.DrainProgress]:
    """The node's words, from asking until the last."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = NodeStub(channel).ChangeRole(pb.RoleRequest(role=role, timeout_ms=timeout_ms))
        return [each async for each in call]


@pytest.mark.covers("C11", "D08", "R13")
def test_a_process_takes_role_after_role_and_to_its_router_each_is_another_process(
    model_dir: Path, tmp_path: Path
) -> None:
    ready_file = tmp_path / "gone" / "ready.json"
    ready_file.parent.mkdir()

    async def scene() -> None:
        async with node_of_all_roles(model_dir, "--ready-file", str(ready_file)) as (router, process):
            address = router.entries[0].grpc_address
            await until(ready_file.exists, within_s=60)
            shutil.rmtree(ready_file.parent)  # or its disk has become full: whoever waited has read it
            for number, role in enumerate((pb.ROLE_DECODE, pb.ROLE_MIXED, pb.ROLE_PREFILL), 1):
                last = (await change(address, role))[-1]
                assert last.has_changed and not last.was_cut_short
                await until(lambda number=number: router.heard.count("up") == number + 1, within_s=60)  # type: ignore[misc]
            told = [(each.role, each.draining) for each in router.entries]
            assert told == [
                (pb.ROLE_PREFILL, False),
                (pb.ROLE_PREFILL, True),
                (pb.ROLE_DECODE, False),
                (pb.ROLE_DECODE, True),
                (pb.ROLE_MIXED, False),
                (pb.ROLE_MIXED, True),
                (pb.ROLE_PREFILL, False),
            ]
            assert {each.grpc_address for each in router.entries} == {address}
            assert len({each.node.name for each in router.entries}) == 1
            assert len({each.node.incarnation for each in router.entries}) == 4
            assert [each.started_ms for each in router.entries] == sorted(each.started_ms for each in router.entries)
            one = ["draining", "unlisted", "lost", "listed", "up"]
            assert [each for each in router.heard if each != "lost"] == [
                "listed",
                "up",
                *[w for w in one if w != "lost"] * 3,
            ]

            heard = list(router.heard)
            assert [each.has_changed for each in await change(address, pb.ROLE_PREFILL)] == [True]
            assert router.heard == heard, "it has that role"
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0

    run(scene)


@pytest.mark.covers("C11", "D08")
def test_sigterm_wins_over_a_change_and_a_role_that_the_process_does_not_know_is_refused(model_dir: Path) -> None:
    assert "make_core" in NODE, "of its core, which never drains"

    async def scene() -> None:
        async with node_of_a_router(model_dir, False, "--drain-timeout-s", "0.3") as (router, process):
            (session,) = router.dialer.snapshot()["peers"].values()  # type: ignore[attr-defined]
            address = session["address"]
            with pytest.raises(grpc.aio.AioRpcError, match="started for its one role"):
                await change(address, pb.ROLE_MIXED)
            changing = asyncio.create_task(change(address, pb.ROLE_DECODE, 60_000))
            await until(lambda: "draining" in router.heard, within_s=60)
            with pytest.raises(grpc.aio.AioRpcError, match="changing its role already"):
                await change(address, pb.ROLE_DECODE)
            process.send_signal(signal.SIGTERM)
            last = (await changing)[-1]
            assert (last.has_changed, last.has_ended) == (False, True)
            assert await process.wait() == 0

    run(scene)
