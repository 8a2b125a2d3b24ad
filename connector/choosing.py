"""All transports of one node as one: each link takes the best way that both ends have and that gets there.

    receiver's lease names its endpoints, best first        [shm, nixl, zmq]
    sender opens a link with the first that it has and reaches    same host: shm, else nixl where both have it, else zmq; forced by
                                                                  giving a node one only
    a way that failed, or was closed for being stuck, before      comes last for a while: the peer may never let us in that way,
    it carried anything                                           or nothing gets through there

Which way a write comes in, it lands in the same leases of the same memory: the transports share one landing, so a block is written
once, and a lease becomes quiet once, over all of them. A link that fails does not turn to another way by itself: the handoff
decides what its failure means, and the next link is chosen anew. Not here: any bytes.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from threading import Lock
from typing import Final, Literal, NamedTuple, Protocol, cast

from connector import nixl_agent
from connector.copying import Bytes, StripeCopier
from connector.landing import Landing
from connector.nixl_transport import NixlTransport
from connector.shm_transport import ShmTransport
from connector.transport import (
    Answered,
    BlocksTaken,
    Emit,
    LeaseRef,
    LinkClosed,
    NotifyArrived,
    ReceiverEvent,
    SenderEvent,
    Transport,
)
from connector.zmq_options import LinkRules, Place
from connector.zmq_transport import ZmqTransport
from proto import baton_pb2 as pb

TransportChoice = Literal["auto", "shm", "zmq", "nixl"]

_LOG = logging.getLogger(__name__)

_MAX_ENDPOINTS: Final = 8  # of a peer that are looked at
_AVOID_S: Final = 10.0  # a way that led nowhere, if there is another one


class Wire(Transport, Protocol):
    """One transport, as it is chosen and watched."""

    @property
    def ended(self) -> tuple[Future[None], ...]:
        """Resolved when a thread has ended."""

    def reaches(self, endpoint: pb.Endpoint) -> bool:
        """Whether a link to there is worth opening; never blocks."""

    def snapshot(self) -> Mapping[str, object]:
        """JSON-able counters: `kv_bytes_sent` per peer, `links_refused`, those of the landing."""


@dataclass(frozen=True, slots=True)
class _ReplyTo:
    """A notification's sender, and the way it came."""

    transport: str
    reply_to: object


@dataclass(slots=True)
class _Way:
    """How a link goes, until LinkClosed."""

    transport: str
    address: str
    is_proven: bool = False  # something came back over it


class HostMemory(NamedTuple):
    """A node's KV as its transports have it."""

    bytes: Bytes  # [num_blocks, block_bytes] u8, contiguous
    descriptor: Callable[[], int]  # of the sealed memfd that it is, for shm; raises OSError where it cannot be sealed
    copier: StripeCopier | None = None  # as Landing


