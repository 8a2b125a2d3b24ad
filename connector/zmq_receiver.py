"""The receiving end of the zmq transport: one ROUTER socket and the thread that copies from it into leased blocks.

    stranger ──handshake──► gate: refused, no frame ever read
    sender   ──handshake──► gate ──frames──► form (writes.decode) ──► right (Admissions) ──► copy ──► checksum ──► events

One thread serves handshakes, messages and answers, so the events of a link come in the order in which its frames did. It sleeps
in the poll. What one sender can make this node hold is bounded by the socket's limits per link, except that a sender who knows
the link secret, so a member of the cluster, could send one message of endless frames: libzmq keeps what it has of it.

Not here: links this node opens (zmq_sender.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread
from typing import Final

import zmq

from connector.landing import Landing
from connector.link_names import node_name
from connector.mailbox import Mailbox
from connector.transport import Emit, NotifyArrived, WriteRefused
from connector.writes import MAX_FRAME_BYTES, IncomingNotice, IncomingWrite, decode
from connector.zmq_gate import ZmqGate
from connector.zmq_options import Context, Socket, bound_link
from proto import baton_pb2 as pb

_MESSAGES_PER_POLL: Final = 16  # then handshakes and answers get their turn


@dataclass(frozen=True, slots=True)
class _ReplyTo:
    """Where a notification came from: libzmq's id of the connection, which it gives to no later one."""

    routing_id: bytes


@dataclass(frozen=True, slots=True)
class _Answer:
    reply_to: _ReplyTo
    payload: bytes


class _Stop:
    """Ends the thread."""


class ZmqReceiver:
    """Implements transport.Receiver on a port of its own; `start` it once. The landing may be shared with other receivers."""

    def __init__(self, context: Context, landing: Landing, emit: Emit, host: str, checksums: bool = True) -> None:
        self._has_checksums = checksums
        self._emit = emit
        self._landing = landing
        self._gate = ZmqGate(context)
        self._socket: Socket = context.socket(zmq.ROUTER)
        self._gate.guard(self._socket)
        address = f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*"
        bound_link(self._socket, address, MAX_FRAME_BYTES)
        self._socket.bind(address)
        self._address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._mailbox: Mailbox[_Answer | _Stop] = Mailbox()
        self.ended: Future[None] = Future()  # resolved when the thread has ended, whyever
        self._thread = Thread(target=self._run, name="zmq-receiver", daemon=True)

    def start(self) -> None:
        """Begin to serve senders."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Close the sockets and end the thread; False if it did not end in time."""
        self._mailbox.put(_Stop())
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._mailbox.close()
        return True

    def endpoint(self) -> pb.Endpoint:
        """As Receiver.endpoint."""
        return pb.Endpoint(transport="zmq", address=self._address, link_secret=self._gate.link_secret)

    def admit(self, lease_id: int, secret: bytes, block_ids: Sequence[int]) -> None:
        """As Receiver.admit."""
        self._landing.admit(lease_id, secret, block_ids)

    def revoke(self, lease_id: int) -> None:
        """As Receiver.revoke; RevokeDone may be emitted before this returns."""
        self._landing.revoke(lease_id)

    def answer(self, reply_to: object, payload: bytes) -> None:
        """As Receiver.answer; nothing happens if the link is gone."""
        if not isinstance(reply_to, _ReplyTo):
            raise TypeError(f"{reply_to!r} is no reply_to of this transport")
        self._mailbox.put(_Answer(reply_to, payload))

    def snapshot(self) -> Mapping[str, object]:
        """As Landing.snapshot, and handshakes refused."""
        return {"links_refused": self._gate.num_refused, **self._landing.snapshot()}

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            self._serve()
        finally:  # an exception is a bug; it goes on to threading.excepthook
            self._socket.close()
            self._gate.socket.close()
            self.ended.set_result(None)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._mailbox.fileno(), zmq.POLLIN)
        poller.register(self._gate.socket, zmq.POLLIN)
        poller.register(self._socket, zmq.POLLIN)
        is_running = True
        while is_running:
            ready = dict(poller.poll())
            for command in self._mailbox.drain():
                if isinstance(command, _Stop):
                    is_running = False
                else:
                    # A ROUTER drops what it cannot deliver: the link is gone, or a peer reads none of its answers.
                    self._socket.send_multipart([command.reply_to.routing_id, command.payload], zmq.NOBLOCK)
            if self._gate.socket in ready:
                self._gate.serve()
            if self._socket in ready:
                self._receive_some()

    def _receive_some(self) -> None:
        for _ in range(_MESSAGES_PER_POLL):
            try:
                sender = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            frames: list[zmq.Frame] = []
            has_more = sender.more
            while has_more:  # the whole message is here already
                frame = self._socket.recv(copy=False)
                has_more = frame.more
                if len(frames) < 3:  # three are too many, so are a thousand
                    frames.append(frame)
            self._take(_ReplyTo(sender.bytes), node_name(str(sender.get("User-Id"))), frames)

    def _take(self, reply_to: _ReplyTo, peer: str, frames: Sequence[zmq.Frame]) -> None:
        arrived = decode([frame.buffer for frame in frames])
        match arrived:
            case IncomingWrite():
                running = self._landing.begin(arrived, peer)
                if running is not None:
                    self._landing.finish(running, None if self._has_checksums else _always)
            case IncomingNotice(payload):
                self._emit(NotifyArrived(reply_to, payload))
            case WriteRefused():
                self._landing.refuse(arrived)


def _always() -> bool:
    """A payload that has arrived is nobody else's."""
    return True
