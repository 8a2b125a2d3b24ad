"""The transport that moves bytes when it is told to: for the deterministic simulation and the tests, and shipped as product code.

Same messages, same checks and same landing as zmq, but no thread, no clock, no socket: whoever owns the hub decides which pending
step happens next, so every order that a real network could give can be had, and had again.

    write() ─► unsent ──taken──► wire ──begins──► running ──finishes──► landed        one write in three steps
               BlocksTaken at "taken"             quarantined if revoked here
    notify() ─► unsent ──taken──► wire ──arrives──► NotifyArrived
    answer() ─► answers ──arrives──► Answered

A link keeps its order; steps of different links, and the two directions of one, may be taken in any order. A closed or cut link
may still deliver what was on the wire, as a kernel's buffers would, also after its sender has heard LinkClosed.

Faults are methods of the hub and say whether they had something to act on, so that a test knows that its fault fired.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from connector.landing import Landing, RunningWrite
from connector.tally import Tally
from connector.transport import Answered, BlocksTaken, Emit, LeaseRef, LinkClosed, NotifyArrived, WriteRefused
from connector.writes import Bytes, IncomingNotice, IncomingWrite, OutgoingWrite, checked_memory, decode, gather, pack
from proto import baton_pb2 as pb


class LinkKey(NamedTuple):
    """A link, hub-wide: link ids are unique per sender only."""

    sender: str  # address of the sending transport
    link_id: str


class LinkStep(NamedTuple):
    """A step that the hub could take now; of each link and kind there is one at most."""

    key: LinkKey
    receiver: str | None  # address of the receiving transport; None: nobody listens
    kind: str  # "take", "deliver", "return", or "close" where the sender is told that the link is gone


class _Message(NamedTuple):
    """What travels: one frame, or header and payload."""

    header: bytes
    payload: Bytes | None


class _Link:
    """One ordered connection; both directions. `receiver` is None where nobody listens."""

    __slots__ = ("answers", "is_open", "key", "receiver", "running", "sender", "unsent", "wire")

    def __init__(self, key: LinkKey, sender: MemoryTransport, receiver: MemoryTransport | None) -> None:
        self.key = key
        self.sender = sender
        self.receiver = receiver
        self.unsent: deque[OutgoingWrite | bytes] = deque()
        self.wire: deque[_Message] = deque()
        self.running: RunningWrite | None = None
        self.answers: deque[Answered | LinkClosed] = deque()
        self.is_open = True

    def end(self, reason: str, num_delivered: int) -> None:
        """Close for the sender; the first messages on the wire still arrive."""
        self.is_open = False
        self.unsent.clear()
        self.answers.clear()
        self.answers.append(LinkClosed(self.key.link_id, reason))
        while len(self.wire) > num_delivered:
            self.wire.pop()


class MemoryHub:
    """The network between memory transports, and its schedule."""

    def __init__(self) -> None:
        self._num_attached = 0
        self._transports: dict[str, MemoryTransport] = {}
        self._links: dict[LinkKey, _Link] = {}

    # ------------------------------------------------------------ schedule

    def pending(self) -> int:
        """How many different steps could be taken now."""
        return len(self._steps())

    def due(self) -> tuple[LinkStep, ...]:
        """The pending steps by name, in the order that `step` counts them in."""
        steps = []
        for perform, link in self._steps():
            kind = perform.__name__.removeprefix("_")
            if kind == "return" and isinstance(link.answers[0], LinkClosed):
                kind = "close"
            steps.append(LinkStep(link.key, None if link.receiver is None else link.receiver.address, kind))
        return tuple(steps)

    def step(self, i: int = 0) -> None:
        """Take the i-th pending step; raises IndexError if there is none."""
        perform, link = self._steps()[i]
        perform(link)
        self._forget_if_over(link)

    def run(self) -> None:
        """Take steps until none is pending."""
        while self.pending():
            self.step()

    # ------------------------------------------------------------ faults

    def links(self) -> tuple[LinkKey, ...]:
        """Links that are open, oldest first."""
        return tuple(key for key, link in self._links.items() if link.is_open)

    def cut(self, key: LinkKey, num_delivered: int = 0) -> bool:
        """Break a link; of what is on the wire the first messages still arrive. False: no such open link."""
        link = self._links.get(key)
        if link is None or not link.is_open:
            return False
        link.end("connection lost", num_delivered)
        return True

    def flip(self, key: LinkKey, byte_index: int = 0) -> bool:
        """Flip a bit in the payload of the first write on the wire. False: there is none."""
        link = self._links.get(key)
        for message in link.wire if link is not None else ():
            if message.payload is not None:
                message.payload[byte_index % len(message.payload)] ^= 1
                return True
        return False

    def drop_answer(self, key: LinkKey) -> bool:
        """Lose the next answer on its way to the sender; the link stays. False: none is under way."""
        link = self._links.get(key)
        if link is None or not link.answers or isinstance(link.answers[0], LinkClosed):
            return False
        link.answers.popleft()
        return True

    # ------------------------------------------------------------ used by the transports

    def attach(self, transport: MemoryTransport, node_id: str) -> str:
        """Give a transport its address, which no later incarnation gets."""
        self._num_attached += 1
        address = f"{node_id}#{self._num_attached}"
        self._transports[address] = transport
        return address

    def detach(self, address: str) -> None:
        """Forget a transport that stopped: nothing reaches it, its peers' links close, what it has sent still arrives."""
        del self._transports[address]
        for link in tuple(self._links.values()):
            if link.receiver is not None and link.receiver.address == address:
                link.receiver, link.running = None, None
                if link.is_open:
                    link.end("connection lost", 0)
                link.wire.clear()
            if link.key.sender == address:
                link.end("stopped", len(link.wire))
                link.answers.clear()
            self._forget_if_over(link)

    def connect(self, key: LinkKey, sender: MemoryTransport, endpoint: pb.Endpoint) -> None:
        """Make a link; where nobody listens, or the secret is wrong, its end is the first thing pending."""
        if key in self._links:
            raise ValueError(f"link {key.link_id} is open already")
        receiver = self._transports.get(endpoint.address) if endpoint.transport == "memory" else None
        link = self._links[key] = _Link(key, sender, receiver)
        if receiver is None or receiver.endpoint() != endpoint:
            link.end("could not connect", 0)

    def find_open(self, key: LinkKey) -> _Link | None:
        """The link, while its sender has not closed it."""
        link = self._links.get(key)
        return link if link is not None and link.is_open else None

    # ------------------------------------------------------------ steps

    def _steps(self) -> list[tuple[Callable[[_Link], None], _Link]]:
        steps: list[tuple[Callable[[_Link], None], _Link]] = []
        for link in self._links.values():
            if link.unsent:
                steps.append((self._take, link))
            if link.running is not None or link.wire:
                steps.append((self._deliver, link))
            if link.answers:
                steps.append((self._return, link))
        return steps

    def _forget_if_over(self, link: _Link) -> None:
        if not (link.is_open or link.unsent or link.wire or link.running or link.answers):
            del self._links[link.key]

    def _take(self, link: _Link) -> None:
        """The sender reads the source of its next message; from here on it is on the wire."""
        message = link.unsent.popleft()
        link.wire.append(link.sender.take(link.key.link_id, message))

    def _deliver(self, link: _Link) -> None:
        """The receiver finishes the write that runs, or begins with the next message."""
        assert link.receiver is not None, "nothing is on the wire to where nobody listens"
        if link.running is not None:
            running, link.running = link.running, None
            link.receiver.landing.finish(running)
        else:
            link.running = link.receiver.begin(link, link.wire.popleft())

    def _return(self, link: _Link) -> None:
        """An answer, or the link's end, reaches the sender."""
        link.sender.emit(link.answers.popleft())


