"""The receiving end of the nixl transport: one listening socket, a NIXL agent per link, and the thread that has both.

    anybody   ──connect──► TCP, the link's own business; no byte of KV
    sender    ──HELLO────► link secret; then WELCOME with the agent that only this link has
    sender    ──ATTACH───► may it write into that lease? ATTACHED says where it lies
    sender    ──bytes────► into this node's memory, unasked (nixl_agent.py)
    sender    ──WRITE────► form (writes.decode_written) ──► right (Admissions) ──► checksum where it stands ──► events

A lease that ends while a link's sender may write into it is told to it (OVER), and quiet when it has STOPPED (one_sided.py). A link
that ends, or whose sender does not stop in time, loses its agent first: from then on nothing lands here from there, and its leases
are quiet. With an agent goes all that it knew, so no other link is hurt.

A sender that got in can write anywhere in this node's KV memory, and a broken one can harm it: nixl is for machines that trust each
other as far as that. Not here: who connects (accepting.py), links this node opens (nixl_sender.py).
"""

from __future__ import annotations

import secrets
import selectors
import socket
import time
from itertools import islice
from typing import Final

from google.protobuf.message import DecodeError

from connector.accepting import AcceptedLink, AcceptingReceiver, Stranger, checked_hello
from connector.copying import Bytes
from connector.landing import Landing
from connector.link_channel import MAX_HELLO_BYTES, Channel, ChannelBroken, Frame, FrameKind
from connector.link_names import node_name
from connector.nixl_agent import NixlAgent, NixlFault, NixlLibrary
from connector.nixl_socket import listen, prepare
from connector.one_sided import Attach, OneSidedWriters
from connector.receiver_thread import LeaseEnded, ReplyTo
from connector.transport import Emit, NotifyArrived, WriteRefused
from connector.writes import IncomingNotice, decode, decode_written
from connector.zmq_options import Place
from proto import baton_pb2 as pb

_STOP_S: Final = 5.0  # from OVER to STOPPED: blocks wait in quarantine meanwhile, and nobody else
_LOOK_AGAIN_S: Final = 50e-6  # while a sender moves bytes that only land if both ends drive them


class _Link(AcceptedLink):
    """With its agent."""

    def __init__(self, number: int, channel: Channel, peer: str, agent: NixlAgent) -> None:
        super().__init__(number, channel, peer)
        self.agent = agent
        self.is_moving = False
        self.must_stop_by: dict[int, float] = {}  # by lease that is over, earliest first: monotonic seconds


