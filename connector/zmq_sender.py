"""The sending end of the zmq transport: one DEALER socket per link, one thread for all of them.

    opening ──handshake──► open ──► gone        LinkClosed exactly once, then nothing of the link is left
       └── refused, wrong secret, OPEN_S over ──►┘

A link's messages wait in its own queue as descriptions; bytes are given away when the link can take a message, a few messages at
most before the next link's turn (zmq_options.QUEUED_MESSAGES). They go from where they lie, if that is in one piece: then a source
block is taken, and a closed link quiet, when libzmq has let go of it. So a link that is stuck costs the others nothing, and the
source blocks of queued writes are the only memory that it holds. libzmq's own reconnecting is off: a link that fails is gone, and
the handoff decides what that means.

Not here: what arrives at this node (zmq_receiver.py).
"""

from __future__ import annotations

import errno
import time
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from connector.copying import Bytes
from connector.link_names import MAX_NAME_BYTES
from connector.sender_thread import SenderLink, SenderThread
from connector.transport import Answered, Emit
from connector.writes import (
    MAX_FRAME_BYTES,
    OutgoingWrite,
    describe,
    frame_bytes,
    gather,
    whole_source,
    with_rest,
)
from connector.zmq_curve import KEY_BYTES, sender_keys
from connector.zmq_options import (
    OPEN_S,
    QUEUED_MESSAGES,
    Context,
    LinkRules,
    Socket,
    bound_link,
)
from proto import baton_pb2 as pb

_CLOSING_MS: Final = 10  # until the thread looks whether libzmq has let go of what closed links, or answers, wait for

# What libzmq's monitor says when a link is at its end.
_END_REASONS: Final[Mapping[int, str]] = {
    zmq.EVENT_CLOSED: "could not connect",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "handshake failed",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "handshake failed: the peer speaks something else",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "handshake failed: link secret refused",
    zmq.EVENT_DISCONNECTED: "connection lost",
}


@dataclass(frozen=True, slots=True)
class _GivenBack:
    """libzmq has let go of a message."""

    link: _Link
    number: int


@dataclass(frozen=True, slots=True)
class _Loan:
    """Source bytes that libzmq reads where they lie."""

    write: OutgoingWrite
    watch: weakref.ref[Bytes]  # says when the view that libzmq was given is gone


class _Link(SenderLink):
    """With its sockets, and what libzmq has of ours."""

    def __init__(self, link_id: str, socket: Socket, must_open_by: float) -> None:
        super().__init__(link_id, must_open_by)
        self.socket = socket
        self.loans: dict[int, _Loan] = {}
        self.num_lent = 0
        self.num_before_notice = 0  # lent before the last notification
        self.answers: deque[tuple[int, bytes]] = deque()  # that wait for what was lent before them, so many
        self.monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | sum(_END_REASONS))

    @property
    def can_send_next(self) -> bool:
        """Whether the queue's head may go out now."""
        return self.is_open and bool(self.queue) and bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT)

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close()


