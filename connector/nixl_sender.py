"""The sending end of the nixl transport: per link a TCP connection and a NIXL agent, one thread for all of them.

    connecting ──HELLO, WELCOME──► open ──► gone        LinkClosed exactly once, then nothing of the link is left
        └── refused, or time over ─────►┘

What may be moved and said is one_sided_sending.py's to decide: this thread asks where a lease lies, has the agent put bytes there,
and says WRITE behind them. Most ways need both ends to drive them (nixl_agent.py): MOVING asks the receiver to, until it hears of
something else. The agent is destroyed before LinkClosed is said, and reads no source block from then on.

Not here: what arrives at this node (nixl_receiver.py).
"""

from __future__ import annotations

import selectors
import time
from typing import Final, Never

from google.protobuf.message import DecodeError

from connector.copying import Bytes
from connector.link_channel import Channel, ChannelBroken, FrameKind
from connector.nixl_agent import NixlAgent, NixlFault, NixlLibrary
from connector.nixl_socket import begin_connection
from connector.one_sided import Attach, Stopped
from connector.one_sided_sending import Notice, OneSidedSending, Put, Written
from connector.sender_thread import SenderLink, SenderThread
from connector.transport import MAX_PAYLOAD_BYTES, Answered, Emit
from connector.writes import MAX_FRAME_BYTES, OutgoingWrite, describe
from proto import baton_pb2 as pb

_MAX_WRITE_BYTES: Final = (
    4 * MAX_PAYLOAD_BYTES
)  # of one write: little is said of much, and its copy holds up nobody for long
_MAX_MOVING: Final = 4  # writes under way on one link
_OPEN_S: Final = 1.8  # from connect to WELCOME, under the 2 s in which a dead node must be found
_LOOK_AGAIN_S: Final = 50e-6  # while something moves that the kernel does not tell of


class _Link(SenderLink):
    """With its connection, and its agent once it is open."""

    def __init__(self, link_id: str, channel: Channel) -> None:
        super().__init__(link_id, time.monotonic() + _OPEN_S)
        self.channel = channel
        self.sending = OneSidedSending(_MAX_MOVING)
        self.queue = self.sending.queue
        self.agent: NixlAgent | None = None
        self.headers: dict[int, bytes] = {}  # of puts under way, by number
        self.has_said_moving = False

    def tell(self, kind: FrameKind, body: bytes = b"") -> None:
        """Say something at the end of this turn; the receiver drives what moves only until then."""
        self.channel.keep(kind, body)
        self.has_said_moving = False


