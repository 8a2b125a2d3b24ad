"""The node's gRPC service: what routers and other nodes call.

Everything received is checked before the core hears of it: is it meant for this process, does this role take it, is it sound
(node/validate.py). A Reserve that fails gets a PD Error that names the field, so that the attempt ends at once; the other two
calls fail with INVALID_ARGUMENT. Not here: the sessions (node/routers.py), and any decision.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from itertools import count
from typing import TYPE_CHECKING

import grpc

from node.drain import Answer
from node.ending import Ending
from node.events import Event, ReleaseAsked, RenewAsked, ReserveAsked
from node.grammar_gate import GrammarGate
from node.identity import NodeIdentity
from node.metrics import Counters
from node.pd_error import pd_error
from node.roles import role_named
from node.validate import MAX_ID_BYTES, Bounds, release_problem, renew_problem, reserve_problem
from proto import baton_pb2 as pb
from proto import baton_pb2_grpc as pb_grpc
from proto.attempt_key import attempt_key
from runtime.logs import log_event
from runtime.session import Peer
from runtime.session_server import SessionServer

if TYPE_CHECKING:
    from proto.baton_pb2_grpc import _MaybeAsyncIterator, _ServicerContext

LOG = logging.getLogger(__name__)


class PendingCalls:
    """Calls of other nodes that the core has not answered yet, by call id."""

    def __init__(self) -> None:
        self._ids = count(1)
        self._reserves: dict[int, asyncio.Future[pb.ReserveReply | None]] = {}
        self._renews: dict[int, asyncio.Future[pb.RenewReply]] = {}

    async def reserve(self, request: pb.ReserveRequest, post: Callable[[Event], None]) -> pb.ReserveReply | None:
        """Ask the core and wait for its answer; the caller's time limit ends the wait by cancelling it. None: see `close`."""
        call_id = next(self._ids)
        answer: asyncio.Future[pb.ReserveReply | None] = asyncio.get_running_loop().create_future()
        self._reserves[call_id] = answer
        post(ReserveAsked(call_id, request))
        try:
            return await answer
        finally:
            del self._reserves[call_id]

    async def renew(self, request: pb.RenewRequest, post: Callable[[Event], None]) -> pb.RenewReply:
        """As `reserve`."""
        call_id = next(self._ids)
        answer: asyncio.Future[pb.RenewReply] = asyncio.get_running_loop().create_future()
        self._renews[call_id] = answer
        post(RenewAsked(call_id, request))
        try:
            return await answer
        finally:
            del self._renews[call_id]

    def answer_reserve(self, call_id: int, reply: pb.ReserveReply) -> None:
        """Answer a ReserveAsked; nothing happens if the caller hung up meanwhile (its lease then ends by Release or expiry)."""
        answer = self._reserves.get(call_id)
        if answer is not None and not answer.done():
            answer.set_result(reply)

    def answer_renew(self, call_id: int, reply: pb.RenewReply) -> None:
        """Answer a RenewAsked; nothing happens if the caller hung up meanwhile."""
        answer = self._renews.get(call_id)
        if answer is not None and not answer.done():
            answer.set_result(reply)

    def close(self) -> None:
        """The core hears no more, and what it has not read is nobody's: it holds nothing."""
        for reserve in self._reserves.values():
            if not reserve.done():
                reserve.set_result(None)
        for renew in self._renews.values():
            if not renew.done():
                renew.set_result(pb.RenewReply(life_ms=0))


