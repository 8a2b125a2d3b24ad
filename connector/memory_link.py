"""One link of the in-memory transport: what is on it, and the steps that could be taken now. Whoever owns the hub says which is.

    two-sided   write() ─► unsent ──take──► wire ──deliver──► running ──deliver──► landed
                           BlocksTaken at "take"              quarantined if revoked here
    one-sided   write() ─► unsent ──take──► wire ──land──► in memory ──deliver──► checked there, BlocksTaken on its way back
                           attach first      nobody asks whether the lease is still there: see one_sided.py
    notify()             ─► unsent ──take──► wire ──deliver──► NotifyArrived
    answer()             ─► back ──return──► Answered

A link that has ended may still deliver what was on the wire, as a kernel's buffers would; "close" is when its sender hears of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from connector.copying import Bytes
from connector.landing import Landing, RunningWrite
from connector.one_sided import Attach, Attached, OneSidedWriters, Stop, Stopped
from connector.transport import Answered, BlocksTaken, Emit, LeaseRef, LinkClosed, NotifyArrived, WriteRefused
from connector.writes import IncomingNotice, IncomingWrite, OutgoingWrite, decode, take_out

Step = tuple[str, Callable[[], None]]  # its kind, and how it is taken


class LinkKey(NamedTuple):
    """A link, hub-wide: link ids are unique per sender only."""

    sender: str  # address of the sending transport
    link_id: str


class End(Protocol):
    """What a link needs of the transport at either end of it."""

    name: str
    address: str
    emit: Emit

    def read(self, link_id: str, write: OutgoingWrite) -> tuple[bytes, Bytes]:
        """Header and payload of a write: its source is read now."""

    @property
    def memory(self) -> Bytes:
        """The node's KV memory."""

    @property
    def landing(self) -> Landing:
        """Where writes land in it."""


@dataclass(slots=True)
class Message:
    """What travels to the receiver: one frame, or header and payload."""

    header: bytes
    payload: Bytes | None = None
    outgoing: OutgoingWrite | None = None  # one-sided: what of, for the sender to hear
    block_ids: tuple[int, ...] = ()  # one-sided: where the lease lies, as far as its sender knows


class _Gone(NamedTuple):
    """Behind everything else that was on the wire of a one-sided link: its sender has let go of it."""


class MemoryLink:
    """One ordered connection, two-sided; both directions. `receiver` is None where nobody listens."""

    def __init__(self, key: LinkKey, sender: End, receiver: End | None) -> None:
        self.key = key
        self.sender = sender
        self.receiver = receiver
        self.is_open = True
        self.unsent: deque[OutgoingWrite | bytes] = deque()
        self.wire: deque[Message | Attach | Stopped | _Gone] = deque()
        self.back: deque[Answered | LinkClosed | BlocksTaken | Attached | Stop] = deque()

    def steps(self) -> list[Step]:
        """What could happen now; of each kind one at most."""
        steps: list[Step] = []
        if self.unsent:
            steps.append(("take", self.take))
        if self.wire or self.has_running:
            steps.append(("deliver", self.deliver))
        if self.back:
            steps.append(("close" if isinstance(self.back[0], LinkClosed) else "return", self.give_back))
        return steps

    @property
    def has_running(self) -> bool:
        """Whether a write is at the receiver and not done with."""
        raise NotImplementedError

    @property
    def is_over(self) -> bool:
        """Nothing more will happen on it."""
        return not (self.is_open or self.unsent or self.wire or self.has_running or self.back)

    def take(self) -> None:
        """The sender reads the source of its next message; from here on it is on the wire."""
        raise NotImplementedError

    def drop_writes(self, lease: LeaseRef) -> None:
        """The sender reads no more of what it has queued for a lease; what is on the wire was copied."""
        if (rest := take_out(self.unsent, lease)) is not None:
            self.sender.emit(BlocksTaken(self.key.link_id, lease.lease_id, rest.finished, is_dropped=True))

    def deliver(self) -> None:
        """The receiver hears what comes next."""
        raise NotImplementedError

    def give_back(self) -> None:
        """What comes back, or the link's end, reaches the sender."""
        raise NotImplementedError

    def end(self, reason: str, num_delivered: int) -> None:
        """Close for the sender; the first messages on the wire still arrive."""
        self.is_open = False
        self.unsent.clear()
        self.back.clear()
        self.back.append(LinkClosed(self.key.link_id, reason))
        while len(self.wire) > num_delivered:
            self.wire.pop()

    def lose_receiver(self) -> None:
        """Whoever listened is gone, and so is what was on its way."""
        self.receiver = None
        if self.is_open:
            self.end("connection lost", 0)
        self.wire.clear()


