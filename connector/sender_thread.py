"""What the sending ends that have a thread share: commands, links by id, and a queue of descriptions for each.

Not here: connections, bytes, and when a source block is taken (zmq_sender.py, shm_sender.py).
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from connector.copying import Bytes
from connector.link_names import node_name
from connector.socket_thread import SocketThread
from connector.tally import Tally
from connector.transport import Emit, LeaseRef, LinkClosed
from connector.writes import OutgoingWrite, pack
from proto import baton_pb2 as pb

_LOG = logging.getLogger(__name__)


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


Command = _Open | _Write | _Notify | _Close


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


class SenderThread(SocketThread[Command | _More], Generic[_L, _More]):
    """Implements transport.Sender but for the connections."""

    def __init__(self, name: str, memory: Bytes, emit: Emit, message_bytes: Callable[[int], int]) -> None:
        """`message_bytes`: of a write of so many bytes, how much a message takes at most."""
        super().__init__(name)
        self._memory = memory
        self._emit = emit
        self._message_bytes = message_bytes
        self._links: dict[str, _L] = {}
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
        """Until the next handshake is overdue; None: sleep until something happens."""
        instants = [link.must_open_by for link in self._links.values() if not link.is_open]
        return max(0.0, min(instants) - time.monotonic()) if instants else None

    def _perform(self, command: Command | _More) -> None:
        if not isinstance(command, Command):
            self._hear(command)
        elif isinstance(command, _Open):
            if command.link_id in self._links:
                raise ValueError(f"link {command.link_id} is open already")
            opened = self._connect(command.link_id, command.endpoint)
            if isinstance(opened, str):
                self._emit(LinkClosed(command.link_id, opened))
            else:
                self._links[command.link_id] = opened
        elif (link := self._links.get(command.link_id)) is not None:
            match command:
                case _Write(_, lease, blocks):
                    block_bytes = self._memory.shape[1]
                    link.queue.extend(pack(lease, blocks, block_bytes, self._message_bytes(len(blocks) * block_bytes)))
                case _Notify(_, payload):
                    link.queue.append(payload)
                case _Close():
                    self._drop(link, "closed")

    def _drop(self, link: _L, reason: str) -> None:
        del self._links[link.link_id]
        self._disconnect(link)
        self._say_closed(link, reason)

    def _say_closed(self, link: _L, reason: str) -> None:
        _LOG.info("event=link_closed link=%s reason=%s", link.link_id, reason)
        self._emit(LinkClosed(link.link_id, reason))

    def _hear(self, word: _More) -> None:
        """What a transport's own threads tell this one."""

    @abstractmethod
    def _connect(self, link_id: str, endpoint: pb.Endpoint) -> _L | str:
        """Begin a connection and poll it from now on; or why there can be none."""

    @abstractmethod
    def _disconnect(self, link: _L) -> None:
        """Close the link's sockets and poll them no more."""
