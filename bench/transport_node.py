"""`python -m bench.transport_node`: one end of bench/transport.py's transfers, in a process of its own as a node is.

stdin: a JSON object per line, what to do; stdout: a JSON object per line, what came of it, or {"error": sentence}. The first line
says what this end is like (`Setup`). A transfer lasts from the sender's giving it away until the receiver's word that all of it is
in place is back; blocks are written once per lease, so each transfer has a lease of its own.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any, Final

import numpy as np
import xxhash
import zmq

from connector.copying import Bytes
from connector.landing import Landing
from connector.nixl_agent import NixlLibrary
from connector.nixl_transport import NixlTransport
from connector.peer_memory import PeerMemory
from connector.shm_transport import ShmTransport
from connector.transport import (
    Answered,
    BlocksLanded,
    Emit,
    LeaseRef,
    LinkClosed,
    NotifyArrived,
    ReceiverEvent,
    SenderEvent,
    WriteRefused,
)
from connector.zmq_options import QUEUED_MESSAGES, LinkRules, Socket, bound_link
from connector.zmq_transport import ZmqTransport
from engine.shared_bytes import SharedBytes
from kernels.cpu_copies import find_copier
from proto import baton_pb2 as pb
from runtime.process import die_with_parent

TRANSPORTS: Final = ("zmq", "zmq+checksum", "shm", "shm+checksum", "nixl", "nixl+checksum")
_SECRET: Final = b"bench/transport."
_MESSAGE_BYTES: Final = 1 << 20  # of raw TCP: as large as zmq's
_PATIENCE_S: Final = 60.0
_LOOK_AGAIN_S: Final = 50e-6
_LINK: Final = "receiver@1/1"


class Failed(Exception):
    """A transfer did not happen; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What an end is like; the fields are the keys of its first line."""

    role: str  # "sender" or "receiver"
    block_bytes: int
    num_blocks: int
    transports: tuple[str, ...]
    parent_pid: int


class _Way:
    """A transport of this end, and what it said about the transfer that is under way."""

    def __init__(self, name: str, memory: SharedBytes, role: str) -> None:
        self._name = name
        self._landed: Counter[int] = Counter()  # blocks, by lease
        self._problem: str | None = None
        self._closed: str | None = None
        self._answered = Event()
        self._num_blocks = len(memory.bytes)
        checksums = name.endswith("+checksum")
        emit: Emit = self._on_event
        landing = Landing(memory.bytes, emit, find_copier())
        self.transport: ZmqTransport | ShmTransport | NixlTransport
        if name.startswith("zmq"):
            rules = LinkRules(has_checksums=checksums)
            self.transport = ZmqTransport(memory.bytes, role, 1, emit, landing=landing, rules=rules)
        elif name.startswith("shm"):
            self.transport = ShmTransport(memory.bytes, memory.descriptor, role, 1, emit, landing, checksums=checksums)
        else:
            self.transport = NixlTransport(memory.bytes, role, 1, emit, checksums=checksums)

    def admit(self, lease_id: int) -> None:
        self._landed.clear()
        self._problem = None
        self.transport.admit(lease_id, _SECRET, range(self._num_blocks))

    def send(self, lease_id: int) -> None:
        """Write all blocks and wait until the receiver has said that they are in place; raises Failed."""
        self._answered.clear()
        if self._closed is not None:
            raise Failed(f"the link has closed: {self._closed}")
        self.transport.write(_LINK, LeaseRef(lease_id, _SECRET), [(i, i) for i in range(self._num_blocks)])
        commit = pb.DataMessage(commit=pb.Commit(lease_id=lease_id, secret=_SECRET))
        self.transport.notify(_LINK, commit.SerializeToString())
        if not self._answered.wait(_PATIENCE_S):
            raise Failed(f"{self._name}: no answer within {_PATIENCE_S:.0f} s")
        if self._problem is not None:
            raise Failed(self._problem)

    def _on_event(self, event: SenderEvent | ReceiverEvent) -> None:
        """On the transport's threads."""
        match event:
            case BlocksLanded():
                self._landed[event.lease_id] += len(event.block_indices)
            case WriteRefused():
                self._problem = event.reason
            case NotifyArrived():
                num_landed = self._landed[pb.DataMessage.FromString(event.payload).commit.lease_id]
                is_whole = num_landed == self._num_blocks
                error = None if is_whole else pb.PDError(message=f"{num_landed} blocks landed: {self._problem}")
                answer = pb.DataMessage(answer=pb.CommitAnswer(error=error))
                self.transport.answer(event.reply_to, answer.SerializeToString())
            case Answered():
                self._problem = pb.DataMessage.FromString(event.payload).answer.error.message or None
                self._answered.set()
            case LinkClosed():
                self._problem = self._closed = event.reason
                self._answered.set()