class TwoSidedLink(MemoryLink):
    """The receiver copies in what a lease admits: such a write runs from one step to the next."""

    def __init__(self, key: LinkKey, sender: End, receiver: End | None, landing: Landing | None) -> None:
        super().__init__(key, sender, receiver)
        self._landing = landing
        self._running: RunningWrite | None = None

    @property
    def has_running(self) -> bool:
        """See MemoryLink."""
        return self._running is not None

    def take(self) -> None:
        """See MemoryLink."""
        message = self.unsent.popleft()
        if isinstance(message, bytes):
            self.wire.append(Message(message))
            return
        self.wire.append(Message(*self.sender.read(self.key.link_id, message)))
        if message.finished:
            self.sender.emit(BlocksTaken(self.key.link_id, message.lease.lease_id, message.finished))

    def deliver(self) -> None:
        """Finish the write that runs, or begin with the next message."""
        assert self.receiver is not None and self._landing is not None, "nothing is on the wire to where nobody listens"
        if self._running is not None:
            running, self._running = self._running, None
            self._landing.finish(running)
            return
        message = self.wire.popleft()
        assert isinstance(message, Message), f"{message} is of a one-sided link"
        match decode_message(message):
            case IncomingWrite() as write:
                self._running = self._landing.begin(write, self.sender.name)
            case IncomingNotice(payload):
                self.receiver.emit(NotifyArrived(self, payload))
            case WriteRefused() as refused:
                self._landing.refuse(refused)

    def give_back(self) -> None:
        """See MemoryLink."""
        event = self.back.popleft()
        assert isinstance(event, Answered | LinkClosed), f"{event} is of a one-sided link"
        self.sender.emit(event)

    def lose_receiver(self) -> None:
        """See MemoryLink."""
        super().lose_receiver()
        self._running = None


