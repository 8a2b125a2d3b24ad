"""From a lease to sequences: what lands in its blocks, its Commit, its end. Pure; the core says who is let in, and who is ended.

    every block landed, Commit -> writes revoked -> quiet -> sequences; their first batch repeats the sender's tokens at once

The legal order is connector/handoff.py. The blocks are leased until the lease ends; then they are sequences', or quarantined until
no write can touch them and then free. A committed sequence's full blocks are published to the prefix cache, never before.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Final

from google.protobuf.message import DecodeError

from connector.fence import FenceFloor
from connector.handoff import ReceiverAction, ReceiverEvent, ReceiverState, step_receiver
from connector.transport import BlocksLanded, NotifyArrived, RevokeDone, WriteRefused
from decode_node import admission
from decode_node.door import OPEN
from decode_node.lease import (
    Lease,
    blocks_still_missing,
    commit_answer,
    commit_flaw,
    started_branch,
    starting_branches,
)
from decode_node.leases import Leases
from decode_node.running import RunningBranches
from engine.block_pool import BlockPool
from engine.scheduler import Scheduler
from node import events as ev
from node.identity import NodeIdentity, NodeLimits
from node.pd_error import TOO_LATE, pd_error
from node.timers import Timers
from node.token_batches import TokenBatches
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey, attempt_key

MAX_SENDERS: Final = 1024  # whose blocks are counted


class Receiving:
    """Owned by the decode core, as are `fence` and `running`, which it shares; its `leases` are the core's and the door's too."""

    def __init__(
        self,
        identity: NodeIdentity,
        limits: NodeLimits,
        scheduler: Scheduler,
        pool: BlockPool,
        key_seed: bytes,
        fence: FenceFloor,
        running: RunningBranches,
    ) -> None:
        self._identity = identity
        self._limits = limits
        self._scheduler = scheduler
        self._pool = pool
        self._key_seed = key_seed
        self._fence = fence
        self.leases = Leases()
        self._running = running
        self._timers: Timers[int] = Timers()  # a lease by its id
        self._num_landed: dict[tuple[str, int], int] = {}  # blocks, by who wrote them; the oldest are forgotten
        self.out: list[ev.Action] = []  # the core takes them at the end of its turn

    def take(self, event: BlocksLanded | WriteRefused | NotifyArrived | RevokeDone, now: float) -> None:
        """What the transport has seen."""
        match event:
            case BlocksLanded(lease_id, indices):
                self._landed(lease_id, indices, now)
            case WriteRefused(lease_id, code):
                self._write_refused(lease_id, code, now)
            case NotifyArrived(reply_to, payload):
                self._notified(reply_to, payload, now)
            case RevokeDone(lease_id):
                self._step(self.leases[lease_id], ReceiverEvent.QUIET, now)

    # ------------------------------------------------------------ a lease lives

    def begin(self, lease: Lease, now: float) -> None:
        """Its blocks may be written from now on."""
        self._timers.set(lease.lease_id, lease.next_timer())
        if not lease.missing:
            self._step(lease, ReceiverEvent.LAST_BLOCK, now)

    def renew(self, request: pb.RenewRequest, now: float) -> pb.RenewReply:
        """Keep a lease for another life; the answer."""
        lease = self.leases.get(request.lease_id)
        if lease is None or lease.secret != request.secret:
            self.out.append(ev.Count("stale_refused"))
            return pb.RenewReply(life_ms=0)
        if lease.state not in OPEN:
            self.out.append(ev.Count("stale_refused"))
            over = lease.refusal
            return pb.RenewReply(life_ms=0, is_too_late=over == pb.DEADLINE, is_draining=over == pb.DRAINING)
        self._prolong(lease, now)
        return pb.RenewReply(life_ms=int(lease.life_s * 1000), num_landed=self._num_landed.get(lease.sender, 0))

    def _prolong(self, lease: Lease, now: float) -> None:
        lease.expires_at = now + lease.life_s
        self._timers.set(lease.lease_id, lease.next_timer())

    def release(self, lease: Lease, now: float) -> None:
        """Its sender gives it back; only a broken peer releases what it committed."""
        if lease.state in OPEN:
            lease.outcome = "released"
            self._step(lease, ReceiverEvent.RELEASE, now)

    def cancel(self, lease: Lease, now: float, outcome: str = "cancelled") -> None:
        """Nobody wants any of its branches."""
        lease.outcome = outcome
        self._step(lease, ReceiverEvent.CANCEL, now)

    def drain(self, lease: Lease, now: float) -> None:
        """The node is to end, and waits for it no longer; its sender is told so, which costs nobody a retry."""
        lease.refusal = pb.DRAINING
        self.cancel(lease, now, "DRAINING")

    def close(self, lease: Lease, key: AttemptKey, outcome: str, now: float) -> None:
        """The lease's branch is not wanted here any more; without any the lease is over."""
        if lease.open == {key}:
            self.cancel(lease, now, outcome)
        else:
            self._end_branch(lease, key, outcome, now)

    def _end_branch(self, lease: Lease, key: AttemptKey, outcome: str, now: float) -> None:
        self.leases.close(lease, key)
        self._fence.end(key, lease.deadline, now)
        self.out.append(ev.Ended(key, outcome))

    def expire(self, now: float) -> None:
        """End whose time is over."""
        for lease_id in self._timers.pop_due(now):
            self._lease_due(self.leases[lease_id], now)

    def next_deadline(self) -> float | None:
        """When `expire` has something to do."""
        return self._timers.next()

    def _lease_due(self, lease: Lease, now: float) -> None:
        if lease.state in OPEN:
            expired = now >= lease.expires_at
            if expired:
                lease.outcome = "expired"
                self.out.append(ev.Count("leases_expired"))
            else:
                lease.refusal, lease.outcome = pb.DEADLINE, "DEADLINE"
            self._step(lease, ReceiverEvent.EXPIRE if expired else ReceiverEvent.CANCEL, now)
        elif lease.state is ReceiverState.RELEASED:
            self.leases.forget(lease)

    # ------------------------------------------------------------ writes and Commit

    def _landed(self, lease_id: int, indices: Sequence[int], now: float) -> None:
        lease = self.leases.get(lease_id)
        if lease is None:
            return
        self._num_landed[lease.sender] = self._num_landed.get(lease.sender, 0) + len(indices)
        if len(self._num_landed) > MAX_SENDERS:
            del self._num_landed[next(iter(self._num_landed))]
        if lease.state is not ReceiverState.RESERVED:
            return
        lease.missing.difference_update(indices)
        self._prolong(lease, now)
        if not lease.missing:
            self._step(lease, ReceiverEvent.LAST_BLOCK, now)

    def _write_refused(self, lease_id: int, code: pb.ErrorCode.ValueType, now: float) -> None:
        self.out.append(ev.Count(f"writes_refused_{pb.ErrorCode.Name(code).lower()}"))
        lease = self.leases.get(lease_id)
        if lease is not None:
            if lease.state in OPEN:
                lease.refusal, lease.outcome = code, pb.ErrorCode.Name(code)
            self._step(lease, ReceiverEvent.BAD_WRITE, now)

    def _notified(self, reply_to: object, payload: bytes, now: float) -> None:
        try:
            commit = pb.DataMessage.FromString(payload).commit
        except DecodeError:
            self.out.append(ev.Count("malformed_messages"))
            return
        lease = self.leases.get(commit.lease_id)
        if lease is None or lease.secret != commit.secret or lease.key != attempt_key(commit.key):
            self.out.append(ev.Count("commits_refused"))
            self._refuse_commit(reply_to, commit, pb.LEASE_EXPIRED, "no lease of that id, secret and attempt")
            return
        flaw = commit_flaw(commit, lease, self._key_seed, self._pool.block_size, self._limits)
        if flaw is not None:
            self.out.append(ev.Count("commits_refused"))
            self._refuse_commit(reply_to, commit, pb.INTERNAL, f"the Commit has {flaw}")
            self._step(lease, ReceiverEvent.BAD_WRITE, now)
            return
        if lease.state is ReceiverState.RESERVED:
            lease.missing = blocks_still_missing(lease, commit, self._pool.block_size)
            if not lease.missing:
                self._step(lease, ReceiverEvent.LAST_BLOCK, now)
        if lease.state is ReceiverState.RESERVED:  # a write is missing
            lease.refusal, lease.outcome = pb.TRANSFER_FAILED, "TRANSFER_FAILED"
        if lease.state is not ReceiverState.COMMITTED:
            lease.commit, lease.committed_at, lease.reply_to = commit, now, reply_to
            if lease.state in OPEN:
                self._close_all_but({started.branch.choice for started in commit.branches}, lease, now)
        self._step(lease, ReceiverEvent.COMMIT, now)

    def _close_all_but(self, choices: Set[int], lease: Lease, now: float) -> None:
        """The other branches ended with the sender's token."""
        for key in [key for key in lease.keys if key in lease.open and key.choice not in choices]:
            self.close(lease, key, "finished", now)

    def _refuse_commit(self, reply_to: object, commit: pb.Commit, code: pb.ErrorCode.ValueType, reason: str) -> None:
        error = pd_error(code, reason, attempt_key(commit.key), self._identity.name)
        self.out.append(ev.AnswerCommit(reply_to, commit_answer(commit, error)))

    # ------------------------------------------------------------ the handoff machine

    def _step(self, lease: Lease, event: ReceiverEvent, now: float) -> None:
        lease.state, actions = step_receiver(lease.state, event)
        for action in actions:
            self._do(lease, action, now)

    def _do(self, lease: Lease, action: ReceiverAction, now: float) -> None:
        match action:
            case ReceiverAction.REVOKE:
                self.out.append(ev.RevokeLease(lease.lease_id))
            case ReceiverAction.QUARANTINE:
                self._pool.quarantine(lease.blocks.leased)
                for key in sorted(lease.open):
                    self._end_branch(lease, key, lease.outcome, now)
            case ReceiverAction.FREE_BLOCKS:
                admission.return_blocks(self._pool, lease.blocks)
                self._scheduler.unreserve_slots(len(lease.keys))
                self._remember_refusal(lease)
            case ReceiverAction.ACTIVATE:
                self._activate(lease, now)
            case ReceiverAction.ACK_COMMIT:
                self.out.append(ev.AnswerCommit(lease.reply_to, commit_answer(lease.received_commit, None)))
            case ReceiverAction.REFUSE_COMMIT:
                is_too_late = lease.refusal == pb.DEADLINE
                reason = TOO_LATE if is_too_late else f"the lease is over: {pb.ErrorCode.Name(lease.refusal)}"
                self._refuse_commit(lease.reply_to, lease.received_commit, lease.refusal, reason)

    def _remember_refusal(self, lease: Lease) -> None:
        """Forget a lease that is over; what a bad write, its deadline or a drain ended stays for a life, to tell its sender."""
        if lease.refusal == pb.LEASE_EXPIRED:
            self.leases.forget(lease)
            self._timers.set(lease.lease_id, None)
        else:
            self._timers.set(lease.lease_id, lease.expires_at)

    def _activate(self, lease: Lease, now: float) -> None:
        """The lease becomes sequences; their tokens so far go to the router at once, repeating the sender's."""
        commit = lease.received_commit
        self.leases.forget(lease)
        self._timers.set(lease.lease_id, None)
        starting = starting_branches(lease)
        blocks_of = admission.start_branches(self._pool, lease.blocks, list(starting))
        self._scheduler.unreserve_slots(len(lease.keys) - len(starting))
        deadline = min(lease.deadline, now + commit.ms_left / 1000)
        batches = TokenBatches(from_receiver=True)
        num_published = lease.blocks.num_held  # leading blocks: found, or offered by the first branch, which all have
        for position, (started, spec) in starting.items():
            key = lease.keys[position]
            self.leases.close(lease, key)
            self._scheduler.adopt(spec, blocks_of[position], lease.blocks.num_growth, num_published)
            num_published = len(lease.block_keys)
            branch = started_branch(key, lease, deadline, started, now)
            self._running.begin(branch)
            tokens = batches.add(lease.router, key, commit.first_index, branch.token_ids[commit.first_index :])
            tokens.logprobs.extend(started.logprobs)
        self.out += batches.to_actions()
