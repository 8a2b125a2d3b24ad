"""What the sending ends that have a thread share: commands, links by id, and a queue of descriptions for each.

A name in an endpoint's address is looked up by a thread of its own, as a name server may be slow and this one serves every link;
what comes for the link meanwhile waits for it.

Not here: connections, bytes, and when a source block is taken (zmq_sender.py, shm_sender.py).
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Thread
from typing import Final, Generic, TypeVar

from connector.copying import Bytes
from connector.host_names import find_reachable, named_host
from connector.link_names import node_name
from connector.socket_thread import SocketThread
from connector.tally import Tally
from connector.transport import BlocksTaken, Emit, LeaseRef, LinkClosed
from connector.writes import OutgoingWrite, pack, take_out
from proto import baton_pb2 as pb

_LOG = logging.getLogger(__name__)
MAX_LOOK_UPS: Final = 64  # under way at once: a name server that hangs must not take every thread
FIND_S: Final = 1.8  # until a link's name is found; from then on it has as long to open


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
class _Drop:
    link_id: str
    lease: LeaseRef


@dataclass(frozen=True, slots=True)
class _Notify:
    link_id: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class _Close:
    link_id: str


Command = _Open | _Write | _Drop | _Notify | _Close
_Waiting = deque[_Write | _Drop | _Notify]  # for the address of a link that they are for


@dataclass(frozen=True, slots=True)
class _Nameless:
    """A link whose name is being looked up."""

    must_be_found_by: float  # monotonic seconds
    waiting: _Waiting


@dataclass(frozen=True, slots=True)
class _Found:
    """Where a link leads, or why nowhere."""

    opening: _Open
    waiting: _Waiting
    fault: str = ""


class SenderLink:
    """What waits for a link, and whether it is open."""

    def __init__(self, link_id: str, must_open_by: float) -> None:
        self.link_id = link_id
        self.peer = node_name(link_id)
        self.queue: deque[OutgoingWrite | bytes] = deque()
        self.must_open_by = must_open_by  # monotonic seconds
        self.is_open = False


_L = TypeVar("_L", bound=SenderLink)
_More = TypeVar("_More")  # what a transport's own threads tell this one


class SenderThread(SocketThread[Command | _Found | _More], Generic[_L, _More]):
    """Implements transport.Sender but for the connections."""

    def __init__(self, name: str, memory: Bytes, emit: Emit, message_bytes: Callable[[int], int]) -> None:
        """`message_bytes`: of a write of so many bytes, how much a message takes at most."""
        super().__init__(name)
        self._memory = memory
        self._emit = emit
        self._message_bytes = message_bytes
        self._links: dict[str, _L] = {}
        self._nameless: dict[str, _Nameless] = {}
        self._num_look_ups = 0  # those of links that were closed meanwhile, too
        self._bytes_to = Tally()

    def open(self, link_id: str, endpoint: pb.Endpoint) -> None:
        """As Sender.open."""
        self._mailbox.put(_Open(link_id, endpoint))

    def write(self, link_id: str, lease: LeaseRef, blocks: Sequence[tuple[int, int]]) -> None:
        """As Sender.write; raises ValueError for a source block that does not exist."""
        num_blocks = self._memory.shape[0]
        if any(not 0 <= block_id < num_blocks for _, block_id in blocks):
            raise ValueError(f"a source block is outside 0..{num_blocks - 1}")
        self._mailbox.put(_Write(link_id, lease, tuple(blocks)))

    def drop(self, link_id: str, lease: LeaseRef) -> None:
        """As Sender.drop."""
        self._mailbox.put(_Drop(link_id, lease))

    def notify(self, link_id: str, payload: bytes) -> None:
        """As Sender.notify; a payload that the receiver would not take, over MAX_FRAME_BYTES, ends the link."""
        self._mailbox.put(_Notify(link_id, payload))

    def close(self, link_id: str) -> None:
        """As Sender.close."""
        self._mailbox.put(_Close(link_id))

    def snapshot(self) -> Mapping[str, object]:
        """Bytes sent, per receiving node; open links."""
        return {"kv_bytes_sent": self._bytes_to.snapshot(), "links": len(self._links)}

    # ------------------------------------------------------------ the thread

    def _seconds_to_overdue(self) -> float | None:
        """Until the next name or handshake is overdue; None: sleep until something happens."""
        instants = [link.must_open_by for link in self._links.values() if not link.is_open]
        instants += [each.must_be_found_by for each in self._nameless.values()]
        return max(0.0, min(instants) - time.monotonic()) if instants else None

    def _perform(self, command: Command | _Found | _More) -> None:
        match command:
            case _Open():
                self._begin(command)
            case _Found():
                self._found(command)
            case _Write() | _Drop() | _Notify() if (nameless := self._nameless.get(command.link_id)) is not None:
                nameless.waiting.append(command)
            case _Close(link_id) if self._nameless.pop(link_id, None) is not None:
                self._say_closed(link_id, "closed")
            case _Write() | _Drop() | _Notify() | _Close():
                if (link := self._links.get(command.link_id)) is not None:
                    self._give(link, command)
            case _:
                self._hear(command)

    def _begin(self, command: _Open) -> None:
        if command.link_id in self._links or command.link_id in self._nameless:
            raise ValueError(f"link {command.link_id} is open already")
        if (host := named_host(command.endpoint.address)) is not None:
            self._look_up(command, host)
            return
        opened = self._connect(command.link_id, command.endpoint)
        if isinstance(opened, str):
            self._emit(LinkClosed(command.link_id, opened))
        else:
            self._links[command.link_id] = opened

    def _look_up(self, command: _Open, host: str) -> None:
        waiting = _Waiting()
        self._nameless[command.link_id] = _Nameless(time.monotonic() + FIND_S, waiting)
        try:
            if self._num_look_ups >= MAX_LOOK_UPS:
                raise RuntimeError("too many are under way")
            Thread(target=self._find, args=(command, waiting, host), name="look-up", daemon=True).start()
        except RuntimeError as fault:  # or there is no thread left
            del self._nameless[command.link_id]
            self._say_closed(command.link_id, f"{host} cannot be looked up: {fault}")
        else:
            self._num_look_ups += 1

    def _find(self, command: _Open, waiting: _Waiting, host: str) -> None:
        """On a thread of its own."""
        try:
            endpoint = pb.Endpoint()
            endpoint.CopyFrom(command.endpoint)
            endpoint.address = find_reachable(endpoint.address, host)
        except OSError as fault:
            self._mailbox.put(_Found(command, waiting, f"bad endpoint {command.endpoint.address}: {fault}"))
        else:
            self._mailbox.put(_Found(_Open(command.link_id, endpoint), waiting))

    def _found(self, found: _Found) -> None:
        self._num_look_ups -= 1
        link_id = found.opening.link_id
        nameless = self._nameless.get(link_id)
        if nameless is None or nameless.waiting is not found.waiting:
            return  # closed meanwhile
        del self._nameless[link_id]
        if found.fault:
            self._say_closed(link_id, found.fault)
            return
        for command in (found.opening, *found.waiting):
            self._perform(command)

    def _end_nameless(self) -> None:
        """Give up names that are overdue: whoever waits for their links has no more time than for others."""
        now = time.monotonic()
        for link_id in [each for each, nameless in self._nameless.items() if now >= nameless.must_be_found_by]:
            del self._nameless[link_id]
            self._say_closed(link_id, "its name was not found in time")

    def _give(self, link: _L, command: _Write | _Drop | _Notify | _Close) -> None:
        match command:
            case _Write(_, lease, blocks):
                block_bytes = self._memory.shape[1]
                link.queue.extend(pack(lease, blocks, block_bytes, self._message_bytes(len(blocks) * block_bytes)))
            case _Drop(_, lease):
                if (rest := take_out(link.queue, lease)) is not None:
                    self._tell_behind(link, rest)
            case _Notify(_, payload):
                link.queue.append(payload)
            case _Close():
                self._drop(link, "closed")

    def _drop(self, link: _L, reason: str) -> None:
        del self._links[link.link_id]
        self._disconnect(link)
        self._say_closed(link.link_id, reason)

    def _taken(self, link: _L, write: OutgoingWrite) -> None:
        """The blocks that end with this write are read no more: nothing of them is under way."""
        if write.finished:
            self._emit(BlocksTaken(link.link_id, write.lease.lease_id, write.finished, is_dropped=not write.spans))

    def _say_closed(self, link_id: str, reason: str) -> None:
        _LOG.info("event=link_closed link=%s reason=%s", link_id, reason)
        self._emit(LinkClosed(link_id, reason))

    def _hear(self, word: _More) -> None:
        """What a transport's own threads tell this one."""

    @abstractmethod
    def _tell_behind(self, link: _L, rest: OutgoingWrite) -> None:
        """Say `_taken` of a write that is not under way itself, once nothing else of its lease is on this link."""

    @abstractmethod
    def _connect(self, link_id: str, endpoint: pb.Endpoint) -> _L | str:
        """Begin a connection and poll it from now on; or why there can be none."""

    @abstractmethod
    def _disconnect(self, link: _L) -> None:
        """Close the link's sockets and poll them no more."""