class NixlSender(SenderThread[_Link, Never]):
    """Implements transport.Sender; `start` it once. Bytes sent are those that NIXL was told to move."""

    def __init__(self, library: NixlLibrary, memory: Bytes, user_name: str, emit: Emit, checksums: bool = True) -> None:
        super().__init__("nixl-sender", memory, emit, lambda _: _MAX_WRITE_BYTES)
        self._library = library
        self._user_name = user_name
        self._has_checksums = checksums
        self._selector = selectors.DefaultSelector()

    def _serve(self) -> None:
        self._selector.register(self._mailbox, selectors.EVENT_READ)
        while self._is_running:
            is_moving = any(link.sending.num_moving for link in self._links.values())
            timeout_s = 0.0 if is_moving else self._seconds_to_overdue()
            ready = {key.data: events for key, events in self._selector.select(timeout_s)}
            if is_moving and not ready:
                time.sleep(_LOOK_AGAIN_S)
            if None in ready:
                self._perform_commands()
            self._end_nameless()
            for link in tuple(self._links.values()):
                self._serve_link(link, ready.get(link.link_id, 0))

    def _close_all(self) -> None:
        for link in self._links.values():
            _end(link)
        self._selector.close()

    def _connect(self, link_id: str, endpoint: pb.Endpoint) -> _Link | str:
        connection = begin_connection(endpoint.address) if endpoint.transport == "nixl" else None
        if connection is None:
            return f"no nixl endpoint: {endpoint.transport} {endpoint.address}"
        channel = Channel(connection)
        num_blocks, block_bytes = self._memory.shape
        hello = pb.LinkHello(
            sender=self._user_name,
            link_secret=endpoint.link_secret,
            num_blocks=num_blocks,
            block_bytes=block_bytes,
        )
        channel.keep(FrameKind.HELLO, hello.SerializeToString())
        self._selector.register(channel, selectors.EVENT_READ | selectors.EVENT_WRITE, link_id)
        return _Link(link_id, channel)

    def _serve_link(self, link: _Link, events: int) -> None:
        """Give a link its turn: what arrived, what has moved, what may move and be said now."""
        try:
            is_overdue = not link.is_open and time.monotonic() >= link.must_open_by
            # It may have come while another link's agent was made.
            if events & selectors.EVENT_READ or (is_overdue and link.channel.has_arrived):
                for kind, body in link.channel.receive():
                    self._take(link, kind, body)
            if is_overdue and not link.is_open:
                raise ChannelBroken("no handshake in time")
            if link.agent is not None:
                self._move(link, link.agent)
            if link.is_open or events & selectors.EVENT_WRITE:
                link.channel.flush()
        except (ChannelBroken, NixlFault) as broken:
            self._drop(link, str(broken) if link.is_open else f"not let in: {broken}")
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.channel.has_unsent else 0)
        self._selector.modify(link.channel, wanted, link.link_id)

    def _take(self, link: _Link, kind: FrameKind, body: bytes) -> None:
        try:
            if kind is FrameKind.WELCOME and not link.is_open:
                self._open(link, pb.LinkWelcome.FromString(body))
            elif kind is FrameKind.ANSWER and link.is_open:
                self._emit(Answered(link.link_id, body))
            elif kind is FrameKind.ATTACHED:
                attached = pb.Attached.FromString(body)
                if not link.sending.attached(attached.block_ids if attached.is_admitted else None):
                    raise ChannelBroken("the peer answered what nobody asked")
            elif kind is FrameKind.OVER and link.is_open:
                link.sending.stop(pb.LeaseOver.FromString(body).lease_id)
            else:
                raise ChannelBroken(f"the peer sent {kind.name} out of turn")
        except DecodeError:
            raise ChannelBroken(f"the peer sent {kind.name} that is none") from None

    def _open(self, link: _Link, welcome: pb.LinkWelcome) -> None:
        link.agent = self._library.agent(f"{self._user_name}>{link.link_id}", self._memory)
        link.agent.connect(welcome.agent, welcome.address, welcome.num_blocks, welcome.block_bytes)
        link.is_open = True

    def _move(self, link: _Link, agent: NixlAgent) -> None:
        """Take note of what has moved, begin what may move, and say what may be said, until only time can bring more.

        What is moved while the last of it begins makes room for the next: with nothing under way nobody would come back for it.
        """
        while True:
            match link.sending.next():
                case Attach(lease_id, secret):
                    attach = pb.Attach(lease_id=lease_id, secret=secret)
                    link.tell(FrameKind.ATTACH, attach.SerializeToString())
                case Put() as put:
                    self._put(link, agent, put)
                case None:
                    finished = agent.finished()
                    for number in finished:
                        link.sending.moved(number)
                    self._say(link)
                    if not finished:
                        break
        if link.sending.num_moving and not link.has_said_moving:
            link.tell(FrameKind.MOVING)
            link.has_said_moving = True

    def _put(self, link: _Link, agent: NixlAgent, put: Put) -> None:
        write = put.write
        sources = [(source_id, span.offset) for span, source_id in zip(write.spans, write.source_ids, strict=True)]
        agent.put(put.number, sources, put.block_ids)
        link.headers[put.number] = describe(self._memory, write, self._has_checksums)
        self._bytes_to.add(link.peer, sum(span.length for span in write.spans))

    def _say(self, link: _Link) -> None:
        for said in link.sending.said():
            match said:
                case Written(write, is_told, number):
                    self._taken(link, write)
                    if is_told:
                        header = link.headers.pop(number, None) or describe(self._memory, write, self._has_checksums)
                        link.tell(FrameKind.WRITE, header)
                case Notice(payload):
                    if len(payload) > MAX_FRAME_BYTES:
                        raise ChannelBroken(f"a notification of {len(payload)} bytes, {MAX_FRAME_BYTES} allowed")
                    link.tell(FrameKind.NOTICE, payload)
                case Stopped(lease_id):
                    link.tell(FrameKind.STOPPED, pb.LeaseOver(lease_id=lease_id).SerializeToString())

    def _tell_behind(self, link: _Link, rest: OutgoingWrite) -> None:
        link.sending.drop(rest)

    def _disconnect(self, link: _Link) -> None:
        self._selector.unregister(link.channel)
        _end(link)


def _end(link: _Link) -> None:
    """The agent first: whoever sees the connection closed knows that nothing more is put there."""
    if link.agent is not None:
        link.agent.close()
    link.channel.close()
