"""The receiving end of the shm transport: one listening socket, and the thread that copies from senders' memory into leased blocks.

    anybody     ──connect──► other user: closed unread
    same user   ──HELLO───► link secret, memory looked over (peer_memory.py), mapped and populated, then WELCOME
    sender      ──WRITE───► form (writes.decode_described) ──► right (Admissions) ──► copied, hashed on the way ──► events, TAKEN

Memory is mapped once per link and unmapped with it; what an owner that died has left stays readable until then, so a Commit that
was under way still finds its blocks.

Not here: who connects (accepting.py), links this node opens, and why a late copy hurts only this end (shm_sender.py).
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket

from connector.accepting import AcceptedLink, AcceptingReceiver, Stranger, checked_hello
from connector.landing import Landing
from connector.link_channel import Channel, ChannelBroken, Frame, FrameKind
from connector.link_names import node_name
from connector.peer_memory import PeerMemory
from connector.receiver_thread import ReplyTo
from connector.shm_socket import is_same_user, listen
from connector.transport import Emit, NotifyArrived, WriteRefused
from connector.writes import IncomingNotice, decode, decode_described
from proto import baton_pb2 as pb


class _Link(AcceptedLink):
    """With the sender's memory."""

    def __init__(self, number: int, channel: Channel, peer: str, memory: PeerMemory) -> None:
        super().__init__(number, channel, peer)
        self.memory = memory


class ShmReceiver(AcceptingReceiver[_Link]):
    """Implements transport.Receiver on a socket of its own; `start` it once."""

    def __init__(self, landing: Landing, emit: Emit, checksums: bool = True) -> None:
        """Raise OSError where there are no abstract unix sockets."""
        listener, self._address = listen()
        super().__init__("shm", listener, landing, emit)
        self._has_checksums = checksums
        self._link_secret = secrets.token_bytes(16)

    def endpoint(self) -> pb.Endpoint:
        """As Receiver.endpoint."""
        return pb.Endpoint(transport="shm", address=self._address, link_secret=self._link_secret)

    def _seconds_to_work(self) -> float | None:
        return None if all(link.memory.is_populated for link in self._links.values()) else 0.0

    def _may_knock(self, connection: socket.socket) -> bool:
        if is_same_user(connection):
            return True
        self._refuse("another user's")
        return False

    def _greet(self, stranger: Stranger) -> _Link | None:
        """HELLO is small: it comes at once, or from nobody who means well."""
        arrived = stranger.channel.receive_hello()
        if arrived is None:
            return None
        frames, descriptor = arrived
        try:
            return self._find_link(stranger, frames, descriptor)
        except ValueError as flaw:
            raise ChannelBroken(str(flaw)) from None
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _find_link(self, stranger: Stranger, frames: list[Frame], descriptor: int | None) -> _Link:
        """What the stranger is a link of; raises ValueError for one that it cannot be."""
        hello = checked_hello(frames, self._link_secret)
        if descriptor is None:
            raise ValueError("a HELLO without a descriptor")
        memory = PeerMemory(descriptor, hello.num_blocks, hello.block_bytes)
        return _Link(stranger.number, stranger.channel, node_name(hello.sender), memory)

    def _take_turn(self, link: _Link, events: int) -> None:
        if not link.memory.is_populated and self._populate_some(link.memory):
            link.channel.send(FrameKind.WELCOME)
        if events & selectors.EVENT_READ:
            for frame in link.channel.receive():
                self._take(link, frame)

    def _populate_some(self, memory: PeerMemory) -> bool:
        try:
            return memory.populate_some()
        except ValueError as flaw:
            raise ChannelBroken(str(flaw)) from None

    def _take(self, link: _Link, frame: Frame) -> None:
        if not link.memory.is_populated or frame.kind not in (FrameKind.WRITE, FrameKind.NOTICE):
            raise ChannelBroken(f"the sender sent {frame.kind.name} out of turn")
        if frame.kind is FrameKind.WRITE:
            self._take_write(link, frame.body)
            link.channel.keep(FrameKind.TAKEN)  # refused or not, its source is looked at no more
            return
        arrived = decode([frame.body])
        if isinstance(arrived, IncomingNotice):
            self._emit(NotifyArrived(ReplyTo(link.number), arrived.payload))
        elif isinstance(arrived, WriteRefused):
            self._landing.refuse(arrived)

    def _take_write(self, link: _Link, header: bytes) -> None:
        arrived = decode_described(header, link.memory.bytes)
        if isinstance(arrived, WriteRefused):
            self._landing.refuse(arrived)
        elif (running := self._landing.begin(arrived, link.peer)) is not None:
            self._landing.finish(running, None if self._has_checksums else link.channel.is_open_at_peer)

    def _let_go(self, link: _Link) -> None:
        link.memory.release()
