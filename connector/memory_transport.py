"""The transport that moves bytes when it is told to: for the deterministic simulation and the tests, and shipped as product code.

Same messages, same checks as zmq, but no thread, no clock, no socket: whoever owns the hub decides which pending step happens next
(memory_link.py has the steps), so every order that a real network could give can be had, and had again. A hub is two-sided, as zmq
and shm, where the receiver lets each write in, or one-sided, as RDMA, where a write lands whether or not its lease still lives.

A link keeps its order; steps of different links, and the two directions of one, may be taken in any order. A closed or cut link
may still deliver what was on the wire, as a kernel's buffers would, also after its sender has heard LinkClosed.

Faults are methods of the hub and say whether they had something to act on, so that a test knows that its fault fired.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from connector.copying import Bytes
from connector.landing import Landing
from connector.memory_link import LinkKey, MemoryLink, Message, OneSidedLink, TwoSidedLink
from connector.one_sided import OneSidedWriters
from connector.tally import Tally
from connector.transport import Answered, Emit, LeaseRef
from connector.writes import OutgoingWrite, checked_memory, gather, pack
from proto import baton_pb2 as pb


class LinkStep(NamedTuple):
    """A step that the hub could take now; of each link and kind there is one at most."""

    key: LinkKey
    receiver: str | None  # address of the receiving transport; None: nobody listens
    kind: str  # see memory_link.py


class MemoryHub:
    """The network between memory transports, and its schedule."""

    def __init__(self, *, is_one_sided: bool = False) -> None:
        self.is_one_sided = is_one_sided
        self._num_attached = 0
        self._transports: dict[str, MemoryTransport] = {}
        self._links: dict[LinkKey, MemoryLink] = {}

    # ------------------------------------------------------------ schedule

    def pending(self) -> int:
        """How many different steps could be taken now."""
        return len(self._steps())

    def due(self) -> tuple[LinkStep, ...]:
        """The pending steps by name, in the order that `step` counts them in."""
        return tuple(
            LinkStep(link.key, None if link.receiver is None else link.receiver.address, kind)
            for kind, _, link in self._steps()
        )

    def step(self, i: int = 0) -> None:
        """Take the i-th pending step; raises IndexError if there is none."""
        _, perform, link = self._steps()[i]
        perform()
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
            if isinstance(message, Message) and message.payload is not None:
                message.payload[byte_index % len(message.payload)] ^= 1
                return True
        return False

    def drop_answer(self, key: LinkKey) -> bool:
        """Lose the next answer on its way to the sender; the link stays. False: none is under way."""
        link = self._links.get(key)
        if link is None or not link.back or not isinstance(link.back[0], Answered):
            return False
        link.back.popleft()
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
                link.lose_receiver()
            if link.key.sender == address:
                link.end("stopped", len(link.wire))
                link.back.clear()
            self._forget_if_over(link)

    def connect(self, key: LinkKey, sender: MemoryTransport, endpoint: pb.Endpoint) -> None:
        """Make a link; where nobody listens, or the secret is wrong, its end is the first thing pending."""
        if key in self._links:
            raise ValueError(f"link {key.link_id} is open already")
        receiver = self._transports.get(endpoint.address) if endpoint.transport == "memory" else None
        link = self._links[key] = self._new_link(key, sender, receiver)
        if receiver is None or receiver.endpoint() != endpoint:
            link.end("could not connect", 0)

    def find_open(self, key: LinkKey) -> MemoryLink | None:
        """The link, while its sender has not closed it."""
        link = self._links.get(key)
        return link if link is not None and link.is_open else None

    # ------------------------------------------------------------ inside

    def _new_link(self, key: LinkKey, sender: MemoryTransport, receiver: MemoryTransport | None) -> MemoryLink:
        if self.is_one_sided:
            return OneSidedLink(key, sender, receiver, None if receiver is None else receiver.writers)
        return TwoSidedLink(key, sender, receiver, None if receiver is None else receiver.landing)

    def _steps(self) -> list[tuple[str, Callable[[], None], MemoryLink]]:
        """Of all links; those by which a receiver drops one come last."""
        steps = [(kind, perform, link) for link in self._links.values() for kind, perform in link.steps()]
        return sorted(steps, key=lambda step: step[0] == "drop")

    def _forget_if_over(self, link: MemoryLink) -> None:
        if link.is_over:
            del self._links[link.key]


class MemoryTransport:
    """Implements transport.Transport over a hub.

    memory: [num_blocks, block_bytes] u8, contiguous. `emit` is called from inside the hub's steps and from inside `revoke`; not
    after `stop`.
    """

    def __init__(self, memory: Bytes, node_id: str, hub: MemoryHub, emit: Emit) -> None:
        self.name = node_id
        self.emit = emit
        self.landing = Landing(memory, emit)
        self.writers = OneSidedWriters(self.landing)  # nobody, where the hub is two-sided
        self.landing.tell_of_ends(self._stop_writers)
        self.address = hub.attach(self, node_id)
        self.memory = checked_memory(memory)
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
        num_blocks, block_bytes = self.memory.shape
        if any(not 0 <= block_id < num_blocks for _, block_id in blocks):
            raise ValueError(f"a source block is outside 0..{num_blocks - 1}")
        if (link := self._hub.find_open(self.link_key(link_id))) is not None:
            link.unsent.extend(pack(lease, blocks, block_bytes))

    def drop(self, link_id: str, lease: LeaseRef) -> None:
        """As Sender.drop; BlocksTaken is emitted before this returns."""
        if (link := self._hub.find_open(self.link_key(link_id))) is not None:
            link.drop_writes(lease)

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
        if not isinstance(reply_to, MemoryLink):
            raise TypeError(f"{reply_to!r} is no reply_to of this transport")
        if reply_to.is_open:
            reply_to.back.append(Answered(reply_to.key.link_id, payload))

    def stop(self) -> None:
        """As Transport.stop; links end without LinkClosed, since nobody is left to be told."""
        if not self._is_stopped:
            self._is_stopped = True
            self._hub.detach(self.address)

    def snapshot(self) -> Mapping[str, object]:
        """JSON-able counters, as ZmqTransport.snapshot."""
        num_links = sum(key.sender == self.address for key in self._hub.links())
        return {"kv_bytes_sent": self._bytes_to.snapshot(), "links": num_links, **self.landing.snapshot()}

    def _stop_writers(self, lease_id: int) -> None:
        for link in self.writers.end(lease_id):
            assert isinstance(link, OneSidedLink), "who writes into one-sided memory does so on such a link"
            link.stop(lease_id)

    # ------------------------------------------------------------ called by the links

    def read(self, link_id: str, write: OutgoingWrite) -> tuple[bytes, Bytes]:
        """As memory_link.End: copy the source of a message that the wire takes now."""
        header, payload = gather(self.memory, write)
        self._bytes_to.add(link_id.partition("@")[0], payload.nbytes)
        return header, payload
