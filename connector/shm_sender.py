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

import logging
import selectors
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread
from typing import Final

from connector.link_names import node_name
from connector.mailbox import Mailbox
from connector.shm_channel import Channel, ChannelBroken, FrameKind
from connector.shm_socket import find_connection
from connector.tally import Tally
from connector.transport import Answered, BlocksTaken, Emit, LeaseRef, LinkClosed
from connector.writes import MAX_FRAME_BYTES, Bytes, OutgoingWrite, describe, pack
from proto import baton_pb2 as pb

_LOG = logging.getLogger(__name__)

_MAX_WRITE_BYTES: Final = (
    8 << 20
)  # of one write message: its own cost, mostly of waking the peer, is little beside the copy
_MAX_IN_FLIGHT: Final = 4  # write messages that the receiver has not yet dealt with
_OPEN_S: Final = (
    1.8  # from connect to WELCOME, under the 2 s in which a dead node must be found; and, as mapping takes its time,
)
_OPEN_S_PER_BYTE: Final = 1 / (2 << 30)


@dataclass(frozen=True, slots=True)
class _Open:
    link_id: str
    endpoint: pb.Endpoint


@dataclass(frozen=True, slots=True)
class _Write:
    link_id: str
    lease: LeaseRef
    blocks: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Notify:
    link_id: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class _Close:
    link_id: str


class _Stop:
    """Ends the thread."""


_Command = _Open | _Write | _Notify | _Close | _Stop


class _Link:
    """A link's connection, what waits for it, and what its receiver may be reading."""

    __slots__ = ("channel", "in_flight", "is_open", "link_id", "must_open_by", "peer", "queue")

    def __init__(self, link_id: str, channel: Channel, must_open_by: float) -> None:
        self.link_id = link_id
        self.peer = node_name(link_id)
        self.channel = channel
        self.queue: deque[OutgoingWrite | bytes] = deque()
        self.in_flight: deque[OutgoingWrite] = deque()
        self.must_open_by = must_open_by  # monotonic seconds
        self.is_open = False

    @property
    def can_send_next(self) -> bool:
        """Whether the queue's head may go out now."""
        if not self.is_open or not self.queue or self.channel.has_unsent:
            return False
        return isinstance(self.queue[0], bytes) or len(self.in_flight) < _MAX_IN_FLIGHT