class ChoosingTransport:
    """Drives one or several transports over one landing; the methods are those of transport.Transport, but for endpoints.

    The loop thread calls every method, as there. `emit` is called from the transports' threads and from inside `open` and `revoke`.
    """

    def __init__(self, memory: Bytes, emit: Emit, copier: StripeCopier | None = None) -> None:
        """As Landing."""
        self.avoid_s = _AVOID_S
        self._landing = Landing(memory, emit, copier)
        self._emit = emit
        self._wires: dict[str, Wire] = {}  # by name, best first
        self._lock = Lock()
        self._ways: dict[str, _Way] = {}  # by link id
        self._avoided: dict[str, float] = {}  # address -> until when, in monotonic seconds

    def add(self, name: str, make: Callable[[Landing, Emit], Wire]) -> None:
        """Add the next best transport, made over this landing."""
        self._wires[name] = make(self._landing, lambda event: self._pass_on(name, event))

    @property
    def ended(self) -> tuple[Future[None], ...]:
        """Resolved when a thread has ended, whether of `stop` or of a bug: a node that is not stopping should die of it then."""
        return tuple(end for wire in self._wires.values() for end in wire.ended)

    def open(self, link_id: str, endpoints: Sequence[pb.Endpoint]) -> None:
        """Open a link to one of a receiver's endpoints, best first. Failure, also to find one, arrives as LinkClosed."""
        known = [each for each in endpoints[:_MAX_ENDPOINTS] if each.transport in self._wires]
        now = time.monotonic()
        with self._lock:
            self._avoided = {address: until for address, until in self._avoided.items() if until > now}
            known.sort(key=lambda each: each.address in self._avoided)
        for endpoint in known:
            wire = self._wires[endpoint.transport]
            if wire.reaches(endpoint):
                with self._lock:
                    self._ways[link_id] = _Way(endpoint.transport, endpoint.address)
                wire.open(link_id, endpoint)
                return
        offered = ", ".join(endpoint.transport[:16] for endpoint in endpoints[:_MAX_ENDPOINTS]) or "nothing"
        self._emit(
            LinkClosed(link_id, f"no way there: the receiver offers {offered}, this node has {', '.join(self._wires)}")
        )

    def write(self, link_id: str, lease: LeaseRef, blocks: Sequence[tuple[int, int]]) -> None:
        """As Sender.write."""
        if (wire := self._find_wire(link_id)) is not None:
            wire.write(link_id, lease, blocks)

    def drop(self, link_id: str, lease: LeaseRef) -> None:
        """As Sender.drop."""
        if (wire := self._find_wire(link_id)) is not None:
            wire.drop(link_id, lease)

    def notify(self, link_id: str, payload: bytes) -> None:
        """As Sender.notify."""
        if (wire := self._find_wire(link_id)) is not None:
            wire.notify(link_id, payload)

    def close(self, link_id: str) -> None:
        """As Sender.close."""
        if (wire := self._find_wire(link_id)) is not None:
            wire.close(link_id)

    def endpoints(self) -> list[pb.Endpoint]:
        """Where senders reach this node, best first."""
        return [wire.endpoint() for wire in self._wires.values()]

    def admit(self, lease_id: int, secret: bytes, block_ids: Sequence[int]) -> None:
        """As Receiver.admit, whichever way the writes come."""
        self._landing.admit(lease_id, secret, block_ids)

    def revoke(self, lease_id: int) -> None:
        """As Receiver.revoke; RevokeDone may be emitted before this returns."""
        self._landing.revoke(lease_id)

    def answer(self, reply_to: object, payload: bytes) -> None:
        """As Receiver.answer."""
        if not isinstance(reply_to, _ReplyTo):
            raise TypeError(f"{reply_to!r} is no reply_to of this transport")
        self._wires[reply_to.transport].answer(reply_to.reply_to, payload)

    def stop(self) -> None:
        """As Transport.stop, a second for each."""
        for wire in self._wires.values():
            wire.stop()

    def snapshot(self) -> Mapping[str, object]:
        """JSON-able: `kv_bytes_sent` and `kv_bytes_received` per peer over all ways, and which way each link goes."""
        sent: Counter[str] = Counter()
        sent_over: dict[str, int] = {}
        refused: dict[str, int] = {}
        for name, wire in self._wires.items():
            counts = wire.snapshot()
            by_peer = cast(Mapping[str, int], counts["kv_bytes_sent"])
            sent.update(by_peer)
            sent_over[name] = sum(by_peer.values())
            refused[name] = cast(int, counts["links_refused"])
        with self._lock:
            links = {link_id: way.transport for link_id, way in self._ways.items()}
        return {
            "kv_bytes_sent": dict(sorted(sent.items())),
            **self._landing.snapshot(),
            "transports": list(self._wires),
            "links": links,
            "bytes_sent_over": sent_over,
            "links_refused": refused,
        }

    def _find_wire(self, link_id: str) -> Wire | None:
        with self._lock:
            way = self._ways.get(link_id)
        return None if way is None else self._wires[way.transport]

    def _pass_on(self, name: str, event: SenderEvent | ReceiverEvent) -> None:
        """On a transport's thread."""
        if isinstance(event, NotifyArrived):
            event = replace(event, reply_to=_ReplyTo(name, event.reply_to))
        elif isinstance(event, LinkClosed):
            with self._lock:
                way = self._ways.pop(event.link_id, None)
                if way is not None and not way.is_proven:
                    self._avoided[way.address] = time.monotonic() + self.avoid_s
        elif isinstance(event, Answered) or (isinstance(event, BlocksTaken) and not event.is_dropped):
            with self._lock:
                if (way := self._ways.get(event.link_id)) is not None:
                    way.is_proven = True
        self._emit(event)


def choose_transports(
    choice: TransportChoice,
    host: HostMemory,
    me: tuple[str, int],
    emit: Emit,
    place: Place,
    *,
    is_encrypted: bool,
) -> ChoosingTransport:
    """A node's transport: shm, nixl, zmq for "auto", else the one; see their classes for what they raise.

    `me`: node id and incarnation. `place`: zmq's, and nixl's but that it takes a port of its own beside zmq. `is_encrypted`: zmq's
    links are; shm's bytes never leave the host. nixl has no such links: "auto" leaves it out then, and a node that is told to use
    it does not start (node/config.py).

    "auto" has nixl where it is installed and the host has RDMA: over TCP it is slower than zmq (bench/results/transport.md). A host
    without abstract unix sockets (a sandbox may forbid them) or without the seals that shm needs (Linux before 5.1) is no error for
    "auto", nor is a NIXL that does not run.
    """
    if choice == "nixl" and is_encrypted:
        raise ValueError("nixl encrypts nothing")
    memory, descriptor, copier = host
    node_id, incarnation = me
    with ExitStack() as undo:
        chosen = ChoosingTransport(memory, emit, copier)
        undo.callback(chosen.stop)
        if choice in ("auto", "shm"):
            try:
                chosen.add(
                    "shm",
                    lambda landing, tell: ShmTransport(memory, descriptor(), node_id, incarnation, tell, landing),
                )
            except OSError as fault:
                if choice == "shm":
                    raise
                _LOG.warning("event=transport_left_out transport=shm reason=%s", fault.strerror)
        if choice == "nixl" or (choice == "auto" and not is_encrypted and _is_worth_nixl()):
            try:
                at = place if choice == "nixl" else replace(place, port=0)
                chosen.add("nixl", lambda landing, tell: NixlTransport(memory, node_id, incarnation, tell, at, landing))
            except nixl_agent.NixlFault as fault:
                if choice == "nixl":
                    raise
                _LOG.warning("event=transport_left_out transport=nixl reason=%s", fault)
        if choice in ("auto", "zmq"):
            rules = LinkRules(is_encrypted=is_encrypted)
            chosen.add(
                "zmq",
                lambda landing, tell: ZmqTransport(memory, node_id, incarnation, tell, place, landing, rules),
            )
        undo.pop_all()
        return chosen


def _is_worth_nixl() -> bool:
    return nixl_agent.is_installed() and nixl_agent.has_rdma()
