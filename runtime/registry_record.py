"""How a node's entry lies in a shared registry: one header line that the registry's own scripts read, then the message.

    <incarnation> <started_ms> <gRPC address>\\n<NodeEntry>

Whoever can write to the registry can put anything there: what is read is taken only where name, header and message agree. What an
entry must be besides is listing.py's.
"""

from __future__ import annotations

from typing import Final

from google.protobuf.message import DecodeError

from proto import baton_pb2 as pb
from runtime.session import Peer

MAX_RECORD_BYTES: Final = 16_384  # ten texts of 256 characters, four bytes each, the address twice, and some numbers
_INCARNATION_DIGITS: Final = 16


def incarnation_text(incarnation: int) -> str:
    """A fixed number of digits: scripts compare it as text, a Lua number has 53 bits."""
    return f"{incarnation:0{_INCARNATION_DIGITS}x}"


def encode_record(entry: pb.NodeEntry) -> bytes:
    """What a node writes; `entry` has no problem (listing.entry_problem)."""
    return _header(entry) + entry.SerializeToString()


def decode_record(name: bytes, record: bytes) -> pb.NodeEntry | None:
    """What lies under a node's name; None if no node has written that."""
    if len(record) > MAX_RECORD_BYTES:
        return None
    try:
        entry = pb.NodeEntry.FromString(record.partition(b"\n")[2])
    except DecodeError:
        return None
    if entry.node.name.encode() != name or not record.startswith(_header(entry)):
        return None
    return entry


def gone_text(peer: Peer) -> str:
    """A process that was replaced or deregistered, as the registry remembers it."""
    return f"{incarnation_text(peer.incarnation)} {peer.name}"


def decode_gone(text: bytes) -> Peer | None:
    """The process; None if that is no such text."""
    digits, _, name = text.partition(b" ")
    try:
        peer = Peer(name.decode(), int(digits, 16))
    except ValueError:
        return None
    return peer if gone_text(peer).encode() == text else None


def _header(entry: pb.NodeEntry) -> bytes:
    return f"{incarnation_text(entry.node.incarnation)} {entry.started_ms} {entry.grpc_address}\n".encode()