class _End:
    """What both ends have: memory, and a transport of each kind over it."""

    def __init__(self, setup: Setup) -> None:
        self.memory = SharedBytes(setup.num_blocks, setup.block_bytes)
        self.flat = self.memory.bytes.reshape(-1)
        self.ways = {name: _Way(name, self.memory, setup.role) for name in setup.transports}
        has_nixl = any(name.startswith("nixl") for name in setup.transports)
        self.agent = NixlLibrary("127.0.0.1").agent(setup.role, self.memory.bytes) if has_nixl else None

    def digest(self) -> str:
        """Of all bytes."""
        return xxhash.xxh3_128_hexdigest(self.flat.data)

    def stop(self) -> None:
        for way in self.ways.values():
            way.transport.stop()


class _Receiver(_End):
    """Takes transfers; and copies within its own process, for comparison."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._source = SharedBytes(setup.num_blocks, setup.block_bytes)
        self._source.bytes[:] = 1
        self._is_driving = Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        Thread(target=self._serve_tcp, name="tcp", daemon=True).start()
        self._asked_at = f"baton-bench-{secrets.token_hex(16)}"
        self._asked = socket.socket(socket.AF_UNIX)
        self._asked.bind(b"\0" + self._asked_at.encode())
        self._asked.listen()
        Thread(target=self._serve_asked, name="asked", daemon=True).start()
        self._bare: Socket = zmq.Context.instance().socket(zmq.ROUTER)
        bound_link(self._bare, "tcp://127.0.0.1", _MESSAGE_BYTES)
        self._bare.bind("tcp://127.0.0.1:*")
        Thread(target=self._serve_libzmq, name="libzmq", daemon=True).start()

    def hello(self) -> dict[str, Any]:
        endpoints = {name: way.transport.endpoint().SerializeToString().hex() for name, way in self.ways.items()}
        bare = self._bare.getsockopt_string(zmq.LAST_ENDPOINT)
        tcp_port = self._listener.getsockname()[1]
        hello = {"endpoints": endpoints, "tcp_port": tcp_port, "libzmq": bare, "asked_at": self._asked_at}
        if self.agent is not None:
            hello |= {"agent": self.agent.metadata().hex(), "address": self.memory.bytes.ctypes.data}
        return hello

    def do(self, asked: dict[str, Any]) -> dict[str, Any]:
        match asked["do"]:
            case "admit":
                self.ways[asked["way"]].admit(asked["lease_id"])
            case "revoke":
                self.ways[asked["way"]].transport.revoke(asked["lease_id"])
            case "clear":
                self.flat[:] = 0
            case "drive":
                self._is_driving.set()
                self._driver = Thread(target=self._drive, name="nixl", daemon=True)
                self._driver.start()
            case "rest":
                self._is_driving.clear()
                self._driver.join()
            case "memcpy":
                return {"seconds": self._memcpy_s()}
        return {}

    def _drive(self) -> None:
        """NIXL alone: what the sender has under way may need this end."""
        assert self.agent is not None
        while self._is_driving.is_set():
            self.agent.progress()
            time.sleep(_LOOK_AGAIN_S)

    def _memcpy_s(self) -> float:
        began = time.perf_counter()
        self._copy(self._source.bytes)
        return time.perf_counter() - began

    def _copy(self, blocks: Bytes) -> None:
        for target, source in zip(self.memory.bytes, blocks, strict=True):
            np.copyto(target, source)

    def _serve_asked(self) -> None:
        """Copy from the sender's memory whenever it says a byte, and say one back."""
        connection, _ = self._asked.accept()
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        theirs = PeerMemory(descriptors[0], *self.memory.bytes.shape)
        while not theirs.populate_some():
            pass
        with connection:
            while connection.recv(1):
                self._copy(theirs.bytes)
                connection.sendall(b"\0")

    def _serve_tcp(self) -> None:
        """Fill the memory from the one connection, again and again."""
        connection, _ = self._listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection:
            while True:
                target = memoryview(self.flat.data)
                while target:
                    num_received = connection.recv_into(target)
                    if num_received == 0:
                        return
                    target = target[num_received:]
                connection.sendall(b"\0")

    def _serve_libzmq(self) -> None:
        """Count bytes, which stay where libzmq put them."""
        num_received = 0
        while True:
            sender = self._bare.recv()
            num_received += len(self._bare.recv(copy=False))
            if num_received == self.flat.nbytes:
                num_received = 0
                self._bare.send_multipart([sender, b""])


