"""The registry that is embedded in a router: nodes announce themselves, the router hears whom to dial.

An entry that is not repeated within `ttl_s` is unlisted by a timer, with no new call arriving. Not here: the list (listing.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final, Protocol

from proto import baton_pb2 as pb
from proto.baton_pb2_grpc import RegistryServicer
from runtime.alarm import Alarm
from runtime.listing import Change, Listed, Listing, Missed
from runtime.logs import log_event
from runtime.session import Peer

if TYPE_CHECKING:
    from proto.baton_pb2_grpc import _ServicerContext

LOG = logging.getLogger(__name__)

TTL_S: Final = 1.5  # with the half second that a repetition may be under way, a dead node is gone within 2 s


class RegistryHandler(Protocol):
    """Hears of nodes, on the loop; must neither block nor raise."""

    def on_listed(self, entry: pb.NodeEntry) -> None:
        """This node process is there, or its entry has changed. A replaced process was unlisted before."""

    def on_missed(self, node: Peer) -> None:
        """This node process has not repeated itself; its session says whether it is alive."""

    def on_unlisted(self, node: Peer) -> None:
        """This node process has gone, or was replaced; that ends no session."""


def report(handler: RegistryHandler, changes: Iterable[Change]) -> None:
    """Tell the handler, and the log, what has changed."""
    for change in changes:
        if isinstance(change, Listed):
            entry = change.entry
            role = pb.Role.Name(entry.role)
            event = "node_draining" if entry.draining else "node_listed"
            log_event(LOG, logging.INFO, event, node=entry.node.name, role=role, grpc=entry.grpc_address)
            handler.on_listed(entry)
        elif isinstance(change, Missed):
            log_event(LOG, logging.INFO, "node_missed", node=change.peer.name)
            handler.on_missed(change.peer)
        else:
            log_event(LOG, logging.INFO, "node_unlisted", node=change.peer.name)
            handler.on_unlisted(change.peer)


class RegistryServer(RegistryServicer):
    """Servicer of `baton.Registry`. Make and use it on the running loop."""

    def __init__(self, handler: RegistryHandler, ttl_s: float = TTL_S) -> None:
        self._handler = handler
        self._ttl_s = ttl_s
        self._listing = Listing(ttl_s)
        self._loop = asyncio.get_running_loop()
        self._alarm = Alarm(self._loop, self._on_alarm)

    async def Register(self, request: pb.NodeEntry, context: _ServicerContext) -> pb.RegisterReply:
        """Take an entry or its repetition; a refusal is one sentence in the reply."""
        now = self._loop.time()
        report(self._handler, self._listing.expire(now))
        outcome = self._listing.register(request, now)
        if isinstance(outcome, str):
            log_event(LOG, logging.WARNING, "registration_refused", node=request.node.name[:64], reason=outcome)
            return pb.RegisterReply(refused=outcome)
        report(self._handler, outcome)
        self._alarm.arm(self._listing.next_deadline())
        return pb.RegisterReply(ttl_ms=round(self._ttl_s * 1000))

    async def Deregister(self, request: pb.PeerId, context: _ServicerContext) -> pb.DeregisterReply:
        """Forget a node process at its own wish."""
        report(self._handler, self._listing.deregister(Peer(request.name, request.incarnation)))
        return pb.DeregisterReply()

    async def List(self, request: pb.ListRequest, context: _ServicerContext) -> pb.ListReply:
        """Everything that is listed now."""
        report(self._handler, self._listing.expire(self._loop.time()))
        return pb.ListReply(nodes=self._listing.entries())

    def close(self) -> None:
        """End the timer."""
        self._alarm.cancel()

    def snapshot(self) -> Mapping[str, object]:
        """What is listed: address by node; JSON-able."""
        return {"nodes": {entry.node.name: entry.grpc_address for entry in self._listing.entries()}}

    def _on_alarm(self) -> None:
        report(self._handler, self._listing.expire(self._loop.time()))
        self._alarm.arm(self._listing.next_deadline())
