"""The receiving half of a one-sided transport: the sender's hardware writes into our memory, and nobody here is asked first.

So an ended lease is not quiet because we say so. Only who may write at all is decided here, once per lease and link:

    sender                                          receiver
    attach(lease, secret)  ───────────────────────► is it admitted?
    write …                ◄─────────────────────── granted(block ids), or denied
    bytes land whenever they do; behind them, written(spans, checksums) ─► checked where they stand: BlocksLanded, WriteRefused
                           ◄─────────────────────── stop(lease): revoked here
    stopped(lease)         ───────────────────────► behind all that it had written: RevokeDone

A link that is gone has stopped as well: its end arrives behind what was on it. If neither comes, the receiver tears the connection
down itself, after which its hardware takes nothing more from there. Until then the lease's blocks are somebody's who is dead, and
stay in quarantine (H08).

Not here: links, their order, when anything happens (memory_transport.py); bytes are put in place by who moves the link.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from connector.admissions import Admissions
from connector.checksum import piece_checksum
from connector.tally import Tally
from connector.transport import MAX_PAYLOAD_BYTES, BlocksLanded, Emit, RevokeDone, WriteRefused
from connector.writes import Bytes, IncomingWrite, checked_memory
from proto import baton_pb2 as pb


class Attach(NamedTuple):
    """Sender: I am about to write into this lease."""

    lease_id: int
    secret: bytes


class Attached(NamedTuple):
    """Receiver: here lies what you asked for; None: nowhere, write nothing."""

    block_ids: tuple[int, ...] | None


class Stop(NamedTuple):
    """Receiver: the lease is over."""

    lease_id: int


class Stopped(NamedTuple):
    """Sender: I shall not write into it again, and what I had written came before this."""

    lease_id: int


@dataclass(slots=True)
class _Lease:
    secret: bytes
    block_ids: tuple[int, ...]
    writers: set[Hashable] = field(default_factory=set)  # links whose sender knows where it lies
    is_revoked: bool = False


class OneSidedLanding:
    """Who may write into this node's blocks, and what of it has arrived intact. Has Landing's admit, revoke and snapshot."""

    def __init__(self, memory: Bytes, emit: Emit) -> None:
        self._memory = checked_memory(memory)
        self._emit = emit
        num_blocks, block_bytes = memory.shape
        self._admissions = Admissions(num_blocks, block_bytes, MAX_PAYLOAD_BYTES)
        self._leases: dict[int, _Lease] = {}
        self._bytes_from = Tally()
        self._refused = Tally()

    def admit(self, lease_id: int, secret: bytes, block_ids: Sequence[int]) -> None:
        """As Receiver.admit; raises ValueError for a lease admitted twice or a block that does not exist."""
        if lease_id in self._leases:
            raise ValueError(f"lease {lease_id:x} is admitted already")
        self._admissions.admit(lease_id, secret, block_ids)
        self._leases[lease_id] = _Lease(secret, tuple(block_ids))

    def attach(self, link: Hashable, asked: Attach) -> Attached:
        """Let a link's sender know where a lease lies, if it is admitted here with that secret."""
        lease = self._leases.get(asked.lease_id)
        if lease is None or lease.is_revoked or lease.secret != asked.secret:
            self.refuse(WriteRefused(0, pb.LEASE_EXPIRED, "no lease with that id and secret"))
            return Attached(None)
        lease.writers.add(link)
        return Attached(lease.block_ids)

    def written(self, write: IncomingWrite, peer: str) -> None:
        """A write stands in memory, as its sender says: check it there, and report what that completed."""
        lease_id = write.lease_id
        grant = self._admissions.begin(lease_id, write.secret, write.spans)
        if isinstance(grant, WriteRefused):
            self.refuse(grant)
            return
        refused: WriteRefused | None = None
        for span, block_id, checksum in zip(grant.spans, grant.block_ids, write.checksums, strict=True):
            piece = self._memory[block_id, span.offset : span.offset + span.length]
            if piece_checksum(piece, lease_id, span.block_index, span.offset) != checksum:
                refused = WriteRefused(lease_id, pb.CHECKSUM, f"{span}: other bytes than those that were sent")
                break
        ended = self._admissions.end(grant, is_intact=refused is None)
        if refused is not None:
            self.refuse(refused)
            return
        self._bytes_from.add(peer, write.num_bytes)
        if ended.landed:
            self._emit(BlocksLanded(lease_id, ended.landed, self._memory.shape[1] * len(ended.landed), peer))

    def revoke(self, lease_id: int) -> tuple[Hashable, ...]:
        """As Receiver.revoke; the links whose senders have to be told, RevokeDone comes behind the last `stopped` of them."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.is_revoked:
            return ()
        lease.is_revoked = True
        self._admissions.revoke(lease_id)
        self._end_if_quiet(lease_id, lease)
        return tuple(lease.writers)

    def stopped(self, link: Hashable, lease_id: int) -> None:
        """The sender of this link writes no more into the lease."""
        lease = self._leases.get(lease_id)
        if lease is not None and link in lease.writers:
            lease.writers.discard(link)
            self._end_if_quiet(lease_id, lease)

    def gone(self, link: Hashable) -> None:
        """Nothing comes on this link any more."""
        for lease_id in [each for each, lease in self._leases.items() if link in lease.writers]:
            self.stopped(link, lease_id)

    def awaits_stop(self, link: Hashable) -> bool:
        """Whether a lease that is over is not quiet for want of this link's sender."""
        return any(lease.is_revoked and link in lease.writers for lease in self._leases.values())

    def refuse(self, refused: WriteRefused) -> None:
        """Count and report a write that did not count."""
        self._refused.add(pb.ErrorCode.Name(refused.code))
        self._emit(refused)

    def snapshot(self) -> Mapping[str, object]:
        """As Landing.snapshot."""
        num_quarantined = sum(lease.is_revoked for lease in self._leases.values())
        return {
            "kv_bytes_received": self._bytes_from.snapshot(),
            "writes_refused": self._refused.snapshot(),
            "leases_admitted": len(self._leases) - num_quarantined,
            "leases_quarantined": num_quarantined,
        }

    def _end_if_quiet(self, lease_id: int, lease: _Lease) -> None:
        if lease.is_revoked and not lease.writers:
            del self._leases[lease_id]
            self._emit(RevokeDone(lease_id))