class _Sender(_End):
    """Gives transfers away."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.memory.bytes[:] = np.random.default_rng(1).integers(0, 256, self.memory.bytes.shape, np.uint8)
        self._tcp = socket.socket()
        self._asking = socket.socket(socket.AF_UNIX)
        self._bare: Socket = zmq.Context.instance().socket(zmq.DEALER)

    def hello(self) -> dict[str, Any]:
        return {}

    def do(self, asked: dict[str, Any]) -> dict[str, Any]:
        match asked["do"]:
            case "open":
                for name, endpoint in asked["endpoints"].items():
                    self.ways[name].transport.open(_LINK, pb.Endpoint.FromString(bytes.fromhex(endpoint)))
                if self.agent is not None:
                    self.agent.connect(bytes.fromhex(asked["agent"]), asked["address"], *self.memory.bytes.shape)
                self._tcp.settimeout(_PATIENCE_S)
                self._tcp.connect(("127.0.0.1", asked["tcp_port"]))
                self._tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._asking.settimeout(_PATIENCE_S)
                self._asking.connect(b"\0" + asked["asked_at"].encode())
                socket.send_fds(self._asking, [b"\0"], [self.memory.descriptor])
                bound_link(self._bare, "tcp://127.0.0.1", _MESSAGE_BYTES)
                self._bare.setsockopt(zmq.SNDHWM, QUEUED_MESSAGES)
                self._bare.setsockopt(zmq.RCVTIMEO, int(1000 * _PATIENCE_S))
                self._bare.connect(asked["libzmq"])
            case "send":
                return {"seconds": self._send_s(asked["way"], asked["lease_id"])}
        return {}

    def _send_s(self, way: str, lease_id: int) -> float:
        began = time.perf_counter()
        if way == "tcp":
            self._send_over_tcp()
        elif way == "asked memcpy":
            self._ask_to_copy()
        elif way == "libzmq":
            self._send_over_libzmq()
        elif way == "NIXL":
            self._send_over_nixl()
        else:
            self.ways[way].send(lease_id)
        return time.perf_counter() - began

    def _send_over_tcp(self) -> None:
        for message in self._messages():
            self._tcp.sendall(message)
        if self._tcp.recv(1) != b"\0":
            raise Failed("the raw TCP connection was lost")

    def _ask_to_copy(self) -> None:
        """A byte there, the copy, a byte back: to memcpy what the raw TCP connection is to the zmq transport."""
        self._asking.sendall(b"\0")
        if self._asking.recv(1) != b"\0":
            raise Failed("the connection to whoever copies was lost")

    def _send_over_libzmq(self) -> None:
        """As a link of the zmq transport, without its copies, its headers and its leases."""
        for message in self._messages():
            self._bare.send(message, copy=False)
        self._bare.recv()

    def _send_over_nixl(self) -> None:
        """All blocks in one request, as its own examples do."""
        assert self.agent is not None
        num_blocks, block_bytes = self.memory.bytes.shape
        pieces = [(block, begin) for block in range(num_blocks) for begin in range(0, block_bytes, _MESSAGE_BYTES)]
        self.agent.put(1, pieces, [block for block, _ in pieces])
        while not self.agent.finished():
            time.sleep(_LOOK_AGAIN_S)

    def _messages(self) -> Iterator[memoryview]:
        for begin in range(0, self.flat.nbytes, _MESSAGE_BYTES):
            yield self.flat[begin : begin + _MESSAGE_BYTES].data


def _perform(end: _Sender | _Receiver, asked: dict[str, Any]) -> dict[str, Any]:
    match asked["do"]:
        case "cpu":
            return {"cpu_s": time.process_time()}
        case "digest":
            return {"digest": end.digest()}
    return end.do(asked)


def main() -> None:
    """Serve until stdin ends."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")  # whatever else prints goes to stderr
    os.dup2(2, 1)

    def say(content: dict[str, Any]) -> None:
        out.write(json.dumps(content) + "\n")
        out.flush()

    setup = Setup(**json.loads(sys.stdin.readline()))
    die_with_parent(setup.parent_pid)
    make: Callable[[Setup], _Sender | _Receiver] = _Sender if setup.role == "sender" else _Receiver
    end = make(setup)
    say(end.hello())
    for line in sys.stdin:
        try:
            say(_perform(end, json.loads(line)))
        except Failed as failed:
            say({"error": str(failed)})
    end.stop()


if __name__ == "__main__":
    main()
