"""A node's transport, shm or nixl as its argument says, in a process of its own, driven over pipes: one that can be killed.

stdin    hex of an Endpoint to write to, or an empty line: then it only receives
stdout   hex of its own Endpoint; then a line per event
"""

from __future__ import annotations

import sys

from connector.nixl_transport import NixlTransport
from connector.shm_transport import ShmTransport
from connector.transport import LeaseRef, ReceiverEvent, SenderEvent
from engine.shared_bytes import SharedBytes
from proto import baton_pb2 as pb

NUM_BLOCKS = 4
BLOCK_BYTES = 1 << 20
SECRET = b"0123456789abcdef"


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


def main() -> None:
    """Admit lease 1 into all blocks; write into lease 1 to 4 of the peer, if there is one; then live until killed."""
    shared = SharedBytes(NUM_BLOCKS, BLOCK_BYTES)
    transport = (
        NixlTransport(shared.bytes, "peer", 7, tell)
        if sys.argv[1] == "nixl"
        else ShmTransport(shared.bytes, shared.descriptor, "peer", 7, tell)
    )
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
    sys.stdin.read()


if __name__ == "__main__":
    main()
