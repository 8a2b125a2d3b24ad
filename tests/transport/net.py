"""Nodes with a transport each, what their transports said, and waiting for it: the same for every kind of transport."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from connector.landing import Landing
from connector.memory_transport import MemoryHub, MemoryTransport
from connector.nixl_transport import NixlTransport
from connector.shm_transport import ShmTransport
from connector.transport import BlocksLanded, BlocksTaken, ReceiverEvent, SenderEvent
from connector.zmq_options import LinkRules
from connector.zmq_transport import ZmqTransport
from engine.shared_bytes import SharedBytes
from kernels.cpu_copies import find_copier
from proto import baton_pb2 as pb

_Kind = TypeVar("_Kind")

WAIT_S = 60.0
COPIER = find_copier()  # as nodes have it


class Recorder:
    """An `emit` that keeps what it was given, and on which thread; all recorders of a net share a condition."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._events: list[tuple[SenderEvent | ReceiverEvent, int]] = []
        self.may_go_on = threading.Event()  # cleared: whoever emits is held up, like a thread that hangs
        self.may_go_on.set()

    def __call__(self, event: SenderEvent | ReceiverEvent) -> None:
        with self._changed:
            self._events.append((event, threading.get_ident()))
            self._changed.notify_all()
        self.may_go_on.wait(WAIT_S)

    def all(self) -> list[SenderEvent | ReceiverEvent]:
        with self._changed:
            return [event for event, _ in self._events]

    def of(self, kind: type[_Kind]) -> list[_Kind]:
        return [event for event in self.all() if isinstance(event, kind)]

    def thread_of(self, wanted: SenderEvent | ReceiverEvent) -> int:
        with self._changed:
            return next(thread for event, thread in self._events if event == wanted)

    def landed(self, lease_id: int) -> list[int]:
        return [i for event in self.of(BlocksLanded) if event.lease_id == lease_id for i in event.block_indices]

    def taken(self, lease_id: int) -> list[int]:
        return [i for event in self.of(BlocksTaken) if event.lease_id == lease_id for i in event.block_indices]


class Node:
    """A KV memory, its transport, and what that said."""

    def __init__(
        self,
        memory: npt.NDArray[np.uint8],
        said: Recorder,
        transport: ZmqTransport | MemoryTransport | ShmTransport | NixlTransport,
    ) -> None:
        self.memory = memory
        self.said = said
        self.transport = transport

    def counts(self, name: str) -> Mapping[str, int]:
        """One of the transport's tallies."""
        counts = self.transport.snapshot()[name]
        assert isinstance(counts, dict)
        return counts


class Net(Protocol):
    """Where nodes meet."""

    def node(self, name: str, num_blocks: int = 8, block_bytes: int = 512) -> Node:
        """A new node with zeroed memory."""

    def until(self, is_reached: Callable[[], bool]) -> None:
        """Let things happen until the condition holds; fails if it never does."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, at: TracebackType | None
    ) -> None: ...


class MemoryNet:
    """Nodes on one hub; `until` takes steps, oldest link first."""

    def __init__(self, *, is_one_sided: bool = False) -> None:
        self.hub = MemoryHub(is_one_sided=is_one_sided)
        self._changed = threading.Condition()
        self._nodes: list[Node] = []

    def node(self, name: str, num_blocks: int = 8, block_bytes: int = 512) -> Node:
        memory = np.zeros((num_blocks, block_bytes), np.uint8)
        said = Recorder(self._changed)
        made = Node(memory, said, MemoryTransport(memory, name, self.hub, said))
        self._nodes.append(made)
        return made

    def until(self, is_reached: Callable[[], bool]) -> None:
        while not is_reached():
            assert self.hub.pending(), "nothing is pending, and what was waited for has not come"
            self.hub.step()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, at: TracebackType | None) -> None:
        for node in self._nodes:
            node.transport.stop()


class ThreadedNet:
    """Nodes whose transports have threads; `until` waits for them."""

    def __init__(self, checksums: bool = True) -> None:
        self._checksums = checksums
        self._changed = threading.Condition()
        self._nodes: list[Node] = []
        self._kept: list[SharedBytes] = []  # their descriptors are open as long as they live

    def node(self, name: str, num_blocks: int = 8, block_bytes: int = 512) -> Node:
        made = self._make(name, len(self._nodes) + 1, num_blocks, block_bytes, Recorder(self._changed))
        self._nodes.append(made)
        return made

    def _make(self, name: str, incarnation: int, num_blocks: int, block_bytes: int, said: Recorder) -> Node:
        raise NotImplementedError

    def until(self, is_reached: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(is_reached, WAIT_S), "what was waited for has not come in time"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, at: TracebackType | None) -> None:
        for node in self._nodes:
            node.said.may_go_on.set()
            node.transport.stop()


class ZmqNet(ThreadedNet):
    """Nodes on loopback."""

    def __init__(self, checksums: bool = True, is_encrypted: bool = False) -> None:
        super().__init__(checksums)
        self.is_encrypted = is_encrypted  # of the nodes made from now on

    def _make(self, name: str, incarnation: int, num_blocks: int, block_bytes: int, said: Recorder) -> Node:
        shared = SharedBytes(num_blocks, block_bytes)
        self._kept.append(shared)
        memory, rules = shared.bytes, LinkRules(self._checksums, self.is_encrypted)
        return Node(
            memory,
            said,
            ZmqTransport(memory, name, incarnation, said, landing=Landing(memory, said, COPIER), rules=rules),
        )


class ShmNet(ThreadedNet):
    """Nodes on one host, here even in one process: what they share still goes through the kernel."""

    def _make(self, name: str, incarnation: int, num_blocks: int, block_bytes: int, said: Recorder) -> Node:
        shared = SharedBytes(num_blocks, block_bytes)
        self._kept.append(shared)
        landing, has_checksums = Landing(shared.bytes, said, COPIER), self._checksums
        transport = ShmTransport(
            shared.bytes, shared.descriptor, name, incarnation, said, landing, checksums=has_checksums
        )
        return Node(shared.bytes, said, transport)


class NixlNet(ThreadedNet):
    """Nodes whose bytes UCX moves; needs NIXL."""

    def _make(self, name: str, incarnation: int, num_blocks: int, block_bytes: int, said: Recorder) -> Node:
        shared = SharedBytes(num_blocks, block_bytes)
        self._kept.append(shared)
        transport = NixlTransport(shared.bytes, name, incarnation, said, checksums=self._checksums)
        return Node(shared.bytes, said, transport)


def commit(lease_id: int) -> bytes:
    """A notification's payload."""
    return pb.DataMessage(commit=pb.Commit(lease_id=lease_id, secret=b"s" * 16)).SerializeToString()


def answer(lease_id: int) -> bytes:
    """An answer's payload."""
    return pb.DataMessage(answer=pb.CommitAnswer(lease_id=lease_id)).SerializeToString()


def fill_at_random(memory: npt.NDArray[np.uint8], seed: int = 0) -> None:
    """Give every block bytes of its own."""
    memory[:] = np.random.default_rng(seed).integers(0, 256, memory.shape, np.uint8)
