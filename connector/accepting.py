"""The receiving end of links that arrive on a listening socket: who is let in, and whose turn it is.

    anybody ──connect──► stranger ──HELLO in time, of the right form──► link ──frames──► the transport's own business
                            └── too late, too many, anything else: dropped, counted

One thread serves all connections, so the events of a link come in the order in which its frames did. It sleeps in the poll.
Letting somebody in may take long, so that is the last thing of a turn: what links have to say by now is read before anybody is
told that it is too late, and a crowd is let in over many turns.
Not here: what a HELLO must hold and what is said behind it (shm_receiver.py, nixl_receiver.py).
"""

from __future__ import annotations

import hmac
import logging
import selectors
import socket
import time
from abc import abstractmethod
from typing import ClassVar, Final, Generic, TypeVar

from google.protobuf.message import DecodeError

from connector.landing import Landing
from connector.link_channel import Channel, ChannelBroken, ChannelEnded, Frame, FrameKind
from connector.link_names import is_name
from connector.receiver_thread import LeaseEnded, ReceiverThread, Reply, Unsaid
from connector.transport import Emit
from proto import baton_pb2 as pb

_LOG = logging.getLogger(__name__)

_HELLO_S: Final = 1.0  # from connect to HELLO
_MAX_STRANGERS: Final = 64  # connections that have not said HELLO yet
_ACCEPTS_PER_TURN: Final = 64
_ACCEPT_AGAIN_S: Final = 0.1  # while the process has no descriptor left


class Stranger:
    """A connection of which nothing is known."""

    __slots__ = ("channel", "must_greet_by", "number")

    def __init__(self, number: int, channel: Channel, must_greet_by: float) -> None:
        self.number = number
        self.channel = channel
        self.must_greet_by = must_greet_by  # monotonic seconds


class AcceptedLink:
    """A connection whose sender knew the link secret."""

    def __init__(self, number: int, channel: Channel, peer: str) -> None:
        self.number = number
        self.channel = channel
        self.peer = peer


_L = TypeVar("_L", bound=AcceptedLink)


def checked_hello(frames: list[Frame], link_secret: bytes) -> pb.LinkHello:
    """What a stranger said first, if it may open a link; raises ValueError for one that may not."""
    if len(frames) != 1 or frames[0].kind is not FrameKind.HELLO:
        raise ValueError("not one HELLO")
    try:
        hello = pb.LinkHello.FromString(frames[0].body)
    except DecodeError:
        raise ValueError("a HELLO that is no LinkHello") from None
    if not hmac.compare_digest(hello.link_secret, link_secret):
        raise ValueError("wrong link secret")
    if not is_name(hello.sender):
        raise ValueError("no name for a node")
    return hello


