"""What a write is on the wire of a two-sided transport, both ends.

zmq and the in-memory transport: a message is one frame or two. Two are a write: `DataMessage{write}`, then the bytes of its
pieces, one behind the other, 4 MiB at most (`frame_bytes`). One is a notification: `DataMessage{commit}`. Small blocks share a
message, a larger block is cut in pieces:

    blocks of a lease    [  0  ][  1  ][  2  ][        3        ]        block_bytes each, here drawn unequal
    messages             [header][ 0 | 1 | 2 ]  [header][ 3, first MiB ]  [header][ 3, rest ]

Source blocks that lie side by side go out from where they lie, and are free when the wire has let go of them (`whole_source`).
Others the sender gathers into a buffer of its own: one copy, after which the source is free.

shm: the header alone is a write. Its pieces name the sender's blocks, and the receiver reads them where they lie (`describe`,
`decode_described`): one copy, from pool to pool. The checksum is of what stood in the block when the header was made.

All that arrives is hostile until checked here (form) and in `Admissions` (right).

Not here: sockets, threads, whether a lease admits a write, how bytes are copied (copying.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

import numpy as np
from google.protobuf.message import DecodeError

from connector.admissions import Grant, Span
from connector.checksum import piece_checksum, place_seed
from connector.copying import Bytes, StripeCopier, copy_pieces
from connector.transport import MAX_PAYLOAD_BYTES, LeaseRef, WriteRefused
from proto import baton_pb2 as pb

MAX_PIECES: Final = 1024  # of one write
MAX_WRITE_HEADER_BYTES: Final = 36 * MAX_PIECES + 256  # a piece takes 35 bytes at most, tag and length included
MAX_FRAME_BYTES: Final = 4 * MAX_PAYLOAD_BYTES  # a write's payload, or a Commit: the ids of a million tokens take 3 MiB
_FRAMES_OF_A_SHORT_WRITE: Final = 8
_NOTHING: Final = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class OutgoingWrite:
    """One message's worth of source blocks: span i of the lease comes from block source_ids[i]. Without spans: a dropped rest."""

    lease: LeaseRef
    spans: tuple[Span, ...]
    source_ids: tuple[int, ...]
    finished: tuple[int, ...]  # block indices that have been read in full once this message is gathered


@dataclass(frozen=True, slots=True)
class IncomingWrite:
    """A write whose form is right; whether it may land is not known yet."""

    lease_id: int
    secret: bytes
    spans: tuple[Span, ...]
    checksums: tuple[int, ...]
    source: Bytes  # [bytes]; empty for a write that stands in memory already
    begins: tuple[int, ...]  # per span, where its bytes begin in it; none of a write that stands in memory already

    @property
    def num_bytes(self) -> int:
        """Of all spans together."""
        return sum(span.length for span in self.spans)


@dataclass(frozen=True, slots=True)
class IncomingNotice:
    """A notification: a serialized DataMessage that holds a Commit."""

    payload: bytes


def checked_memory(memory: Bytes) -> Bytes:
    """Return the KV memory (memory: [num_blocks, block_bytes] u8); raises ValueError for one that pieces cannot be cut from."""
    if memory.dtype != np.uint8 or memory.ndim != 2 or 0 in memory.shape or not memory.flags.c_contiguous:
        shape = f"{memory.dtype} {memory.shape}"
        raise ValueError(f"KV memory must be contiguous uint8 [num_blocks, block_bytes], not {shape}")
    return memory


