"""The gRPC service of a node's process: every call goes to the incarnation that is there (node/service.py).

Between two of them, while the process takes another role, nobody serves: sessions are to be dialed again, Reserve is refused as by
a node that drains, and an operator is heard all the same. Not here: which one is there (node/process.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from node.pd_error import pd_error
from node.service import NodeService
from proto import baton_pb2 as pb
from proto import baton_pb2_grpc as pb_grpc
from proto.attempt_key import attempt_key
from runtime.session_driver import STATUS
from runtime.session_events import Fate

if TYPE_CHECKING:
    from proto.baton_pb2_grpc import _MaybeAsyncIterator, _ServicerContext

BETWEEN_ROLES = "the node takes another role"


class NodePort(pb_grpc.NodeServicer):
    """The servicer; on the loop's thread."""

    def __init__(self, name: str, first: NodeService) -> None:
        self._name = name
        self._service = first
        self._is_open = True

    def close(self) -> None:
        """The incarnation takes no calls any more but an operator's."""
        self._is_open = False

    def turn_to(self, service: NodeService) -> None:
        """The next one serves."""
        self._service, self._is_open = service, True

    async def Session(  # type: ignore[override]  # as NodeService.Session
        self, request_iterator: _MaybeAsyncIterator[pb.Frame], context: _ServicerContext
    ) -> None:
        """See NodeService."""
        if not self._is_open:
            await context.abort(STATUS[Fate.ENDED], BETWEEN_ROLES)
        await self._service.Session(request_iterator, context)

    async def Reserve(self, request: pb.ReserveRequest, context: _ServicerContext) -> pb.ReserveReply:
        """See NodeService."""
        if not self._is_open:
            error = pd_error(pb.DRAINING, BETWEEN_ROLES, attempt_key(request.key), self._name)
            return pb.ReserveReply(error=error)
        return await self._service.Reserve(request, context)

    async def Renew(self, request: pb.RenewRequest, context: _ServicerContext) -> pb.RenewReply:
        """See NodeService."""
        return await self._service.Renew(request, context) if self._is_open else pb.RenewReply(life_ms=0)

    async def Release(self, request: pb.ReleaseRequest, context: _ServicerContext) -> pb.ReleaseReply:
        """See NodeService."""
        return await self._service.Release(request, context) if self._is_open else pb.ReleaseReply()

    async def Drain(self, request: pb.DrainRequest, context: _ServicerContext) -> AsyncIterator[pb.DrainProgress]:
        """See NodeService."""
        async for progress in self._service.Drain(request, context):
            yield progress

    async def ChangeRole(self, request: pb.RoleRequest, context: _ServicerContext) -> AsyncIterator[pb.DrainProgress]:
        """See NodeService."""
        async for progress in self._service.ChangeRole(request, context):
            yield progress
