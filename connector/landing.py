"""The receiving half that all two-sided transports share: from a checked message to bytes in place, and the events that say so.

Whoever carries the bytes calls `begin` and `finish` around each write, each link's from one thread; the loop thread calls `admit`
and `revoke`. Transports of one node share one landing: it is the node's memory and leases. Not here: how messages arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from connector.admissions import Admissions, Grant
from connector.tally import Tally
from connector.transport import MAX_PAYLOAD_BYTES, BlocksLanded, Emit, RevokeDone, WriteRefused
from connector.writes import Bytes, IncomingWrite, checked_memory, copy_in
from proto import baton_pb2 as pb


@dataclass(frozen=True, slots=True)
class RunningWrite:
    """A write that may touch its blocks until `finish` returns: their quarantine, should the lease end meanwhile."""

    write: IncomingWrite
    grant: Grant
    peer: str


class Landing:
    """Puts arriving writes into leased blocks."""

    def __init__(self, memory: Bytes, emit: Emit) -> None:
        self._memory = checked_memory(memory)
        self._emit = emit
        num_blocks, block_bytes = memory.shape
        self._admissions = Admissions(num_blocks, block_bytes, MAX_PAYLOAD_BYTES)
        self._bytes_from = Tally()
        self._refused = Tally()

    def admit(self, lease_id: int, secret: bytes, block_ids: Sequence[int]) -> None:
        """As Receiver.admit; raises ValueError for a lease admitted twice or a block that does not exist."""
        self._admissions.admit(lease_id, secret, block_ids)

    def revoke(self, lease_id: int) -> None:
        """As Receiver.revoke; RevokeDone comes from here if no write runs, else from the `finish` of the last one."""
        if self._admissions.revoke(lease_id):
            self._emit(RevokeDone(lease_id))

    def begin(self, write: IncomingWrite, peer: str) -> RunningWrite | None:
        """Check a write against the leases; None: refused, and said so."""
        grant = self._admissions.begin(write.lease_id, write.secret, write.spans)
        if isinstance(grant, WriteRefused):
            self.refuse(grant)
            return None
        return RunningWrite(write, grant, peer)

    def finish(self, running: RunningWrite, was_lent: Callable[[], bool] | None = None) -> None:
        """Copy, verify over the destination, and report what that completed.

        `was_lent`: no checksums; asked behind the copy instead, whether the source was there for it until now.
        """
        lease_id = running.grant.lease_id
        corrupt = copy_in(self._memory, running.grant, running.write, checksums=was_lent is None)
        refused: WriteRefused | None = None
        if corrupt is not None:
            refused = WriteRefused(lease_id, pb.CHECKSUM, f"{corrupt}: other bytes than those that were sent")
        elif was_lent is not None and not was_lent():
            refused = WriteRefused(lease_id, pb.TRANSFER_FAILED, "its link was closed before it was copied")
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
