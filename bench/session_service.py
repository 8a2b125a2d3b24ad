"""A node's gRPC service of which nothing but sessions is ever asked: for nodes without a model, that hand no KV over."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from proto import baton_pb2 as pb
from proto import baton_pb2_grpc as pb_grpc
from runtime.session_server import SessionServer

if TYPE_CHECKING:
    from proto.baton_pb2_grpc import _MaybeAsyncIterator, _ServicerContext


class SessionService(pb_grpc.NodeServicer):
    """Routers' sessions with one node."""

    def __init__(self, sessions: SessionServer) -> None:
        self._sessions = sessions

    async def Session(  # type: ignore[override]  # the generated stub knows handlers that yield only
        self, request_iterator: _MaybeAsyncIterator[pb.Frame], context: _ServicerContext
    ) -> None:
        await self._sessions.Session(request_iterator, context)

    async def Reserve(self, request: pb.ReserveRequest, context: _ServicerContext) -> pb.ReserveReply:
        raise NotImplementedError

    async def Renew(self, request: pb.RenewRequest, context: _ServicerContext) -> pb.RenewReply:
        raise NotImplementedError

    async def Release(self, request: pb.ReleaseRequest, context: _ServicerContext) -> pb.ReleaseReply:
        raise NotImplementedError

    async def Drain(self, request: pb.DrainRequest, context: _ServicerContext) -> AsyncIterator[pb.DrainProgress]:
        yield pb.DrainProgress(has_ended=True)

    async def ChangeRole(self, request: pb.RoleRequest, context: _ServicerContext) -> AsyncIterator[pb.DrainProgress]:
        yield pb.DrainProgress(has_changed=True)
