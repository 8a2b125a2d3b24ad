"""The receiving half that all transports share: from a checked message to bytes in place, and the events that say so.

Whoever carries the bytes calls `begin` and `finish` around each write, each link's from one thread; the loop thread calls `admit`
and `revoke`. Where a sender's hardware writes by itself, one_sided.py calls `attach`, `verify` and `detach` instead. Transports of
one node share one landing: it is the node's memory and leases. Not here: how messages arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from connector.admissions import Admissions, Grant, Span
from connector.copying import Bytes, StripeCopier
from connector.tally import Tally
from connector.transport import MAX_PAYLOAD_BYTES, BlocksLanded, Emit, RevokeDone, WriteRefused
from connector.writes import IncomingWrite, checked_memory, copy_in, find_corrupt
from proto import baton_pb2 as pb


@dataclass(frozen=True, slots=True)
class RunningWrite:
    """A write that may touch its blocks until `finish` returns: their quarantine, should the lease end meanwhile."""

    write: IncomingWrite
    grant: Grant
    peer: str


class Landing:
    """Puts arriving writes into leased blocks."""

    def __init__(self, memory: Bytes, emit: Emit, copier: StripeCopier | None = None) -> None:
        """`copier`: compiled code that copies what arrives; None: numpy does."""
        self._copier = copier
        self._memory = checked_memory(memory)
        self._emit = emit
        num_blocks, block_bytes = memory.shape
        self._admissions = Admissions(num_blocks, block_bytes, MAX_PAYLOAD_BYTES)
        self._bytes_from = Tally()
        self._refused = Tally()
        self._told_of_ends: list[Callable[[int], None]] = []

    def tell_of_ends(self, tell: Callable[[int], None]) -> None:
        """Have `tell` called, with its id, for each lease that is revoked and not quiet: on the loop thread, perhaps twice."""
        self._told_of_ends.append(tell)

    def admit(self, lease_id: int, secret: bytes, block_ids: Sequence[int]) -> None:
        """As Receiver.admit; raises ValueError for a lease admitted twice or a block that does not exist."""
        self._admissions.admit(lease_id, secret, block_ids)

    def revoke(self, lease_id: int) -> None:
        """As Receiver.revoke; RevokeDone comes from here if no write runs, else from the `finish` or `detach` of the last one."""
        if self._admissions.revoke(lease_id):
            self._emit(RevokeDone(lease_id))
            return
        for tell in self._told_of_ends:
            tell(lease_id)

    def begin(self, write: IncomingWrite, peer: str) -> RunningWrite | None:
        """Check a write against the leases; None: refused, and said so."""
        grant = self._admissions.begin(write.lease_id, write.secret, write.spans)
        if isinstance(grant, WriteRefused):
            self.refuse(grant)
            return None
        return RunningWrite(write, grant, peer)

    def finish(self, running: RunningWrite, was_lent: Callable[[], bool] | None = None) -> None:
        """Copy, verify what was written, and report what that completed.

        `was_lent`: no checksums; asked behind the copy instead, whether the source was there for it until now.
        """
        corrupt = copy_in(self._memory, running.grant, running.write, self._copier, checksums=was_lent is None)
        refused = _find_flaw(running.grant, corrupt)
        if refused is None and was_lent is not None and not was_lent():
            reason = "its link was closed before it was copied"
            refused = WriteRefused(running.grant.lease_id, pb.TRANSFER_FAILED, reason)
        self._end(running, refused)

    def attach(self, lease_id: int, secret: bytes) -> tuple[int, ...] | None:
        """Where a lease lies, for a sender that writes by itself until `detach`; None: it may not, and that was said."""
        block_ids = self._admissions.attach(lease_id, secret)
        if block_ids is None:
            self.refuse(WriteRefused(0, pb.LEASE_EXPIRED, "no lease with that id and secret"))
        return block_ids

    def verify(self, write: IncomingWrite, peer: str, *, checksums: bool) -> None:
        """A write stands in memory already, as its sender says: look at it there, and report what that completed."""
        running = self.begin(write, peer)
        if running is not None:
            corrupt = find_corrupt(self._memory, running.grant, write.checksums) if checksums else None
            self._end(running, _find_flaw(running.grant, corrupt))

    def detach(self, lease_id: int) -> None:
        """A sender that wrote by itself can do so no more; once for each `attach` that let it."""
        if self._admissions.detach(lease_id):
            self._emit(RevokeDone(lease_id))

    def _end(self, running: RunningWrite, refused: WriteRefused | None) -> None:
        lease_id = running.grant.lease_id
        ended = self._admissions.end(running.grant, is_intact=refused is None)
        if refused is not None:
            self.refuse(refused)
        else:
            self._bytes_from.add(running.peer, running.write.num_bytes)
        if ended.landed:
            self._emit(BlocksLanded(lease_id, ended.landed, self._memory.shape[1] * len(ended.landed), running.peer))
        if ended.is_quiet:
            self._emit(RevokeDone(lease_id))

    def refuse(self, refused: WriteRefused) -> None:
        """Count and report a write that did not land."""
        self._refused.add(pb.ErrorCode.Name(refused.code))
        self._emit(refused)

    def snapshot(self) -> Mapping[str, object]:
        """Payload bytes that landed, per sending node; refusals per code; leases."""
        return {
            "kv_bytes_received": self._bytes_from.snapshot(),
            "writes_refused": self._refused.snapshot(),
            **self._admissions.snapshot(),
        }


def _find_flaw(grant: Grant, corrupt: Span | None) -> WriteRefused | None:
    if corrupt is None:
        return None
    return WriteRefused(grant.lease_id, pb.CHECKSUM, f"{corrupt}: other bytes than those that were sent")
