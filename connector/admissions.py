"""Which writes may touch this node's blocks now: the table of admitted leases.

The loop thread admits and revokes; transport threads ask before each copy and report after it. This table is all that they
share, and its lock is held for bookkeeping only, never while bytes move.

    admit ──► open ──begin──► a write runs ──end──► open          each piece of a block is written once at most
                │                   │
              revoke              revoke: no further begin; the blocks are quiet at the last end
                │                   │
                ▼                   ▼
              quiet at once       end answers is_quiet

Two rules make a lease's memory safe to hand on: between begin and end the lease stays in the table whatever happens, and after
"quiet", said exactly once per admit, no begin succeeds. A third keeps its content honest: a piece that a write has begun is never
written again, so nothing can follow a checksum that was found right.

Pieces are cut at fixed places (multiples of `piece_bytes`), so that what arrived of a block is a few bits, however hostile the
sender.

A sender that writes by itself (one_sided.py) is a write that runs from `attach`, when it learns where the lease lies, to `detach`,
when it can do so no more: what it writes needs nobody's leave, so the lease is not quiet before.

Not here: bytes, checksums, clocks, who the sender is.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

from connector.transport import WriteRefused
from proto import baton_pb2 as pb


class Span(NamedTuple):
    """Bytes of one block of a lease, as its sender names them."""

    block_index: int  # position in the lease
    offset: int  # bytes into the block
    length: int  # bytes


@dataclass(frozen=True, slots=True)
class Grant:
    """Leave to write spans[i] into block block_ids[i]; whoever holds it calls `end` once."""

    lease_id: int
    spans: tuple[Span, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """What the end of a write meant for its lease."""

    landed: tuple[int, ...]  # block indices that are complete now
    is_quiet: bool  # the lease was revoked meanwhile and this was the last write into it: RevokeDone is due


class _Lease:
    """One admitted lease; lives until it is revoked and no write runs."""

    __slots__ = ("block_ids", "is_revoked", "missing", "num_running", "secret", "unbegun")

    def __init__(self, secret: bytes, block_ids: tuple[int, ...], pieces_per_block: int) -> None:
        self.secret = secret
        self.block_ids = block_ids
        all_pieces = (1 << pieces_per_block) - 1
        self.unbegun = [all_pieces] * len(block_ids)  # per block, a bit per piece that no write has begun
        self.missing = [pieces_per_block] * len(block_ids)  # per block, how many pieces have not landed
        self.num_running = 0  # writes, and senders that write by themselves
        self.is_revoked = False


class Admissions:
    """The leases that writes may land in, for blocks of one size. Every method may be called from any thread."""

    def __init__(self, num_blocks: int, block_bytes: int, piece_bytes: int) -> None:
        self._num_blocks = num_blocks
        self._block_bytes = block_bytes
        self._piece_bytes = min(piece_bytes, block_bytes)
        self._pieces_per_block = -(-block_bytes // self._piece_bytes)
        self._lock = Lock()
        self._leases: dict[int, _Lease] = {}

    def admit(self, lease_id: int, secret: bytes, block_ids: Sequence[int]) -> None:
        """Let writes that show the secret into these blocks; -1 stands for one that may not be written.

        Raises ValueError for a lease that is in the table, or a block that does not exist: a bug here, not a peer's fault.
        """
        if any(not -1 <= block_id < self._num_blocks for block_id in block_ids):
            raise ValueError(f"lease {lease_id:x} names a block outside 0..{self._num_blocks - 1}")
        with self._lock:
            if lease_id in self._leases:
                raise ValueError(f"lease {lease_id:x} is admitted already")
            self._leases[lease_id] = _Lease(secret, tuple(block_ids), self._pieces_per_block)

    def begin(self, lease_id: int, secret: bytes, spans: Sequence[Span]) -> Grant | WriteRefused:
        """Ask to write these spans, all or nothing."""
        with self._lock:
            if (lease := self._find(lease_id, secret)) is None:
                return WriteRefused(0, pb.LEASE_EXPIRED, "no lease with that id and secret")
            begun: dict[int, int] = {}  # block index -> bits
            for span in spans:
                fault = self._find_fault(lease, span)
                if fault is not None:
                    return WriteRefused(lease_id, pb.TRANSFER_FAILED, f"{span}: {fault}")
                piece = 1 << (span.offset // self._piece_bytes)
                begun_before = begun.get(span.block_index, 0)
                if not lease.unbegun[span.block_index] & ~begun_before & piece:
                    return WriteRefused(lease_id, pb.TRANSFER_FAILED, f"{span}: written before")
                begun[span.block_index] = begun_before | piece
            for block_index, pieces in begun.items():
                lease.unbegun[block_index] &= ~pieces
            lease.num_running += 1
            return Grant(lease_id, tuple(spans), tuple(lease.block_ids[span.block_index] for span in spans))

    def end(self, grant: Grant, is_intact: bool) -> Ended:
        """Report that this write touches the blocks no more, and whether its bytes are in place and right."""
        with self._lock:
            lease = self._leases[grant.lease_id]
            lease.num_running -= 1
            if lease.is_revoked:
                if lease.num_running == 0:
                    del self._leases[grant.lease_id]
                return Ended((), is_quiet=lease.num_running == 0)
            landed: list[int] = []
            for span in grant.spans if is_intact else ():
                lease.missing[span.block_index] -= 1
                if lease.missing[span.block_index] == 0:
                    landed.append(span.block_index)
            return Ended(tuple(landed), is_quiet=False)

    def attach(self, lease_id: int, secret: bytes) -> tuple[int, ...] | None:
        """Where the lease lies, for a sender that will write by itself until `detach`; None: no lease with that id and secret."""
        with self._lock:
            if (lease := self._find(lease_id, secret)) is None:
                return None
            lease.num_running += 1
            return lease.block_ids

    def detach(self, lease_id: int) -> bool:
        """Such a sender can write no more; once for each `attach`. True: the lease was revoked, and is quiet now."""
        with self._lock:
            lease = self._leases[lease_id]
            lease.num_running -= 1
            if not lease.is_revoked or lease.num_running > 0:
                return False
            del self._leases[lease_id]
            return True

    def revoke(self, lease_id: int) -> bool:
        """End the lease. True: its blocks are quiet now. False: an `end` will say so, or has said so, or there is no such lease."""
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is None:
                return False
            lease.is_revoked = True
            if lease.num_running > 0:
                return False
            del self._leases[lease_id]
            return True

    def snapshot(self) -> dict[str, int]:
        """How many leases are open to writes, and how many wait for their last write to end."""
        with self._lock:
            num_quarantined = sum(lease.is_revoked for lease in self._leases.values())
            return {"leases_admitted": len(self._leases) - num_quarantined, "leases_quarantined": num_quarantined}

    def _find(self, lease_id: int, secret: bytes) -> _Lease | None:
        """The lease that whoever shows this secret may write into; called with the lock held."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.is_revoked or not hmac.compare_digest(lease.secret, secret):
            return None
        return lease

    def _find_fault(self, lease: _Lease, span: Span) -> str | None:
        """Say what is wrong with where a span points."""
        if not 0 <= span.block_index < len(lease.block_ids):
            return f"the lease has {len(lease.block_ids)} blocks"
        if lease.block_ids[span.block_index] < 0:
            return "this block is held already and not to be written"
        if span.offset % self._piece_bytes or not 0 <= span.offset < self._block_bytes:
            return f"no piece of a block of {self._block_bytes} bytes begins here"
        if span.length != min(self._piece_bytes, self._block_bytes - span.offset):
            return f"not the length of this piece of a block of {self._block_bytes} bytes"
        return None