class NixlReceiver(AcceptingReceiver[_Link]):
    """Implements transport.Receiver on a socket of its own; `start` it once."""

    max_let_in = 1  # making an agent takes as long as moving many blocks

    def __init__(
        self, library: NixlLibrary, memory: Bytes, landing: Landing, emit: Emit, place: Place, checksums: bool = True
    ) -> None:
        """Raise OSError if `place` cannot be bound."""
        listener, self._address = listen(place)
        super().__init__("nixl", listener, landing, emit)
        self._library = library
        self._memory = memory
        self._has_checksums = checksums
        self._link_secret = secrets.token_bytes(16)
        self._writers = OneSidedWriters(landing)
        landing.tell_of_ends(lambda lease_id: self._mailbox.put(LeaseEnded(lease_id)))

    def endpoint(self) -> pb.Endpoint:
        """As Receiver.endpoint."""
        return pb.Endpoint(transport="nixl", address=self._address, link_secret=self._link_secret)

    def _seconds_to_work(self) -> float | None:
        if any(link.is_moving for link in self._links.values()):
            return 0.0
        instants = [at for link in self._links.values() for at in islice(link.must_stop_by.values(), 1)]
        return max(0.0, min(instants) - time.monotonic()) if instants else None

    def _may_knock(self, connection: socket.socket) -> bool:
        prepare(connection)
        return True

    def _greet(self, stranger: Stranger) -> _Link | None:
        frames = stranger.channel.receive(MAX_HELLO_BYTES)
        if not frames:
            return None
        try:
            return self._make_link(stranger, frames)
        except (ValueError, NixlFault) as flaw:
            raise ChannelBroken(str(flaw)) from None

    def _make_link(self, stranger: Stranger, frames: list[Frame]) -> _Link:
        """What the stranger is a link of, with WELCOME said; raises ValueError for one that it cannot be."""
        hello = checked_hello(frames, self._link_secret)
        if not stranger.channel.is_open_at_peer():
            raise ChannelBroken("it has given up")
        num_blocks, block_bytes = self._memory.shape
        agent = self._library.agent(f"{self._address}<{hello.sender}/{stranger.number}", self._memory)
        try:
            welcome = pb.LinkWelcome(
                agent=agent.metadata(),
                address=self._memory.ctypes.data,
                num_blocks=num_blocks,
                block_bytes=block_bytes,
            )
            stranger.channel.send(FrameKind.WELCOME, welcome.SerializeToString())
        except (NixlFault, ChannelBroken):
            agent.close()
            raise
        return _Link(stranger.number, stranger.channel, node_name(hello.sender), agent)

    def _take_turn(self, link: _Link, events: int) -> None:
        if events & selectors.EVENT_READ:
            for frame in link.channel.receive():
                link.is_moving = frame.kind is FrameKind.MOVING
                self._take(link, frame)
        if link.is_moving:
            self._drive(link)
        if any(time.monotonic() >= at for at in islice(link.must_stop_by.values(), 1)):
            raise ChannelBroken("its sender did not stop writing into a lease that is over")

    def _drive(self, link: _Link) -> None:
        try:
            link.agent.progress()
        except NixlFault as fault:
            raise ChannelBroken(str(fault)) from None
        time.sleep(_LOOK_AGAIN_S)

    def _take(self, link: _Link, frame: Frame) -> None:
        try:
            match frame.kind:
                case FrameKind.ATTACH:
                    attach = pb.Attach.FromString(frame.body)
                    found = self._writers.attach(link.number, Attach(attach.lease_id, attach.secret)).block_ids
                    answer = pb.Attached(is_admitted=found is not None, block_ids=found or ())
                    link.channel.keep(FrameKind.ATTACHED, answer.SerializeToString())
                case FrameKind.WRITE:
                    self._take_write(link, frame.body)
                case FrameKind.NOTICE:
                    self._take_notice(link, frame.body)
                case FrameKind.STOPPED:
                    lease_id = pb.LeaseOver.FromString(frame.body).lease_id
                    link.must_stop_by.pop(lease_id, None)
                    self._writers.stopped(link.number, lease_id)
                case FrameKind.MOVING:
                    pass
                case _:
                    raise ChannelBroken(f"the sender sent {frame.kind.name} out of turn")
        except DecodeError:
            raise ChannelBroken(f"the sender sent {frame.kind.name} that is none") from None

    def _take_write(self, link: _Link, header: bytes) -> None:
        arrived = decode_written(header)
        if isinstance(arrived, WriteRefused):
            self._landing.refuse(arrived)
        else:
            self._writers.written(arrived, link.peer, checksums=self._has_checksums)

    def _take_notice(self, link: _Link, body: bytes) -> None:
        arrived = decode([body])
        if isinstance(arrived, IncomingNotice):
            self._emit(NotifyArrived(ReplyTo(link.number), arrived.payload))
        elif isinstance(arrived, WriteRefused):
            self._landing.refuse(arrived)

    def _end_lease(self, lease_id: int) -> None:
        told = self._writers.end(lease_id)
        body = pb.LeaseOver(lease_id=lease_id).SerializeToString()
        for number in told:
            link = self._links.get(number) if isinstance(number, int) else None
            if link is not None:
                link.must_stop_by[lease_id] = time.monotonic() + _STOP_S
                self._say(link, FrameKind.OVER, body)

    def _let_go(self, link: _Link) -> None:
        link.agent.close()  # from here on nothing lands that its sender had under way
        self._writers.gone(link.number)
