"""A node's transport in a process of its own, driven over pipes: one that can be killed.

argv     shm, nixl or zmq; for zmq the address to listen at, and "held" if its receiving thread is to hang behind its first event
stdin    hex of an Endpoint to write to, or an empty line: then it only receives; one more line lets go of what is held
stdout   hex of its own Endpoint; then a line per event
"""

from __future__ import annotations

import sys
import threading

from connector.nixl_transport import NixlTransport
from connector.shm_transport import ShmTransport
from connector.transport import BlocksLanded, LeaseRef, ReceiverEvent, SenderEvent
from connector.zmq_options import Place
from connector.zmq_transport import ZmqTransport
from engine.shared_bytes import SharedBytes
from proto import baton_pb2 as pb

NUM_BLOCKS = 4
BLOCK_BYTES = 1 << 20
SECRET = b"0123456789abcdef"

may_go_on = threading.Event()


def pattern(block: int) -> int:
    """What every byte of a source block is."""
    return 0xA0 + block


def say(line: str) -> None:
    """One line to the test; one write, for several threads say things."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def tell(event: SenderEvent | ReceiverEvent) -> None:
    """An `emit`."""
    say(type(event).__name__)
    if isinstance(event, BlocksLanded):
        may_go_on.wait()


def transport_of(kind: str, shared: SharedBytes, host: str) -> NixlTransport | ShmTransport | ZmqTransport:
    """Of the node that this process is."""
    match kind:
        case "nixl":
            return NixlTransport(shared.bytes, "peer", 7, tell)
        case "zmq":
            return ZmqTransport(shared.bytes, "peer", 7, tell, Place(host))
        case _:
            return ShmTransport(shared.bytes, shared.descriptor, "peer", 7, tell)


def main() -> None:
    """Admit lease 1 into all blocks; write into lease 1 to 4 of the peer, if there is one; then live until killed."""
    kind, host, is_held = (*sys.argv[1:], "", "")[:3]
    if not is_held:
        may_go_on.set()
    shared = SharedBytes(NUM_BLOCKS, BLOCK_BYTES)
    transport = transport_of(kind, shared, host)
    transport.admit(1, SECRET, range(NUM_BLOCKS))
    say(transport.endpoint().SerializeToString().hex())
    line = sys.stdin.readline().strip()
    if line:
        for block in range(NUM_BLOCKS):
            shared.bytes[block] = pattern(block)
        transport.open("receiver@1/1", pb.Endpoint.FromString(bytes.fromhex(line)))
        for block in range(NUM_BLOCKS):
            transport.write("receiver@1/1", LeaseRef(block + 1, SECRET), [(0, block)])
        commit = pb.DataMessage(commit=pb.Commit(lease_id=1, secret=SECRET))
        transport.notify("receiver@1/1", commit.SerializeToString())
    sys.stdin.readline()
    may_go_on.set()
    sys.stdin.read()


if __name__ == "__main__":
    main()