class ShmSender:
    """Implements transport.Sender; `start` it once."""

    def __init__(self, memory: Bytes, descriptor: int, user_name: str, emit: Emit, checksums: bool = True) -> None:
        self._memory = memory
        self._descriptor = descriptor
        self._user_name = user_name
        self._emit = emit
        self._has_checksums = checksums
        self._mailbox: Mailbox[_Command] = Mailbox()
        self._selector = selectors.DefaultSelector()
        self._links: dict[str, _Link] = {}
        self._bytes_to = Tally()
        self._is_running = True
        self.ended: Future[None] = Future()  # resolved when the thread has ended, whyever
        self._thread = Thread(target=self._run, name="shm-sender", daemon=True)

    def start(self) -> None:
        """Begin to serve links."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Close the sockets and end the thread; False if it did not end in time."""
        self._mailbox.put(_Stop())
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._mailbox.close()
        return True

    def open(self, link_id: str, endpoint: pb.Endpoint) -> None:
        """As Sender.open."""
        self._mailbox.put(_Open(link_id, endpoint))

    def write(self, link_id: str, lease: LeaseRef, blocks: Sequence[tuple[int, int]]) -> None:
        """As Sender.write; raises ValueError for a source block that does not exist."""
        num_blocks = self._memory.shape[0]
        if any(not 0 <= block_id < num_blocks for _, block_id in blocks):
            raise ValueError(f"a source block is outside 0..{num_blocks - 1}")
        self._mailbox.put(_Write(link_id, lease, tuple(blocks)))

    def notify(self, link_id: str, payload: bytes) -> None:
        """As Sender.notify; a payload that the receiver would not take, over MAX_FRAME_BYTES, ends the link."""
        self._mailbox.put(_Notify(link_id, payload))

    def close(self, link_id: str) -> None:
        """As Sender.close."""
        self._mailbox.put(_Close(link_id))

    def snapshot(self) -> Mapping[str, object]:
        """Bytes that receivers were told to copy, per receiving node; links."""
        return {"kv_bytes_sent": self._bytes_to.snapshot(), "links": len(self._links)}

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            self._selector.register(self._mailbox, selectors.EVENT_READ)
            while self._is_running:
                ready = {key.data: events for key, events in self._selector.select(self._timeout_s())}
                for command in self._mailbox.drain() if None in ready else ():
                    self._perform(command)
                for link in tuple(self._links.values()):
                    self._serve(link, ready.get(link.link_id, 0))
        finally:  # an exception is a bug; it goes on to threading.excepthook
            for link in self._links.values():
                link.channel.close()
            self._selector.close()
            self.ended.set_result(None)

    def _timeout_s(self) -> float | None:
        """Until the next handshake is overdue; None: sleep until something happens."""
        instants = [link.must_open_by for link in self._links.values() if not link.is_open]
        return max(0.0, min(instants) - time.monotonic()) if instants else None

    def _perform(self, command: _Command) -> None:
        match command:
            case _Open(link_id, endpoint):
                self._open(link_id, endpoint)
            case _Write(link_id, lease, blocks):
                if (link := self._links.get(link_id)) is not None:
                    link.queue.extend(pack(lease, blocks, self._memory.shape[1], _MAX_WRITE_BYTES))
            case _Notify(link_id, payload):
                if (link := self._links.get(link_id)) is not None:
                    link.queue.append(payload)
            case _Close(link_id):
                if (link := self._links.get(link_id)) is not None:
                    self._drop(link, "closed")
            case _Stop():
                self._is_running = False

    def _open(self, link_id: str, endpoint: pb.Endpoint) -> None:
        if link_id in self._links:
            raise ValueError(f"link {link_id} is open already")
        connection = find_connection(endpoint)
        if connection is None:
            self._emit(LinkClosed(link_id, "could not connect"))
            return
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
            self._emit(LinkClosed(link_id, str(broken)))
            return
        patience_s = _OPEN_S + self._memory.nbytes * _OPEN_S_PER_BYTE
        self._links[link_id] = _Link(link_id, channel, time.monotonic() + patience_s)
        self._selector.register(channel, selectors.EVENT_READ, link_id)

    def _serve(self, link: _Link, events: int) -> None:
        """Give a link its turn: what arrived, what is unsent, then one message."""
        try:
            if events & selectors.EVENT_READ:
                for kind, body in link.channel.receive():
                    self._take(link, kind, body)
            if not link.is_open and time.monotonic() >= link.must_open_by:
                raise ChannelBroken("no handshake in time")
            if events & selectors.EVENT_WRITE:
                link.channel.flush()
                if link.can_send_next:
                    self._send_next(link)
        except ChannelBroken as broken:
            self._drop(link, str(broken) if link.is_open else f"not let in: {broken}")
            return
        wants_to_send = link.channel.has_unsent or link.can_send_next
        wanted = selectors.EVENT_READ | selectors.EVENT_WRITE if wants_to_send else selectors.EVENT_READ
        self._selector.modify(link.channel, wanted, link.link_id)

    def _take(self, link: _Link, kind: FrameKind, body: bytes) -> None:
        if kind is FrameKind.WELCOME and not link.is_open:
            link.is_open = True
        elif kind is FrameKind.TAKEN and link.in_flight:
            write = link.in_flight.popleft()
            if write.finished:
                self._emit(BlocksTaken(link.link_id, write.lease.lease_id, write.finished))
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

    def _drop(self, link: _Link, reason: str) -> None:
        del self._links[link.link_id]
        self._selector.unregister(link.channel)
        link.channel.close()
        _LOG.info("event=link_closed link=%s reason=%s", link.link_id, reason)
        self._emit(LinkClosed(link.link_id, reason))
