"""The receiving end of the zmq transport: one ROUTER socket and the thread that copies from it into leased blocks.

    stranger ──handshake──► gate: refused, no frame ever read
    sender   ──handshake──► gate ──frames──► form (writes.decode) ──► right (Admissions) ──► copied, hashed on the way ──► events

One thread serves handshakes, messages and answers, so the events of a link come in the order in which its frames did. It sleeps
in the poll. What one sender can make this node hold is bounded by the socket's limits per link, except that a sender who knows
the link secret, so a member of the cluster, could send one message of endless frames: libzmq keeps what it has of it. Such a one
could also end this process, by ZMTP heartbeats on a link that it breaks off while the queue is full (zmq_options.py).

Not here: links this node opens (zmq_sender.py).
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Final

import zmq

from connector.host_names import numeric
from connector.landing import Landing
from connector.receiver_thread import LeaseEnded, ReceiverThread, Reply, ReplyTo, Unsaid
from connector.transport import Emit, NotifyArrived, WriteRefused
from connector.writes import MAX_FRAME_BYTES, IncomingNotice, IncomingWrite, decode
from connector.zmq_gate import ZmqGate
from connector.zmq_options import Context, LinkRules, Place, Socket, bound_link, tcp_address
from proto import baton_pb2 as pb

_MESSAGES_PER_POLL: Final = 16  # then handshakes and answers get their turn


def _address_of(host: str) -> str:
    """libzmq resolves by itself only what it connects to. Raises zmq.ZMQError."""
    try:
        return numeric(host)
    except OSError as fault:
        raise zmq.ZMQError(errno.ENODEV, str(fault)) from None


class ZmqReceiver(ReceiverThread):
    """Implements transport.Receiver on a port of its own; `start` it once."""

    def __init__(self, context: Context, landing: Landing, emit: Emit, place: Place, rules: LinkRules) -> None:
        self._has_checksums = rules.has_checksums
        self._gate = ZmqGate(context, is_encrypted=rules.is_encrypted)
        self._socket: Socket = context.socket(zmq.ROUTER)
        self._gate.guard(self._socket)
        address = tcp_address(_address_of(place.host), place.port or "*")
        bound_link(self._socket, address, MAX_FRAME_BYTES)
        self._socket.bind(address)
        self._address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if place.known_as is not None:
            self._address = tcp_address(place.known_as, self._address.rpartition(":")[2])
        super().__init__("zmq-receiver", landing, emit)  # has descriptors of its own: behind what may fail

    def endpoint(self) -> pb.Endpoint:
        """As Receiver.endpoint."""
        gate = self._gate
        return pb.Endpoint(
            transport="zmq", address=self._address, link_secret=gate.link_secret, curve_key=gate.curve_key
        )

    @property
    def num_refused(self) -> int:
        """Handshakes refused."""
        return self._gate.num_refused

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._mailbox.fileno(), zmq.POLLIN)
        poller.register(self._gate.socket, zmq.POLLIN)
        poller.register(self._gate.monitor, zmq.POLLIN)
        poller.register(self._socket, zmq.POLLIN)
        while self._is_running:
            ready = dict(poller.poll())
            self._perform_commands()
            if self._gate.socket in ready:
                self._gate.serve()
            if self._gate.monitor in ready:
                self._gate.note_failures()
            if self._socket in ready:
                self._receive_some()

    def _close_all(self) -> None:
        self._gate.close(self._socket)
        self._socket.close()

    def _perform(self, command: Reply | LeaseEnded | Unsaid) -> None:
        if not isinstance(command, Reply) or not isinstance(routing_id := command.to.connection, bytes):
            return  # of another transport
        # A ROUTER drops what it cannot deliver: the link is gone, or a peer reads none of its answers.
        self._socket.send_multipart([routing_id, command.payload], zmq.NOBLOCK)

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
            self._take(ReplyTo(sender.bytes), self._gate.peer(sender), frames)

    def _take(self, reply_to: ReplyTo, peer: str, frames: Sequence[zmq.Frame]) -> None:
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
