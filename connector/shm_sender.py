"""The sending end of the shm transport: one connection per link, one thread for all of them.

    opening ──HELLO, WELCOME──► open ──► gone        LinkClosed exactly once, then nothing of the link is left
       └── refused, or time over ────────►┘

A link's writes wait in its own queue as descriptions. A few at a time are told to the receiver, which copies from this node's
memory; a source block is taken when the receiver has said that it will not look at it again.

**Quiet.** A link that is closed, by whichever end, is quiet at once, though its receiver may still copy: it has the memory mapped,
and a stopped process may go on in an hour. That copy reads blocks which by then may be another request's. It cannot harm them (the
mapping is read-only). It can only spoil the copier's own lease: the checksum that came with the write is of the bytes as they were
when they were lent, it is compared with what arrived, and a lease whose write did not match is never committed. Bytes that do match
are the right ones, however late. Where checksums are switched off, the receiver asks instead, behind each copy, whether the link
still stands: its socket is closed before LinkClosed is said, and only then can a block that was not taken get another owner.

There are no heartbeats: the kernel tells the death of a peer at once, and a peer that lives and says nothing is the business of
deadlines, leases and sessions. Not here: what arrives at this node (shm_receiver.py).
"""

from __future__ import annotations

import selectors
import time
from collections import deque
from typing import Final, Never

from connector.copying import Bytes
from connector.link_channel import Channel, ChannelBroken, FrameKind
from connector.sender_thread import SenderLink, SenderThread
from connector.shm_socket import find_connection
from connector.transport import Answered, Emit
from connector.writes import MAX_FRAME_BYTES, OutgoingWrite, describe, with_rest
from proto import baton_pb2 as pb

_MIN_MESSAGE_BYTES: Final = 8 << 20
_MAX_MESSAGE_BYTES: Final = 32 << 20  # 2 ms to copy, for which the receiver's other links wait
_MAX_IN_FLIGHT: Final = 4  # write messages that the receiver has not yet dealt with
_OPEN_S: Final = 1.8  # from connect to WELCOME, under the 2 s in which a dead node must be found
_OPEN_S_PER_BYTE: Final = 1 / (2 << 30)  # more, as mapping takes its time


def message_bytes(write_bytes: int) -> int:
    """How much of a write of so many bytes a message describes, at most: a half, so that one is hashed while another is copied.

    Fewer are better: each costs both ends the same, whatever its size.
    """
    return min(max(write_bytes // 2, _MIN_MESSAGE_BYTES), _MAX_MESSAGE_BYTES)


class _Link(SenderLink):
    """With its connection, and what its receiver may be reading."""

    def __init__(self, link_id: str, channel: Channel, must_open_by: float) -> None:
        super().__init__(link_id, must_open_by)
        self.channel = channel
        self.in_flight: deque[OutgoingWrite] = deque()

    @property
    def can_send_next(self) -> bool:
        """Whether the queue's head may go out now."""
        if not self.is_open or not self.queue or self.channel.has_unsent:
            return False
        return isinstance(self.queue[0], bytes) or len(self.in_flight) < _MAX_IN_FLIGHT


class ShmSender(SenderThread[_Link, Never]):
    """Implements transport.Sender; `start` it once. Bytes sent are those that receivers were told to copy."""

    def __init__(self, memory: Bytes, descriptor: int, user_name: str, emit: Emit, checksums: bool = True) -> None:
        super().__init__("shm-sender", memory, emit, message_bytes)
        self._descriptor = descriptor
        self._user_name = user_name
        self._has_checksums = checksums
        self._selector = selectors.DefaultSelector()

    def _serve(self) -> None:
        self._selector.register(self._mailbox, selectors.EVENT_READ)
        while self._is_running:
            ready = {key.data: events for key, events in self._selector.select(self._seconds_to_overdue())}
            if None in ready:
                self._perform_commands()
            self._end_nameless()
            for link in tuple(self._links.values()):
                self._serve_link(link, ready.get(link.link_id, 0))

    def _close_all(self) -> None:
        for link in self._links.values():
            link.channel.close()
        self._selector.close()

    def _connect(self, link_id: str, endpoint: pb.Endpoint) -> _Link | str:
        connection = find_connection(endpoint)
        if connection is None:
            return "could not connect"
        channel = Channel(connection)
        num_blocks, block_bytes = self._memory.shape
        hello = pb.LinkHello(
            sender=self._user_name,
            link_secret=endpoint.link_secret,
            num_blocks=num_blocks,
            block_bytes=block_bytes,
        )
        try:
            channel.send_hello(hello.SerializeToString(), self._descriptor)
        except ChannelBroken as broken:
            channel.close()
            return str(broken)
        patience_s = _OPEN_S + self._memory.nbytes * _OPEN_S_PER_BYTE
        self._selector.register(channel, selectors.EVENT_READ, link_id)
        return _Link(link_id, channel, time.monotonic() + patience_s)

    def _serve_link(self, link: _Link, events: int) -> None:
        """Give a link its turn: what arrived, what is unsent, then as many messages as may be in flight."""
        try:
            if events & selectors.EVENT_READ:
                for kind, body in link.channel.receive():
                    self._take(link, kind, body)
            if not link.is_open and time.monotonic() >= link.must_open_by:
                raise ChannelBroken("no handshake in time")
            if events & selectors.EVENT_WRITE:
                link.channel.flush()
            while link.can_send_next:  # the socket mostly takes them: asking it first would cost a poll for each
                self._send_next(link)
        except ChannelBroken as broken:
            self._drop(link, str(broken) if link.is_open else f"not let in: {broken}")
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.channel.has_unsent else 0)
        self._selector.modify(link.channel, wanted, link.link_id)

    def _take(self, link: _Link, kind: FrameKind, body: bytes) -> None:
        if kind is FrameKind.WELCOME and not link.is_open:
            link.is_open = True
        elif kind is FrameKind.TAKEN and link.in_flight:
            self._taken(link, link.in_flight.popleft())
        elif kind is FrameKind.ANSWER and link.is_open:
            self._emit(Answered(link.link_id, body))
        else:
            raise ChannelBroken(f"the peer sent {kind.name} out of turn")

    def _send_next(self, link: _Link) -> None:
        message = link.queue.popleft()
        if isinstance(message, bytes):
            if len(message) > MAX_FRAME_BYTES:
                raise ChannelBroken(f"a notification of {len(message)} bytes, {MAX_FRAME_BYTES} allowed")
            link.channel.send(FrameKind.NOTICE, message)
            return
        link.in_flight.append(message)
        self._bytes_to.add(link.peer, sum(span.length for span in message.spans))
        link.channel.send(FrameKind.WRITE, describe(self._memory, message, self._has_checksums))

    def _tell_behind(self, link: _Link, rest: OutgoingWrite) -> None:
        for place, write in reversed(tuple(enumerate(link.in_flight))):
            if write.lease == rest.lease:
                link.in_flight[place] = with_rest(write, rest)
                return
        self._taken(link, rest)

    def _disconnect(self, link: _Link) -> None:
        self._selector.unregister(link.channel)
        link.channel.close()
