"""A gRPC server of a member of a cluster, which counts who is answered, and how one call to it ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio

from proto import baton_pb2 as pb
from proto.baton_pb2_grpc import RegistryServicer, RegistryStub, add_RegistryServicer_to_server
from runtime.credentials import Credentials


class Asked(RegistryServicer):
    """Answers, and counts."""

    def __init__(self) -> None:
        self.times = 0

    async def Register(self, request: pb.NodeEntry, context: object) -> pb.RegisterReply:
        raise AssertionError("nobody registers")

    async def Deregister(self, request: pb.PeerId, context: object) -> pb.DeregisterReply:
        raise AssertionError("nobody deregisters")

    async def List(self, request: pb.ListRequest, context: object) -> pb.ListReply:
        self.times += 1
        return pb.ListReply()


@asynccontextmanager
async def grpc_server(credentials: Credentials, host: str = "127.0.0.1") -> AsyncIterator[tuple[str, Asked]]:
    server, asked = grpc.aio.server(), Asked()
    add_RegistryServicer_to_server(asked, server)
    address = f"127.0.0.1:{credentials.bind(server, f'{host}:0')}"
    await server.start()
    try:
        yield address, asked
    finally:
        await server.stop(0)


async def code_of(channel: grpc.aio.Channel, timeout: float = 60) -> grpc.StatusCode:
    """How one call ends."""
    async with channel:
        try:
            await RegistryStub(channel).List(pb.ListRequest(), timeout=timeout)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK
