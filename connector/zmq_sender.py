"""The sending end of the zmq transport: one DEALER socket per link, one thread for all of them.

    opening ──handshake──► open ──► gone        LinkClosed exactly once, then nothing of the link is left
       └── refused, wrong secret, OPEN_S over ──►┘

A link's messages wait in its own queue as descriptions; bytes are gathered when the link can take a message, one message per
link and round. So a link that is stuck costs the others nothing, and the source blocks of queued writes are the only memory that
it holds. libzmq's own reconnecting is off: a link that fails is gone, and the handoff decides what that means.

Not here: what arrives at this node (zmq_receiver.py).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from connector.link_names import node_name
from connector.mailbox import Mailbox
from connector.tally import Tally
from connector.transport import Answered, BlocksTaken, Emit, LeaseRef, LinkClosed
from connector.writes import MAX_FRAME_BYTES, Bytes, OutgoingWrite, gather, pack
from connector.zmq_options import OPEN_S, QUEUED_MESSAGES, Context, Socket, bound_link
from proto import baton_pb2 as pb

_LOG = logging.getLogger(__name__)

# What libzmq's monitor says when a link is at its end.
_END_REASONS: Final[Mapping[int, str]] = {
    zmq.EVENT_CLOSED: "could not connect",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "handshake failed",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "handshake failed: the peer speaks something else",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "handshake failed: link secret refused",
    zmq.EVENT_DISCONNECTED: "connection lost",
}


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
    """A link's sockets and what waits for it."""

    __slots__ = ("is_open", "link_id", "monitor", "must_open_by", "peer", "queue", "socket")

    def __init__(self, link_id: str, socket: Socket, must_open_by: float) -> None:
        self.link_id = link_id
        self.peer = node_name(link_id)
        self.socket = socket
        self.monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | sum(_END_REASONS))
        self.queue: deque[OutgoingWrite | bytes] = deque()
        self.must_open_by = must_open_by  # monotonic seconds
        self.is_open = False

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close()


class ZmqSender:
    """Implements transport.Sender; `start` it once."""

    def __init__(self, context: Context, memory: Bytes, user_name: str, emit: Emit, checksums: bool = True) -> None:
        self._context = context
        self._memory = memory
        self._user_name = user_name
        self._emit = emit
        self._has_checksums = checksums
        self._mailbox: Mailbox[_Command] = Mailbox()
        self._poller = zmq.Poller()
        self._links: dict[str, _Link] = {}
        self._bytes_to = Tally()
        self._is_running = True
        self.ended: Future[None] = Future()  # resolved when the thread has ended, whyever
        self._thread = Thread(target=self._run, name="zmq-sender", daemon=True)

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
        """Payload bytes given to the wire, per receiving node; open links."""
        return {"kv_bytes_sent": self._bytes_to.snapshot(), "links": len(self._links)}

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            self._poller.register(self._mailbox.fileno(), zmq.POLLIN)
            while self._is_running:
                ready = dict(self._poller.poll(self._timeout_ms()))
                for command in self._mailbox.drain():
                    self._perform(command)
                for link in tuple(self._links.values()):
                    self._serve(link, ready)
        finally:  # an exception is a bug; it goes on to threading.excepthook
            for link in self._links.values():
                link.close()
            self.ended.set_result(None)

    def _timeout_ms(self) -> int | None:
        """Until the next handshake is overdue; None: sleep until something happens."""
        instants = [link.must_open_by for link in self._links.values() if not link.is_open]
        return max(0, int((min(instants) - time.monotonic()) * 1000) + 1) if instants else None

    def _perform(self, command: _Command) -> None:
        match command:
            case _Open(link_id, endpoint):
                self._open(link_id, endpoint)
            case _Write(link_id, lease, blocks):
                if (link := self._links.get(link_id)) is not None:
                    link.queue.extend(pack(lease, blocks, self._memory.shape[1]))
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
        if endpoint.transport != "zmq" or not endpoint.address.startswith("tcp://"):
            self._emit(LinkClosed(link_id, f"no zmq endpoint: {endpoint.transport} {endpoint.address}"))
            return
        try:
            link = _Link(link_id, self._context.socket(zmq.DEALER), time.monotonic() + OPEN_S)
        except zmq.ZMQError as fault:  # no socket left
            self._emit(LinkClosed(link_id, f"no socket: {fault}"))
            return
        try:
            self._connect(link.socket, endpoint)
        except zmq.ZMQError as fault:  # the endpoint came over the wire: libzmq does not take its address or its secret
            link.close()
            self._emit(LinkClosed(link_id, f"bad endpoint {endpoint.address}: {fault}"))
            return
        self._links[link_id] = link
        self._poller.register(link.socket, zmq.POLLIN)
        self._poller.register(link.monitor, zmq.POLLIN)

    def _connect(self, socket: Socket, endpoint: pb.Endpoint) -> None:
        bound_link(socket, endpoint.address, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.SNDHWM, QUEUED_MESSAGES)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.setsockopt_string(zmq.PLAIN_USERNAME, self._user_name)
        socket.setsockopt_string(zmq.PLAIN_PASSWORD, endpoint.link_secret.hex())
        socket.connect(endpoint.address)

    def _serve(self, link: _Link, ready: Mapping[object, int]) -> None:
        """Give a link its turn: what arrived, then how it is, then one message."""
        events = ready.get(link.socket, 0)
        end_reason = self._read_answers(link) if events & zmq.POLLIN else None
        if link.monitor in ready:
            end_reason = self._read_monitor(link) or end_reason
        if not link.is_open and time.monotonic() >= link.must_open_by:
            end_reason = end_reason or "no handshake in time"
        if end_reason is None and events & zmq.POLLOUT:
            end_reason = self._send_next(link)
        if end_reason is not None:
            self._drop(link, end_reason)
            return
        wants_to_send = link.is_open and link.queue
        self._poller.modify(link.socket, zmq.POLLIN | zmq.POLLOUT if wants_to_send else zmq.POLLIN)

    def _read_answers(self, link: _Link) -> str | None:
        while True:
            try:
                frames = link.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if len(frames) != 1:
                return "the peer sent what is no answer"
            self._emit(Answered(link.link_id, frames[0]))

    def _read_monitor(self, link: _Link) -> str | None:
        """Take note of a finished handshake; returns why the link is at its end, if it is."""
        end_reason: str | None = None
        while end_reason is None:
            try:
                event = recv_monitor_message(link.monitor, zmq.NOBLOCK)["event"]
            except zmq.Again:
                break
            link.is_open = link.is_open or event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            end_reason = _END_REASONS.get(event)
        return end_reason

    def _send_next(self, link: _Link) -> str | None:
        """Hand one message to libzmq, which can take it; returns why the link is at its end, if it is."""
        if not link.queue:
            return None
        message = link.queue.popleft()
        try:
            if isinstance(message, bytes):
                if len(message) > MAX_FRAME_BYTES:
                    return f"a notification of {len(message)} bytes, {MAX_FRAME_BYTES} allowed"
                link.socket.send(message, zmq.NOBLOCK)
                return None
            header, payload = gather(self._memory, message, self._has_checksums)
            self._bytes_to.add(link.peer, payload.nbytes)
            if message.finished:
                self._emit(BlocksTaken(link.link_id, message.lease.lease_id, message.finished))
            link.socket.send_multipart([header, payload.data], zmq.NOBLOCK, copy=False)
        except zmq.Again:  # a DEALER that was ready and is not any more has lost its connection
            return "connection lost"
        return None

    def _drop(self, link: _Link, reason: str) -> None:
        del self._links[link.link_id]
        self._poller.unregister(link.socket)
        self._poller.unregister(link.monitor)
        link.close()
        _LOG.info("event=link_closed link=%s reason=%s", link.link_id, reason)
        self._emit(LinkClosed(link.link_id, reason))