class MemoryTransport:
    """Implements transport.Transport over a hub.

    memory: [num_blocks, block_bytes] u8, contiguous. `emit` is called from inside the hub's steps and from inside `revoke`; not
    after `stop`.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], node_id: str, hub: MemoryHub, emit: Emit) -> None:
        self.name = node_id
        self.emit = emit
        self.landing = Landing(memory, emit)
        self.address = hub.attach(self, node_id)
        self._memory = checked_memory(memory)
        self._hub = hub
        self._bytes_to = Tally()
        self._is_stopped = False

    def link_key(self, link_id: str) -> LinkKey:
        """What the hub's faults call a link that this transport opened."""
        return LinkKey(self.address, link_id)

    def open(self, link_id: str, endpoint: pb.Endpoint) -> None:
        """As Sender.open."""
        if not self._is_stopped:
            self._hub.connect(self.link_key(link_id), self, endpoint)

    def write(self, link_id: str, lease: LeaseRef, blocks: Sequence[tuple[int, int]]) -> None:
        """As Sender.write; raises ValueError for a source block that does not exist."""
        num_blocks, block_bytes = self._memory.shape
        if any(not 0 <= block_id < num_blocks for _, block_id in blocks):
            raise ValueError(f"a source block is outside 0..{num_blocks - 1}")
        if (link := self._hub.find_open(self.link_key(link_id))) is not None:
            link.unsent.extend(pack(lease, blocks, block_bytes))

    def notify(self, link_id: str, payload: bytes) -> None:
        """As Sender.notify."""
        if (link := self._hub.find_open(self.link_key(link_id))) is not None:
            link.unsent.append(payload)

    def close(self, link_id: str) -> None:
        """As Sender.close; what is on the wire still arrives."""
        if (link := self._hub.find_open(self.link_key(link_id))) is not None:
            link.end("closed", len(link.wire))

    def endpoint(self) -> pb.Endpoint:
        """As Receiver.endpoint."""
        return pb.Endpoint(transport="memory", address=self.address, link_secret=self.address.encode())

    def admit(self, lease_id: int, secret: bytes, block_ids: Sequence[int]) -> None:
        """As Receiver.admit."""
        self.landing.admit(lease_id, secret, block_ids)

    def revoke(self, lease_id: int) -> None:
        """As Receiver.revoke; RevokeDone may be emitted before this returns."""
        self.landing.revoke(lease_id)

    def answer(self, reply_to: object, payload: bytes) -> None:
        """As Receiver.answer; nothing happens if the link is gone."""
        if not isinstance(reply_to, _Link):
            raise TypeError(f"{reply_to!r} is no reply_to of this transport")
        if reply_to.is_open:
            reply_to.answers.append(Answered(reply_to.key.link_id, payload))

    def stop(self) -> None:
        """As Transport.stop; links end without LinkClosed, since nobody is left to be told."""
        if not self._is_stopped:
            self._is_stopped = True
            self._hub.detach(self.address)

    def snapshot(self) -> Mapping[str, object]:
        """JSON-able counters, as ZmqTransport.snapshot."""
        num_links = sum(key.sender == self.address for key in self._hub.links())
        return {"kv_bytes_sent": self._bytes_to.snapshot(), "links": num_links, **self.landing.snapshot()}

    # ------------------------------------------------------------ called by the hub

    def take(self, link_id: str, message: OutgoingWrite | bytes) -> _Message:
        """Read the source of a message that the wire takes now."""
        if isinstance(message, bytes):
            return _Message(message, None)
        header, payload = gather(self._memory, message)
        self._bytes_to.add(link_id.partition("@")[0], payload.nbytes)
        if message.finished:
            self.emit(BlocksTaken(link_id, message.lease.lease_id, message.finished))
        return _Message(header, payload)

    def begin(self, link: _Link, message: _Message) -> RunningWrite | None:
        """Take in one message; a write that may land stays running until the hub's next step of this link."""
        frames: list[bytes | memoryview] = [message.header]
        if message.payload is not None:
            frames.append(message.payload.data)
        arrived = decode(frames)
        match arrived:
            case IncomingWrite():
                return self.landing.begin(arrived, link.sender.name)
            case IncomingNotice(payload):
                self.emit(NotifyArrived(link, payload))
            case WriteRefused():
                self.landing.refuse(arrived)
        return None