class AcceptingReceiver(ReceiverThread, Generic[_L]):
    """Implements transport.Receiver but for what links are; `start` it once."""

    max_let_in: ClassVar[int] = _ACCEPTS_PER_TURN  # in one turn

    def __init__(self, transport: str, listener: socket.socket, landing: Landing, emit: Emit) -> None:
        super().__init__(f"{transport}-receiver", landing, emit)  # has descriptors of its own: behind what may fail
        self._transport = transport
        self._listener = listener
        self._strangers: dict[int, Stranger] = {}
        self._links: dict[int, _L] = {}
        self._num_accepted = 0
        self._num_refused = 0
        self._accept_again_at: float | None = None  # monotonic seconds; until then nobody is listened to
        self._selector = selectors.DefaultSelector()

    @property
    def num_refused(self) -> int:
        """Handshakes refused."""
        return self._num_refused

    def _send_back(self, reply: Reply) -> None:
        """At once, since a sender waits for it: waking this thread first takes longer than sending."""
        if not isinstance(number := reply.to.connection, int) or (link := self._links.get(number)) is None:
            return  # it is gone, or of another transport
        try:
            link.channel.send(FrameKind.ANSWER, reply.payload)
        except ChannelBroken as broken:
            self._mailbox.put(Unsaid(number, str(broken)))
        else:
            if link.channel.has_unsent:
                self._mailbox.put(Unsaid(number, None))

    # ------------------------------------------------------------ what a transport says about its links

    @abstractmethod
    def _may_knock(self, connection: socket.socket) -> bool:
        """Whether a connection may become a stranger; it is made ready, or counted as refused."""

    @abstractmethod
    def _greet(self, stranger: Stranger) -> _L | None:
        """Read a HELLO, if all of it is there; raises ChannelBroken for one that is not to be let in."""

    @abstractmethod
    def _take_turn(self, link: _L, events: int) -> None:
        """Serve a link; raises ChannelBroken at its end."""

    @abstractmethod
    def _let_go(self, link: _L) -> None:
        """Give back what a link has beside its channel, which is closed."""

    def _end_lease(self, lease_id: int) -> None:
        """A lease was revoked, and somebody may still write into it."""

    def _seconds_to_work(self) -> float | None:
        """Until a link's turn is due though nothing arrives; None: there is nothing to do."""
        return None

    # ------------------------------------------------------------ the thread

    def _serve(self) -> None:
        self._selector.register(self._mailbox, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        while self._is_running:
            ready = {key.data: events for key, events in self._selector.select(self._timeout_s())}
            if None in ready:  # a command, or somebody who knocks
                self._perform_commands()
            for link in tuple(self._links.values()):
                self._serve_link(link, ready.get(link.number, 0))
            most = len(self._links) + self.max_let_in
            for stranger in tuple(self._strangers.values()):
                if len(self._links) < most:
                    self._serve_stranger(stranger, ready.get(stranger.number, 0))
            if None in ready or self._accept_again_at is not None:
                self._accept(most)

    def _close_all(self) -> None:
        for stranger in self._strangers.values():
            stranger.channel.close()
        for link in self._links.values():
            link.channel.close()
            self._let_go(link)
        self._strangers.clear()
        self._links.clear()
        self._listener.close()
        self._selector.close()

    def _timeout_s(self) -> float | None:
        """Until the next thing is overdue; None: sleep until something happens."""
        work_s = self._seconds_to_work()
        if work_s is not None and work_s <= 0:
            return 0.0
        instants = [each.must_greet_by for each in self._strangers.values()]
        if self._accept_again_at is not None:
            instants.append(self._accept_again_at)
        overdue_s = max(0.0, min(instants) - time.monotonic()) if instants else None
        return min((each for each in (work_s, overdue_s) if each is not None), default=None)

    def _accept(self, most: int) -> None:
        """Let in whoever waits and may knock until there are so many links, as far as there is room for those who say nothing."""
        if self._accept_again_at is not None:
            if time.monotonic() < self._accept_again_at:
                return
            self._accept_again_at = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        for _ in range(_ACCEPTS_PER_TURN):
            if len(self._links) >= most:
                return
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as fault:  # no descriptor left: who waits stays in the backlog, and the poll must not spin
                _LOG.warning("event=accept_failed transport=%s reason=%s", self._transport, fault.strerror)
                self._selector.unregister(self._listener)
                self._accept_again_at = time.monotonic() + _ACCEPT_AGAIN_S
                return
            if not self._may_knock(connection):
                connection.close()
                continue
            connection.setblocking(False)
            self._num_accepted += 1
            stranger = Stranger(self._num_accepted, Channel(connection), time.monotonic() + _HELLO_S)
            self._strangers[stranger.number] = stranger
            self._selector.register(stranger.channel, selectors.EVENT_READ, stranger.number)
            self._serve_stranger(stranger, selectors.EVENT_READ)  # who means well has said HELLO already
            if stranger.number in self._strangers and len(self._strangers) > _MAX_STRANGERS:
                self._refuse("too many at once")
                self._drop_stranger(stranger)

    def _perform(self, command: Reply | LeaseEnded | Unsaid) -> None:
        match command:
            case LeaseEnded(lease_id):
                self._end_lease(lease_id)
            case Unsaid(connection, str(flaw)) if connection in self._links:
                self._drop(self._links[connection], flaw)

    def _say(self, link: _L, kind: FrameKind, body: bytes) -> None:
        """Send a frame outside of the link's turn."""
        try:
            link.channel.send(kind, body)
        except ChannelBroken as broken:
            self._drop(link, str(broken))
        else:
            self._watch(link)

    def _serve_stranger(self, stranger: Stranger, events: int) -> None:
        """Hear who it is, or that it has said nothing for too long."""
        try:
            if events & selectors.EVENT_READ:
                link = self._greet(stranger)
            elif time.monotonic() >= stranger.must_greet_by:
                raise ChannelBroken("no HELLO in time")
            else:
                return
        except ChannelBroken as broken:
            # One that leaves without a word only wanted to know whether somebody is here.
            if not isinstance(broken, ChannelEnded):
                self._refuse(str(broken))
            self._drop_stranger(stranger)
            return
        if link is not None:
            del self._strangers[stranger.number]
            self._links[link.number] = link
            _LOG.info("event=link_accepted sender=%s transport=%s", link.peer, self._transport)

    def _serve_link(self, link: _L, events: int) -> None:
        """One link's turn."""
        try:
            self._take_turn(link, events)
            if link.channel.has_unsent:
                link.channel.flush()
        except ChannelBroken as broken:
            self._drop(link, str(broken))
        else:
            self._watch(link)

    def _watch(self, link: _L) -> None:
        """Poll for what the link waits for."""
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.channel.has_unsent else 0)
        self._selector.modify(link.channel, wanted, link.number)

    def _refuse(self, reason: str) -> None:
        self._num_refused += 1
        _LOG.warning("event=link_refused transport=%s reason=%s", self._transport, reason)

    def _drop_stranger(self, stranger: Stranger) -> None:
        del self._strangers[stranger.number]
        self._selector.unregister(stranger.channel)
        stranger.channel.close()

    def _drop(self, link: _L, reason: str) -> None:
        del self._links[link.number]
        self._selector.unregister(link.channel)
        link.channel.close()
        self._let_go(link)
        _LOG.info("event=link_ended transport=%s sender=%s reason=%s", self._transport, link.peer, reason)