class ZmqSender(SenderThread[_Link, _GivenBack]):
    """Implements transport.Sender; `start` it once. Bytes sent are payload given to the wire."""

    def __init__(self, context: Context, memory: Bytes, user_name: str, emit: Emit, rules: LinkRules) -> None:
        super().__init__("zmq-sender", memory, emit, frame_bytes)
        self._context = context
        self._user_name = user_name
        self._is_encrypted = rules.is_encrypted
        self._num_links = 0
        self._has_checksums = rules.has_checksums
        self._closing: dict[str, str] = {}  # link id -> why; libzmq has something of theirs yet
        self._poller = zmq.Poller()

    def _serve(self) -> None:
        self._poller.register(self._mailbox.fileno(), zmq.POLLIN)
        while self._is_running:
            ready = dict(self._poller.poll(self._timeout_ms()))
            self._perform_commands()
            self._end_nameless()
            for link in tuple(self._links.values()):
                self._serve_link(link, ready)

    def _close_all(self) -> None:
        for link in self._links.values():
            link.close()

    def _timeout_ms(self) -> int | None:
        timeout_s = self._seconds_to_overdue()
        timeout_ms = None if timeout_s is None else int(timeout_s * 1000) + 1
        if not self._closing and not any(link.answers for link in self._links.values()):
            return timeout_ms
        # libzmq lets go of messages in any order: what is waited for may be one that wakes nobody.
        return min(_CLOSING_MS, timeout_ms or _CLOSING_MS)

    def _connect(self, link_id: str, endpoint: pb.Endpoint) -> _Link | str:
        if endpoint.transport != "zmq" or not endpoint.address.startswith("tcp://"):
            return f"no zmq endpoint: {endpoint.transport} {endpoint.address}"
        if bool(endpoint.curve_key) is not self._is_encrypted:  # never less than what this node was told to do
            ours, theirs = ("encrypted", "not") if self._is_encrypted else ("not encrypted", "they are")
            return (
                f"links of this node are {ours}, at {endpoint.address} {theirs}: --tls-dir is everybody's or nobody's"
            )
        try:
            link = _Link(link_id, self._context.socket(zmq.DEALER), time.monotonic() + OPEN_S)
        except zmq.ZMQError as fault:  # no socket left
            return f"no socket: {fault}"
        try:
            self._connect_socket(link.socket, endpoint)
        except zmq.ZMQError as fault:  # the endpoint came over the wire: libzmq does not take its address or its secret
            link.close()
            return f"bad endpoint {endpoint.address}: {fault}"
        self._poller.register(link.socket, zmq.POLLIN)
        self._poller.register(link.monitor, zmq.POLLIN)
        return link

    def _connect_socket(self, socket: Socket, endpoint: pb.Endpoint) -> None:
        address = endpoint.address
        bound_link(socket, address, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.SNDHWM, QUEUED_MESSAGES)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.copy_threshold = 0  # a short piece, copied, would be given back before the longer ones of its block
        if self._is_encrypted:
            self._set_keys(socket, endpoint)
        else:
            socket.setsockopt_string(zmq.PLAIN_USERNAME, self._user_name)
            socket.setsockopt_string(zmq.PLAIN_PASSWORD, endpoint.link_secret.hex())
        socket.connect(address)

    def _set_keys(self, socket: Socket, endpoint: pb.Endpoint) -> None:
        if len(endpoint.curve_key) != KEY_BYTES:
            raise zmq.ZMQError(errno.EINVAL)
        keys = sender_keys(endpoint.link_secret)
        socket.setsockopt(zmq.CURVE_SERVERKEY, z85.encode(endpoint.curve_key))
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        # Who it is; different for each link, or the receiver would take one for another.
        self._num_links += 1
        routing_id = f"{self._user_name}/{self._num_links:x}".encode()
        if len(routing_id) <= MAX_NAME_BYTES:
            socket.setsockopt(zmq.ROUTING_ID, routing_id)

    def _serve_link(self, link: _Link, ready: Mapping[object, int]) -> None:
        """Give a link its turn: what arrived, then how it is, then the messages that libzmq takes."""
        events = ready.get(link.socket, 0)
        end_reason = self._read_answers(link) if events & zmq.POLLIN else None
        if link.monitor in ready:
            end_reason = self._read_monitor(link) or end_reason
        if not link.is_open and time.monotonic() >= link.must_open_by:
            end_reason = end_reason or "no handshake in time"
        while end_reason is None and link.can_send_next:
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
            link.answers.append((link.num_before_notice, frames[0]))
            self._tell_answers(link)

    def _tell_answers(self, link: _Link) -> None:
        """Behind the blocks that were taken before the peer can have answered, of which pyzmq tells later, on its own thread."""
        while link.answers and not any(number <= link.answers[0][0] for number in link.loans):
            self._emit(Answered(link.link_id, link.answers.popleft()[1]))

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
        message = link.queue.popleft()
        try:
            if isinstance(message, bytes):
                if len(message) > MAX_FRAME_BYTES:
                    return f"a notification of {len(message)} bytes, {MAX_FRAME_BYTES} allowed"
                link.socket.send(message, zmq.NOBLOCK)
                link.num_before_notice = link.num_lent
                return None
            self._send_write(link, message)
        except zmq.Again:  # a DEALER that was ready and is not any more has lost its connection
            return "connection lost"
        return None

    def _send_write(self, link: _Link, write: OutgoingWrite) -> None:
        """Raise zmq.Again if the link is not ready any more."""
        self._bytes_to.add(link.peer, sum(span.length for span in write.spans))
        if (view := whole_source(self._memory, write)) is None:
            header, payload = gather(self._memory, write, self._has_checksums)
            link.socket.send_multipart([header, payload.data], zmq.NOBLOCK, copy=False)
            self._tell_behind(link, write)
        else:
            header = describe(self._memory, write, self._has_checksums)
            link.num_lent += 1
            given_back = _GivenBack(link, link.num_lent)
            link.loans[link.num_lent] = _Loan(write, weakref.ref(view, lambda _: self._take_back(given_back)))
            link.socket.send(header, zmq.SNDMORE | zmq.NOBLOCK)
            link.socket.send(view.data, zmq.NOBLOCK, copy=False)

    def _take_back(self, word: _GivenBack) -> None:
        """On pyzmq's thread, mostly, once for each message: what has one behind it is heard with that one, as waking costs more."""
        self._mailbox.put(word, wakes=word.number == word.link.num_lent)

    def _tell_behind(self, link: _Link, rest: OutgoingWrite) -> None:
        for number, loan in reversed(link.loans.items()):
            if loan.write.lease == rest.lease:
                link.loans[number] = replace(loan, write=with_rest(loan.write, rest))
                return
        self._taken(link, rest)

    def _hear(self, word: _GivenBack) -> None:
        link = word.link
        loan = link.loans.pop(word.number)
        if self._links.get(link.link_id) is link:
            self._taken(link, loan.write)
            self._tell_answers(link)
        elif not link.loans and (reason := self._closing.pop(link.link_id, None)) is not None:
            self._say_closed(link.link_id, reason)

    def _drop(self, link: _Link, reason: str) -> None:
        """Closing its socket makes libzmq let go of what it has, soon: only then is the link quiet."""
        if not link.loans:
            super()._drop(link, reason)
            return
        del self._links[link.link_id]
        self._disconnect(link)
        self._closing[link.link_id] = reason

    def _disconnect(self, link: _Link) -> None:
        self._poller.unregister(link.socket)
        self._poller.unregister(link.monitor)
        link.close()