class NodeService(pb_grpc.NodeServicer):
    """What one incarnation serves; on the loop's thread, like everything that decides."""

    def __init__(
        self,
        identity: NodeIdentity,
        bounds: Bounds,
        counters: Counters,
        gate: GrammarGate,
        sessions: SessionServer,
        calls: PendingCalls,
        ending: Ending,
    ) -> None:
        self._identity = identity
        self._bounds = bounds
        self._counters = counters
        self._gate = gate
        self._sessions = sessions
        self._calls = calls
        self._ending = ending

    async def Session(  # type: ignore[override]  # grpc.aio also takes a coroutine that writes to the context
        self, request_iterator: _MaybeAsyncIterator[pb.Frame], context: _ServicerContext
    ) -> None:
        """One stream of a router's session."""
        await self._sessions.Session(request_iterator, context)

    async def Reserve(self, request: pb.ReserveRequest, context: _ServicerContext) -> pb.ReserveReply:
        """Ask for blocks; the core answers at once with a lease or a PD Error."""
        if request.to_incarnation != self._identity.incarnation:
            self._counters.count("wrong_incarnation")
            # Retryable: whoever was meant holds nothing any more, and the router soon knows that it is gone.
            return self._refused(
                request, pb.TRANSFER_FAILED, "Reserve is meant for an earlier process at this address", True
            )
        problem = reserve_problem(request, self._bounds)
        if problem is not None:
            self._malformed("Reserve", request.key, problem)
            return self._refused(request, pb.INTERNAL, problem, False)
        flaw = None
        if self._knows_router(request) and request.HasField("grammar"):
            flaw = await self._gate.flaw(request)
        if not self._knows_router(request):  # asked behind the wait: it may have been lost meanwhile
            # Its tokens would reach nobody, and nobody would ever cancel it.
            return self._refused(request, pb.BUSY, "there is no session with the attempt's router", True)
        if flaw is not None:
            return self._refused(request, flaw.code, flaw.reason, flaw.code == pb.BUSY)
        reply = await self._calls.reserve(request, self._gate.post)
        return self._refused(request, pb.DRAINING, "the node takes another role", True) if reply is None else reply

    def _knows_router(self, request: pb.ReserveRequest) -> bool:
        return self._sessions.knows(Peer(request.router.name, request.router.incarnation))

    async def Renew(self, request: pb.RenewRequest, context: _ServicerContext) -> pb.RenewReply:
        """Keep a lease alive; a life of 0 says that there is none."""
        if request.to_incarnation != self._identity.incarnation:
            self._counters.count("wrong_incarnation")
            return pb.RenewReply(life_ms=0)
        problem = renew_problem(request, self._bounds)
        if problem is not None:
            self._malformed("Renew", request.key, problem)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)
        return await self._calls.renew(request, self._gate.post)

    async def Release(self, request: pb.ReleaseRequest, context: _ServicerContext) -> pb.ReleaseReply:
        """Give an attempt's lease back. Acknowledged on arrival: what it asks for cannot fail."""
        if request.to_incarnation != self._identity.incarnation:
            self._counters.count("wrong_incarnation")  # the lease went with its process
            return pb.ReleaseReply()
        problem = release_problem(request, self._bounds)
        if problem is not None:
            self._malformed("Release", request.key, problem)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)
        self._gate.post(ReleaseAsked(request))
        return pb.ReleaseReply()

    async def Drain(self, request: pb.DrainRequest, context: _ServicerContext) -> AsyncIterator[pb.DrainProgress]:
        """End without a loss, and tell how far it is until then. Who hangs up stops nothing."""
        if request.to_incarnation not in (0, self._identity.incarnation):  # 0: called by its address
            self._counters.count("wrong_incarnation")
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "Drain is meant for another process")
        self._ending.ask("operator", request.timeout_ms / 1000 if request.HasField("timeout_ms") else None)
        async for progress in self._ending.watch():
            yield progress

    async def ChangeRole(self, request: pb.RoleRequest, context: _ServicerContext) -> AsyncIterator[pb.DrainProgress]:
        """Serve in another role, and tell how far it is until then. Who hangs up stops nothing."""
        if request.to_incarnation not in (0, self._identity.incarnation):
            self._counters.count("wrong_incarnation")
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "ChangeRole is meant for another process")
        role = role_named(request.role)
        if role is None:
            self._counters.count("malformed_messages")
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"role: {request.role}, there is none such")
        answer = self._ending.ask_role(role, request.timeout_ms / 1000 if request.HasField("timeout_ms") else None)
        if answer is Answer.HAS_IT:
            yield pb.DrainProgress(has_changed=True)
            return
        if answer is not Answer.BEGUN:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, answer.value)
        async for progress in self._ending.watch_change():
            yield progress

    def _malformed(self, call: str, key: pb.AttemptKey, problem: str) -> None:
        self._counters.count("malformed_messages")
        named = {"request": key.request_id[:MAX_ID_BYTES], "node": self._identity.name}
        log_event(LOG, logging.WARNING, "call_refused", call=call, **named, problem=problem)

    def _refused(
        self, request: pb.ReserveRequest, code: pb.ErrorCode.ValueType, reason: str, is_retryable: bool
    ) -> pb.ReserveReply:
        """The core counts those that it answers itself."""
        self._counters.count(f"reserve_refused_{pb.ErrorCode.Name(code).lower()}")
        error = pd_error(code, reason, attempt_key(request.key), self._identity.name)
        error.retryable = is_retryable
        return pb.ReserveReply(error=error)