class OneSidedLink(MemoryLink):
    """The sender writes into the receiver's memory by itself, once told where, until it has said that it stopped."""

    def __init__(self, key: LinkKey, sender: End, receiver: End | None, writers: OneSidedWriters | None) -> None:
        super().__init__(key, sender, receiver)
        self._writers = writers
        self._landed: Message | None = None  # in memory, and the receiver has not heard of it
        self._known: dict[LeaseRef, tuple[int, ...] | None] = {}  # where leases lie; None: nowhere (any more)
        self._asked: LeaseRef | None = None  # a lease that this is not known of yet

    @property
    def has_running(self) -> bool:
        """See MemoryLink."""
        return self._landed is not None

    def steps(self) -> list[Step]:
        """See MemoryLink. "drop": the receiver waits no longer for the sender to stop."""
        steps: list[Step] = []
        if self.unsent and self._asked is None:
            steps.append(("take", self.take))
        if (
            self._landed is None
            and self.wire
            and isinstance(self.wire[0], Message)
            and self.wire[0].payload is not None
        ):
            steps.append(("land", self.land))
        elif self.wire or self._landed is not None:
            steps.append(("deliver", self.deliver))
        if self.back:
            steps.append(("close" if isinstance(self.back[0], LinkClosed) else "return", self.give_back))
        if self._writers is not None and self._writers.awaits_stop(self):
            steps.append(("drop", self.drop))
        return steps

    def take(self) -> None:
        """See MemoryLink."""
        message = self.unsent[0]
        if isinstance(message, bytes):
            self.wire.append(Message(message))
        elif (lease := message.lease) not in self._known:
            self._asked = lease
            self.wire.append(Attach(lease.lease_id, lease.secret))
            return
        elif (block_ids := self._known[lease]) is None:
            self._taken(message)
        else:
            self.wire.append(Message(*self.sender.read(self.key.link_id, message), message, block_ids))
        self.unsent.popleft()

    def land(self) -> None:
        """The hardware puts a write into the receiver's memory, whatever has become of the lease meanwhile."""
        message = self.wire.popleft()
        assert self.receiver is not None and isinstance(message, Message) and message.payload is not None
        assert message.outgoing is not None
        ids, begin = message.block_ids, 0
        spans = message.outgoing.spans
        is_within = all(span.block_index < len(ids) and ids[span.block_index] >= 0 for span in spans)
        for span in spans if is_within else ():  # hardware is told of the lease's memory and of no other
            piece = message.payload[begin : begin + span.length]
            np.copyto(self.receiver.memory[ids[span.block_index], span.offset : span.offset + span.length], piece)
            begin += span.length
        self._landed = message

    def deliver(self) -> None:
        """The receiver hears of the write that landed, or of the next message."""
        assert self.receiver is not None and self._writers is not None, "nothing is on the wire to where nobody listens"
        message, self._landed = self._landed or self.wire.popleft(), None
        match message:
            case Attach():
                self._send_back(self._writers.attach(self, message))
            case Stopped(lease_id):
                self._writers.stopped(self, lease_id)
            case _Gone():
                self._writers.gone(self)
            case Message():
                self._deliver(message)

    def _deliver(self, message: Message) -> None:
        assert self.receiver is not None and self._writers is not None
        match decode_message(message):
            case IncomingWrite() as write:
                self._writers.written(write, self.sender.name)
                if message.outgoing is not None and self.is_open:
                    self._send_back(_taken(self.key, message.outgoing))
            case IncomingNotice(payload):
                self.receiver.emit(NotifyArrived(self, payload))
            case WriteRefused() as refused:
                self.receiver.landing.refuse(refused)

    def give_back(self) -> None:
        """See MemoryLink."""
        match self.back.popleft():
            case Attached(block_ids):
                assert self._asked is not None, "an answer to no question"
                self._known[self._asked], self._asked = block_ids, None
            case Stop(lease_id):  # what waits is taken from the queue in its turn, and written nowhere
                self._known |= {lease: None for lease in self._known if lease.lease_id == lease_id}
                self.wire.append(Stopped(lease_id))
            case event:
                self.sender.emit(event)

    def stop(self, lease_id: int) -> None:
        """Receiver: the lease is over; its sender hears of it, unless it has let go of the link already."""
        if self.is_open:
            self.back.append(Stop(lease_id))

    def drop(self) -> None:
        """Receiver: tear the connection down, and with it what is on it."""
        assert self._writers is not None
        self.wire.clear()
        self._landed = None
        if self.is_open:
            self.end("dropped by the receiver", 0)
            self.wire.clear()
        self._writers.gone(self)

    def end(self, reason: str, num_delivered: int) -> None:
        """See MemoryLink. Behind what still arrives the receiver hears that nothing else will."""
        super().end(reason, num_delivered)
        self._asked = None
        if self.receiver is not None:
            self.wire.append(_Gone())

    def lose_receiver(self) -> None:
        """See MemoryLink."""
        super().lose_receiver()
        self._landed = None

    def _send_back(self, what: Attached | BlocksTaken | None) -> None:
        if what is not None and self.is_open:
            self.back.append(what)

    def _taken(self, message: OutgoingWrite) -> None:
        if (event := _taken(self.key, message)) is not None:
            self.sender.emit(event)


def decode_message(message: Message) -> IncomingWrite | IncomingNotice | WriteRefused:
    """Check the form of what arrived."""
    frames: list[bytes | memoryview] = [message.header]
    if message.payload is not None:
        frames.append(message.payload.data)
    return decode(frames)


def _taken(key: LinkKey, write: OutgoingWrite) -> BlocksTaken | None:
    return BlocksTaken(key.link_id, write.lease.lease_id, write.finished) if write.finished else None