def frame_bytes(write_bytes: int) -> int:
    """How much of a write of so many bytes a message takes, at most, where it travels as a frame.

    A long write's are long, since each costs both ends the same. A short one's are short: what is received of one message is
    copied while the next is under way, and nothing but the first one's way and the last one's copy is without company.
    """
    return min(max(write_bytes // _FRAMES_OF_A_SHORT_WRITE, MAX_PAYLOAD_BYTES), MAX_FRAME_BYTES)


def pack(
    lease: LeaseRef, blocks: Sequence[tuple[int, int]], block_bytes: int, max_bytes: int = MAX_PAYLOAD_BYTES
) -> Iterator[OutgoingWrite]:
    """Cut and join (block index in the lease, source block id) pairs into messages of at most `max_bytes`, in order.

    Pieces end at multiples of MAX_PAYLOAD_BYTES in their block, whatever `max_bytes`, which is no less.
    """
    spans: list[Span] = []
    source_ids: list[int] = []
    finished: list[int] = []
    num_bytes = 0
    for block_index, source_id in blocks:
        for offset in range(0, block_bytes, MAX_PAYLOAD_BYTES):
            length = min(MAX_PAYLOAD_BYTES, block_bytes - offset)
            if num_bytes + length > max_bytes or len(spans) == MAX_PIECES:
                yield OutgoingWrite(lease, tuple(spans), tuple(source_ids), tuple(finished))
                spans, source_ids, finished, num_bytes = [], [], [], 0
            spans.append(Span(block_index, offset, length))
            source_ids.append(source_id)
            num_bytes += length
        finished.append(block_index)
    if spans:
        yield OutgoingWrite(lease, tuple(spans), tuple(source_ids), tuple(finished))


def take_out(queue: deque[OutgoingWrite | bytes], lease: LeaseRef) -> OutgoingWrite | None:
    """Drop a lease's writes from a queue: what is left to say of them, a write of nothing; None: there were none."""
    dropped = [each for each in queue if not isinstance(each, bytes) and each.lease == lease]
    if not dropped:
        return None
    kept = [each for each in queue if isinstance(each, bytes) or each.lease != lease]
    queue.clear()
    queue.extend(kept)
    return OutgoingWrite(lease, (), (), tuple(index for each in dropped for index in each.finished))


def with_rest(write: OutgoingWrite, rest: OutgoingWrite) -> OutgoingWrite:
    """A write that is under way, behind which a later one of its lease is told as well: both may be of one block."""
    return replace(write, finished=write.finished + rest.finished)


def gather(memory: Bytes, write: OutgoingWrite, checksums: bool = True) -> tuple[bytes, Bytes]:
    """Copy the source bytes out of memory ([num_blocks, block_bytes]); returns the two frames, header and payload."""
    message = _header(write)
    payload = np.empty(sum(span.length for span in write.spans), np.uint8)
    begin = 0
    for span, source_id in zip(write.spans, write.source_ids, strict=True):
        piece = payload[begin : begin + span.length]
        np.copyto(piece, memory[source_id, span.offset : span.offset + span.length])
        _add_piece(message, write, span, piece if checksums else None)
        begin += span.length
    return message.SerializeToString(), payload


def whole_source(memory: Bytes, write: OutgoingWrite) -> Bytes | None:
    """The source bytes, where they lie in one piece in memory ([num_blocks, block_bytes]), as [bytes]; else None."""
    block_bytes = memory.shape[1]
    begin = end = write.source_ids[0] * block_bytes + write.spans[0].offset
    for span, source_id in zip(write.spans, write.source_ids, strict=True):
        if source_id * block_bytes + span.offset != end:
            return None
        end += span.length
    return memory.reshape(-1)[begin:end]


def describe(memory: Bytes, write: OutgoingWrite, checksums: bool = True) -> bytes:
    """The header by which a receiver that has the memory ([num_blocks, block_bytes]) mapped finds the source bytes in it."""
    message = _header(write)
    for span, source_id in zip(write.spans, write.source_ids, strict=True):
        piece = memory[source_id, span.offset : span.offset + span.length]
        _add_piece(message, write, span, piece if checksums else None).source_block = source_id
    return message.SerializeToString()


def decode(frames: Sequence[bytes | memoryview]) -> IncomingWrite | IncomingNotice | WriteRefused:
    """Check the form of what arrived. Allocates little, whatever it is."""
    if not 1 <= len(frames) <= 2:
        return _malformed("a message has one frame or two")
    if len(frames) == 2 and len(frames[0]) > MAX_WRITE_HEADER_BYTES:
        return _malformed(f"a header of {len(frames[0])} bytes, {MAX_WRITE_HEADER_BYTES} allowed")
    header = bytes(frames[0])
    try:
        message = pb.DataMessage.FromString(header)
    except DecodeError:
        return _malformed("a header that is no DataMessage")
    kind = message.WhichOneof("kind")
    if len(frames) == 1:
        return IncomingNotice(header) if kind == "commit" else _malformed(f"one frame that holds no commit but {kind}")
    if kind != "write":
        return _malformed(f"two frames that hold no write but {kind}")
    return _decode_write(message.write, frames[1])


def decode_described(header: bytes, peer_memory: Bytes) -> IncomingWrite | WriteRefused:
    """Check the form of a header made by `describe`; peer_memory: the sender's, [num_blocks, block_bytes]."""
    write = _parse_header(header)
    if isinstance(write, WriteRefused):
        return write
    num_blocks, block_bytes = peer_memory.shape
    begins: list[int] = []
    for piece in write.pieces:
        block, begin = piece.source_block, piece.offset
        if block >= num_blocks or begin + piece.length > block_bytes:
            return _malformed(f"a source outside of {num_blocks} blocks of {block_bytes} bytes")
        begins.append(block * block_bytes + begin)
    return _incoming(write, peer_memory.reshape(-1), tuple(begins))


def decode_written(header: bytes) -> IncomingWrite | WriteRefused:
    """Check the form of a header made by `describe` for bytes that its sender has put in place itself."""
    write = _parse_header(header)
    return write if isinstance(write, WriteRefused) else _incoming(write, _NOTHING, ())


def copy_in(
    memory: Bytes, grant: Grant, write: IncomingWrite, copier: StripeCopier | None = None, *, checksums: bool = True
) -> Span | None:
    """Copy a granted write's bytes into its blocks (memory: [num_blocks, block_bytes]), all of them.

    Returns the first span for which the bytes written are not what its sender read.
    """
    block_bytes, to = memory.shape[1], memory.reshape(-1)
    pieces = zip(grant.spans, grant.block_ids, write.begins, strict=True)
    places = np.array(
        [(block_id * block_bytes + span.offset, begin, span.length) for span, block_id, begin in pieces], np.int64
    )
    if not checksums:
        copy_pieces(to, write.source, places, None, copier)
        return None
    seeds = [place_seed(grant.lease_id, span.block_index, span.offset) for span in grant.spans]
    digests = copy_pieces(to, write.source, places, np.array(seeds, np.uint64), copier)
    wrong = np.flatnonzero(digests != np.array(write.checksums, np.uint64))
    return grant.spans[wrong[0]] if wrong.size else None


def find_corrupt(memory: Bytes, grant: Grant, checksums: Sequence[int]) -> Span | None:
    """The first span of a granted write that does not stand in memory ([num_blocks, block_bytes]) as its sender read it."""
    for span, block_id, checksum in zip(grant.spans, grant.block_ids, checksums, strict=True):
        piece = memory[block_id, span.offset : span.offset + span.length]
        if piece_checksum(piece, grant.lease_id, span.block_index, span.offset) != checksum:
            return span
    return None


def _decode_write(write: pb.Write, payload: bytes | memoryview) -> IncomingWrite | WriteRefused:
    if not 1 <= len(write.pieces) <= MAX_PIECES:
        return _malformed(f"a write of {len(write.pieces)} pieces, 1 to {MAX_PIECES} allowed")
    num_bytes = sum(piece.length for piece in write.pieces)
    if num_bytes != len(payload) or not 1 <= num_bytes <= MAX_FRAME_BYTES:
        return _malformed(f"a payload of {len(payload)} bytes for pieces of {num_bytes}")
    cuts = accumulate((piece.length for piece in write.pieces), initial=0)
    return _incoming(write, np.frombuffer(payload, np.uint8), tuple(cuts)[:-1])


def _parse_header(header: bytes) -> pb.Write | WriteRefused:
    if len(header) > MAX_WRITE_HEADER_BYTES:
        return _malformed(f"a header of {len(header)} bytes, {MAX_WRITE_HEADER_BYTES} allowed")
    try:
        message = pb.DataMessage.FromString(header)
    except DecodeError:
        return _malformed("a header that is no DataMessage")
    if not 1 <= len(message.write.pieces) <= MAX_PIECES:
        return _malformed(f"a write of {len(message.write.pieces)} pieces, 1 to {MAX_PIECES} allowed")
    return message.write


def _incoming(write: pb.Write, source: Bytes, begins: tuple[int, ...]) -> IncomingWrite:
    spans: list[Span] = []
    checksums: list[int] = []
    for piece in write.pieces:
        spans.append(Span(piece.block_index, piece.offset, piece.length))
        checksums.append(piece.checksum)
    return IncomingWrite(write.lease_id, write.secret, tuple(spans), tuple(checksums), source, begins)


def _header(write: OutgoingWrite) -> pb.DataMessage:
    return pb.DataMessage(write=pb.Write(lease_id=write.lease.lease_id, secret=write.lease.secret))


def _add_piece(message: pb.DataMessage, write: OutgoingWrite, span: Span, piece: Bytes | None) -> pb.Piece:
    """Describe a span; piece: its bytes, None for one without a checksum."""
    block_index, offset, length = span
    checksum = 0 if piece is None else piece_checksum(piece, write.lease.lease_id, block_index, offset)
    return message.write.pieces.add(block_index=block_index, offset=offset, length=length, checksum=checksum)


def _malformed(reason: str) -> WriteRefused:
    return WriteRefused(0, pb.TRANSFER_FAILED, reason)
