"""The receiving end of the shm transport: one listening socket, and the thread that copies from senders' memory into leased blocks.

    anybody     ──connect──► other user: closed unread
    same user   ──HELLO───► link secret, memory looked over (peer_memory.py), mapped and populated, then WELCOME
    sender      ──WRITE───► form (writes.decode_described) ──► right (Admissions) ──► copy ──► checksum ──► events, TAKEN

One thread serves all connections, so the events of a link come in the order in which its frames did. It sleeps in the poll. Memory
is mapped once per link and unmapped with it; what an owner that died has left stays readable until then, so a Commit that was
under way still finds its blocks.

Not here: links this node opens, and why a late copy hurts only this end (shm_sender.py).
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import selectors
import time
from typing import Final

from google.protobuf.message import DecodeError

from connector.landing import Landing
from connector.link_names import is_name, node_name
from connector.peer_memory import PeerMemory
from connector.receiver_thread import ReceiverThread, Reply, ReplyTo
from connector.shm_channel import Channel, ChannelBroken, ChannelEnded, Frame, FrameKind
from connector.shm_socket import is_same_user, listen
from connector.transport import Emit, NotifyArrived, WriteRefused
from connector.writes import IncomingNotice, decode, decode_described
from proto import baton_pb2 as pb

_LOG = logging.getLogger(__name__)

_HELLO_S: Final = 1.0  # from connect to HELLO
_MAX_STRANGERS: Final = 64  # connections that have not said HELLO yet
_ACCEPTS_PER_TURN: Final = 64
_ACCEPT_AGAIN_S: Final = 0.1  # while the process has no descriptor left


class _Stranger:
    """A connection of which nothing is known but its user."""

    __slots__ = ("channel", "must_greet_by", "number")

    def __init__(self, number: int, channel: Channel, must_greet_by: float) -> None:
        self.number = number
        self.channel = channel
        self.must_greet_by = must_greet_by  # monotonic seconds


class _Link:
    """A connection whose sender knew the link secret."""

    __slots__ = ("channel", "memory", "number", "peer")

    def __init__(self, number: int, channel: Channel, peer: str, memory: PeerMemory) -> None:
        self.number = number
        self.channel = channel
        self.peer = peer
        self.memory = memory


class ShmReceiver(ReceiverThread):
    """Implements transport.Receiver on a socket of its own; `start` it once."""

    def __init__(self, landing: Landing, emit: Emit, checksums: bool = True) -> None:
        """Raise OSError where there are no abstract unix sockets."""
        self._listener, self._address = listen()
        super().__init__("shm-receiver", landing, emit)  # has descriptors of its own: behind what may fail
        self._has_checksums = checksums
        self._link_secret = secrets.token_bytes(16)
        self._connections: dict[int, _Stranger | _Link] = {}
        self._num_accepted = 0
        self._num_refused = 0
        self._accept_again_at: float | None = None  # monotonic seconds; until then nobody is listened to
        self._selector = selectors.DefaultSelector()

    def endpoint(self) -> pb.Endpoint:
        """As Receiver.endpoint."""
        return pb.Endpoint(transport="shm", address=self._address, link_secret=self._link_secret)

    @property
    def num_refused(self) -> int:
        """Handshakes refused."""
        return self._num_refused

    def _serve(self) -> None:
        self._selector.register(self._mailbox, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        while self._is_running:
            ready = {key.data: events for key, events in self._selector.select(self._timeout_s())}
            if None in ready:  # a command, or somebody who knocks
                self._perform_commands()
            if None in ready or self._accept_again_at is not None:
                self._accept()
            for connection in tuple(self._connections.values()):
                self._serve_connection(connection, ready.get(connection.number, 0))

    def _close_all(self) -> None:
        for connection in self._connections.values():
            self._let_go(connection)
        self._connections.clear()
        self._listener.close()
        self._selector.close()

    def _timeout_s(self) -> float | None:
        """Until the next thing is overdue, 0 while memory is to be populated; None: sleep until something happens."""
        connections = self._connections.values()
        if any(isinstance(each, _Link) and not each.memory.is_populated for each in connections):
            return 0.0
        instants = [each.must_greet_by for each in connections if isinstance(each, _Stranger)]
        if self._accept_again_at is not None:
            instants.append(self._accept_again_at)
        return max(0.0, min(instants) - time.monotonic()) if instants else None

    def _accept(self) -> None:
        """Let in whoever waits and is of the same user, as far as there is room for those who say nothing."""
        if self._accept_again_at is not None:
            if time.monotonic() < self._accept_again_at:
                return
            self._accept_again_at = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        num_strangers = sum(isinstance(each, _Stranger) for each in self._connections.values())
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as fault:  # no descriptor left: who waits stays in the backlog, and the poll must not spin
                _LOG.warning("event=accept_failed transport=shm reason=%s", fault.strerror)
                self._selector.unregister(self._listener)
                self._accept_again_at = time.monotonic() + _ACCEPT_AGAIN_S
                return
            if not is_same_user(connection):
                self._refuse("another user's")
                connection.close()
                continue
            connection.setblocking(False)
            self._num_accepted += 1
            stranger = _Stranger(self._num_accepted, Channel(connection), time.monotonic() + _HELLO_S)
            self._connections[stranger.number] = stranger
            self._selector.register(stranger.channel, selectors.EVENT_READ, stranger.number)
            self._serve_connection(stranger, selectors.EVENT_READ)  # who means well has said HELLO already
            if self._connections.get(stranger.number) is stranger:
                num_strangers += 1
                if num_strangers > _MAX_STRANGERS:
                    self._refuse("too many at once")
                    self._drop(stranger, "too many at once")

    def _perform(self, command: Reply) -> None:
        if not isinstance(number := command.to.connection, int) or (link := self._connections.get(number)) is None:
            return
        try:
            link.channel.send(FrameKind.ANSWER, command.payload)
        except ChannelBroken as broken:
            self._drop(link, str(broken))
        else:
            self._watch(link)

    def _serve_connection(self, connection: _Stranger | _Link, events: int) -> None:
        """One connection's turn."""
        try:
            if isinstance(connection, _Link):
                self._serve_link(connection, events)
            elif events & selectors.EVENT_READ:
                self._greet(connection)
            elif time.monotonic() >= connection.must_greet_by:
                raise ChannelBroken("no HELLO in time")
        except ChannelBroken as broken:
            # A stranger that leaves without a word only wanted to know whether somebody is here (ShmTransport.reaches).
            if isinstance(connection, _Stranger) and not isinstance(broken, ChannelEnded):
                self._refuse(str(broken))
            self._drop(connection, str(broken))

    def _greet(self, stranger: _Stranger) -> None:
        """Read HELLO, if it is there, in full (it is small: it comes at once or from nobody who means well)."""
        arrived = stranger.channel.receive_hello()
        if arrived is None:
            return
        frames, descriptor = arrived
        try:
            link = self._find_link(stranger, frames, descriptor)
        except ValueError as flaw:
            raise ChannelBroken(str(flaw)) from None
        finally:
            if descriptor is not None:
                os.close(descriptor)
        self._connections[link.number] = link
        _LOG.info("event=link_accepted sender=%s transport=shm", link.peer)

    def _find_link(self, stranger: _Stranger, frames: list[Frame], descriptor: int | None) -> _Link:
        """What the stranger is a link of; raises ValueError for one that it cannot be."""
        if len(frames) != 1 or frames[0].kind is not FrameKind.HELLO or descriptor is None:
            raise ValueError("not one HELLO with one descriptor")
        try:
            hello = pb.LinkHello.FromString(frames[0].body)
        except DecodeError:
            raise ValueError("a HELLO that is no LinkHello") from None
        if not hmac.compare_digest(hello.link_secret, self._link_secret):
            raise ValueError("wrong link secret")
        if not is_name(hello.sender):
            raise ValueError("no name for a node")
        memory = PeerMemory(descriptor, hello.num_blocks, hello.block_bytes)
        return _Link(stranger.number, stranger.channel, node_name(hello.sender), memory)

    def _serve_link(self, link: _Link, events: int) -> None:
        if not link.memory.is_populated and self._populate_some(link.memory):
            link.channel.send(FrameKind.WELCOME)
        if events & selectors.EVENT_READ:
            for frame in link.channel.receive():
                self._take(link, frame)
        if link.channel.has_unsent:
            link.channel.flush()
        self._watch(link)

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

    def _watch(self, connection: _Stranger | _Link) -> None:
        """Poll for what the connection waits for."""
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.channel.has_unsent else 0)
        self._selector.modify(connection.channel, wanted, connection.number)

    def _refuse(self, reason: str) -> None:
        self._num_refused += 1
        _LOG.warning("event=link_refused transport=shm reason=%s", reason)

    def _drop(self, connection: _Stranger | _Link, reason: str) -> None:
        del self._connections[connection.number]
        self._selector.unregister(connection.channel)
        self._let_go(connection)
        if isinstance(connection, _Link):
            _LOG.info("event=link_ended transport=shm sender=%s reason=%s", connection.peer, reason)

    def _let_go(self, connection: _Stranger | _Link) -> None:
        connection.channel.close()
        if isinstance(connection, _Link):
            connection.memory.release()
