"""What a decode node decides: which attempts get blocks, when they become sequences, which tokens go to whom.

Pure: events and times in, actions out (node/events.py). The legal order of a handoff is connector/handoff.py; room is
decode_node/admission.py; which rows a step computes is engine/scheduler.py.

    Reserve -> lease (blocks leased, a slot reserved), at once or from the line (decode_node/door.py)
    every block landed, Commit -> writes revoked -> quiet -> sequence; its first batch repeats the sender's token at once
    Dispatch to itself -> sequence (decode_node/local_prompts.py), where the node computes prompts too
    each step -> one batch per router (decode_node/running.py)

A block's life here: leased until its lease ends; then a sequence's (committed), or quarantined until no write can touch it and
then free. A committed sequence's full blocks are published to the prefix cache, never before.

Who waits in the scheduler's queue, for its prompt to be computed here, goes before who asks for a lease: were leases given while
the head of the queue finds no room, ever new ones could take what it waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set

from google.protobuf.message import DecodeError

from connector.fence import FenceFloor
from connector.handoff import ReceiverAction, ReceiverEvent, ReceiverState, step_receiver
from connector.transport import BlocksLanded, NotifyArrived, RevokeDone, WriteRefused
from decode_node import admission
from decode_node.door import OPEN, Door
from decode_node.lease import Lease, commit_answer, commit_flaw, keys_of, router_of, starting_branches
from decode_node.leases import Leases
from decode_node.local_prompts import LocalPrompts
from decode_node.running import RunningBranch, RunningBranches
from engine.block_pool import BlockPool
from engine.scheduler import Scheduler
from engine.sequence import Progress
from node import events as ev
from node.identity import NodeIdentity, NodeLimits
from node.load import load_report
from node.pd_error import pd_error
from node.steps import StepsAhead
from node.timers import Timers
from node.token_batches import TokenBatches
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey, attempt_key

_Keys = tuple[AttemptKey, ...]


class DecodeCore:
    """The decode role of one node process. `draw` gives a fresh (lease id, secret) pair; randomness stays outside."""

    def __init__(
        self,
        identity: NodeIdentity,
        limits: NodeLimits,
        scheduler: Scheduler,
        pool: BlockPool,
        fingerprint: pb.Fingerprint,
        key_seed: bytes,
        draw: Callable[[], tuple[int, bytes]],
    ) -> None:
        self._identity = identity
        self._limits = limits
        self._scheduler = scheduler
        self._pool = pool
        self._fingerprint = fingerprint
        self._key_seed = key_seed
        self._leases = Leases()
        self._fence = FenceFloor(limits.max_fences)
        self._running = RunningBranches(identity, scheduler, self._fence)
        self._local = LocalPrompts(identity, limits, scheduler, pool, key_seed, self._fence, self._running)
        self._steps = StepsAhead(scheduler)
        self._door = Door(identity, limits, scheduler, pool, self._fence, self._leases, draw)
        self._timers: Timers[int] = Timers()  # a lease by its id
        self._out: list[ev.Action] = []

    # ------------------------------------------------------------ the four methods of a core, and their halves (PartOfCore)

    def receive(self, event: ev.Event, now: float) -> list[ev.Action]:
        """Take one event; see NodeCore."""
        self.take(event, now)
        return self._finish_turn(now)

    def take(self, event: ev.Event, now: float) -> None:
        """See PartOfCore."""
        match event:
            case ev.ReserveAsked(call_id, request):
                self._reserve(call_id, request, now)
            case ev.RenewAsked(call_id, request):
                self._out.append(ev.AnswerRenew(call_id, self._renew(request, now)))
            case ev.ReleaseAsked(request):
                self._release(request, now)
            case BlocksLanded(lease_id, indices):
                self._landed(lease_id, indices, now)
            case WriteRefused(lease_id, code):
                self._write_refused(lease_id, code, now)
            case NotifyArrived(reply_to, payload):
                self._notified(reply_to, payload, now)
            case RevokeDone(lease_id):
                self._step(self._leases[lease_id], ReceiverEvent.QUIET, now)
            case ev.StepDone(result):
                self.read(self._scheduler.complete(result), now)
            case ev.FromRouter(_, message) if message.WhichOneof("kind") == "cancel":
                self._cancel(message.cancel, now)
            case ev.FromRouter(router, message) if message.WhichOneof("kind") == "dispatch":
                self._end_below(self._local.start(router, message.dispatch, self.holds, now), now)
            case ev.RouterLost(router):
                self._router_lost(router, now)
            case _:
                self._out.append(ev.Count("unexpected_events"))

    def tick(self, now: float) -> list[ev.Action]:
        """Fire what is due; see NodeCore."""
        self.expire(now)
        return self._finish_turn(now)

    def _finish_turn(self, now: float) -> list[ev.Action]:
        """Alone over its scheduler, it plans for itself."""
        steps = self._steps.plan()
        self.hold_back(self._steps.is_held_up)
        return [*steps, *self.settle(now)]

    def expire(self, now: float) -> None:
        """See PartOfCore."""
        self._fence.tick(now)
        for lease_id in self._timers.pop_due(now):
            self._lease_due(self._leases[lease_id], now)
        self._running.expire(now)
        for waiting in [each for each in self._door.line if each.until <= now]:
            self._door.expire(waiting, now)

    def next_deadline(self) -> float | None:
        """See NodeCore."""
        times = (
            self._timers.next(),
            self._running.next_deadline(),
            self._fence.next_expiry(),
            self._door.next_expiry(),
        )
        return min((t for t in times if t is not None), default=None)

    def snapshot(self) -> Mapping[str, object]:
        """See NodeCore."""
        return {
            "leases": len(self._leases),
            "leases_by_state": self._leases.states(),
            "blocks_of_leases": self._leases.num_blocks(),
            "branches": len(self._running) - self._running.num_local,
            "local_branches": self._running.num_local,
            "waiting_reserves": len(self._door.line),
            "fences": len(self._fence),
            "scheduler": self._scheduler.snapshot(),
        }

    def load(self) -> pb.LoadReport:
        """See NodeCore."""
        return load_report(self._scheduler, self._pool, len(self._door.line))

    def holds(self, key: AttemptKey) -> bool:
        """Whether this attempt has a lease here, or waits for one: nobody else may start it."""
        return self._leases.of_any((key,)) is not None or self._door.line.find(key) is not None

    def hold_back(self, is_held_up: bool) -> None:
        """Whether no lease is to be given now, because somebody who was here before does not find room."""
        self._door.is_held_up = is_held_up

    # ------------------------------------------------------------ Reserve, Renew, Release

    def _reserve(self, call_id: int, request: pb.ReserveRequest, now: float) -> None:
        keys = keys_of(request)
        flaw = admission.fingerprint_difference(self._fingerprint, request.fingerprint)
        flaw = flaw or admission.request_flaw(request, self._pool.block_size, self._limits)
        if self._door.turn_away(call_id, keys, flaw):
            return
        admitted = tuple(filter(self._fence.admits, keys))
        for each in admitted:
            self._fence.begin(each, now + request.ms_left / 1000)
        self._end_below(admitted, now)
        lease = self._door.enter(call_id, request, keys, now)
        if lease is not None:
            self._begin(lease, now)

    def _begin(self, lease: Lease, now: float) -> None:
        self._timers.set(lease.lease_id, lease.next_timer())
        if not lease.missing:
            self._step(lease, ReceiverEvent.LAST_BLOCK, now)

    def _renew(self, request: pb.RenewRequest, now: float) -> pb.RenewReply:
        lease = self._leases.get(request.lease_id)
        if lease is None or lease.secret != request.secret or lease.state not in OPEN:
            self._out.append(ev.Count("stale_refused"))
            return pb.RenewReply(life_ms=0)
        self._prolong(lease, now)
        return pb.RenewReply(life_ms=int(lease.life_s * 1000))

    def _prolong(self, lease: Lease, now: float) -> None:
        lease.expires_at = now + lease.life_s
        self._timers.set(lease.lease_id, lease.next_timer())

    def _release(self, request: pb.ReleaseRequest, now: float) -> None:
        keys = keys_of(request)
        for key in keys:
            self._fence.end(key, now + request.ms_left / 1000, now)
            lease = self._leases.of_any((key,))
            if (waiting := self._door.line.find(key)) is not None:
                self._door.close(waiting, key, now)
            if lease is not None and lease.state in OPEN:  # only a broken peer releases what it committed
                lease.outcome = "released"
                self._step(lease, ReceiverEvent.RELEASE, now)
        self._end_below(keys, now)

    # ------------------------------------------------------------ Cancel

    def _cancel(self, cancel: pb.Cancel, now: float) -> None:
        key = attempt_key(cancel.key)
        self._fence.end(key, now + cancel.ms_left / 1000, now)
        self._end_below((key._replace(attempt=key.attempt + 1),), now)

    def _end_below(self, keys: _Keys, now: float) -> None:
        """End every attempt that is older than one of these of its branch, leased or running."""
        floors = {key.branch: key.attempt for key in keys}
        for waiting, older in self._door.line.older(floors):
            self._door.close(waiting, older, now)
        for lease, older in self._leases.older(floors):
            self._close(lease, older, "cancelled", now)
        self._running.end_older(floors, now)

    def _close(self, lease: Lease, key: AttemptKey, outcome: str, now: float) -> None:
        """The lease's branch is not wanted here any more; without any the lease is over."""
        if lease.open == {key}:
            lease.outcome = outcome
            self._step(lease, ReceiverEvent.CANCEL, now)
        else:
            self._end_branch(lease, key, outcome, now)

    def _end_branch(self, lease: Lease, key: AttemptKey, outcome: str, now: float) -> None:
        self._leases.close(lease, key)
        self._fence.end(key, lease.deadline, now)
        self._out.append(ev.Ended(key, outcome))

    def _router_lost(self, router: ev.RouterId, now: float) -> None:
        for waiting in [w for w in self._door.line if router_of(w.request) == router]:
            for key in list(waiting.open):
                self._door.close(waiting, key, now)
        for lease in self._leases.of_router(router):
            self._step(lease, ReceiverEvent.CANCEL, now)
        self._running.end_of_router(router, now)

    # ------------------------------------------------------------ writes and Commit

    def _landed(self, lease_id: int, indices: Iterable[int], now: float) -> None:
        lease = self._leases.get(lease_id)
        if lease is None or lease.state is not ReceiverState.RESERVED:
            return
        lease.missing.difference_update(indices)
        self._prolong(lease, now)
        if not lease.missing:
            self._step(lease, ReceiverEvent.LAST_BLOCK, now)

    def _write_refused(self, lease_id: int, code: pb.ErrorCode.ValueType, now: float) -> None:
        self._out.append(ev.Count(f"writes_refused_{pb.ErrorCode.Name(code).lower()}"))
        lease = self._leases.get(lease_id)
        if lease is not None:
            if lease.state in OPEN:
                lease.refusal, lease.outcome = code, pb.ErrorCode.Name(code)
            self._step(lease, ReceiverEvent.BAD_WRITE, now)

    def _notified(self, reply_to: object, payload: bytes, now: float) -> None:
        try:
            commit = pb.DataMessage.FromString(payload).commit
        except DecodeError:
            self._out.append(ev.Count("malformed_messages"))
            return
        lease = self._leases.get(commit.lease_id)
        if lease is None or lease.secret != commit.secret or lease.key != attempt_key(commit.key):
            self._out.append(ev.Count("commits_refused"))
            self._refuse_commit(reply_to, commit, pb.LEASE_EXPIRED, "no lease of that id, secret and attempt")
            return
        flaw = commit_flaw(commit, lease, self._key_seed, self._pool.block_size, self._limits)
        if flaw is not None:
            self._out.append(ev.Count("commits_refused"))
            self._refuse_commit(reply_to, commit, pb.INTERNAL, f"the Commit has {flaw}")
            self._step(lease, ReceiverEvent.BAD_WRITE, now)
            return
        if lease.state is ReceiverState.RESERVED:  # a write is missing
            lease.refusal, lease.outcome = pb.TRANSFER_FAILED, "TRANSFER_FAILED"
        if lease.state is not ReceiverState.COMMITTED:
            lease.commit, lease.reply_to = commit, reply_to
            if lease.state in OPEN:
                self._close_all_but({started.branch.choice for started in commit.branches}, lease, now)
        self._step(lease, ReceiverEvent.COMMIT, now)

    def _close_all_but(self, choices: Set[int], lease: Lease, now: float) -> None:
        """The other branches ended with the sender's token."""
        for key in [key for key in lease.keys if key in lease.open and key.choice not in choices]:
            self._close(lease, key, "finished", now)

    def _refuse_commit(self, reply_to: object, commit: pb.Commit, code: pb.ErrorCode.ValueType, reason: str) -> None:
        error = pd_error(code, reason, attempt_key(commit.key), self._identity.name)
        self._out.append(ev.AnswerCommit(reply_to, commit_answer(commit, error)))

    # ------------------------------------------------------------ the handoff machine

    def _step(self, lease: Lease, event: ReceiverEvent, now: float) -> None:
        lease.state, actions = step_receiver(lease.state, event)
        for action in actions:
            self._do(lease, action, now)

    def _do(self, lease: Lease, action: ReceiverAction, now: float) -> None:
        match action:
            case ReceiverAction.REVOKE:
                self._out.append(ev.RevokeLease(lease.lease_id))
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
                self._out.append(ev.AnswerCommit(lease.reply_to, commit_answer(lease.received_commit, None)))
            case ReceiverAction.REFUSE_COMMIT:
                reason = f"the lease is over: {pb.ErrorCode.Name(lease.refusal)}"
                self._refuse_commit(lease.reply_to, lease.received_commit, lease.refusal, reason)

    def _remember_refusal(self, lease: Lease) -> None:
        """Forget a lease that is over; one that a bad write ended stays for its life, to tell its Commit why."""
        if lease.refusal == pb.LEASE_EXPIRED:
            self._leases.forget(lease)
            self._timers.set(lease.lease_id, None)
        else:
            self._timers.set(lease.lease_id, lease.expires_at)

    def _activate(self, lease: Lease, now: float) -> None:
        """The lease becomes sequences; their tokens so far go to the router at once, repeating the sender's."""
        commit = lease.received_commit
        self._leases.forget(lease)
        self._timers.set(lease.lease_id, None)
        starting = starting_branches(lease)
        blocks_of = admission.start_branches(self._pool, lease.blocks, list(starting))
        self._scheduler.unreserve_slots(len(lease.keys) - len(starting))
        deadline = min(lease.deadline, now + commit.ms_left / 1000)
        batches = TokenBatches(from_receiver=True)
        num_published = 0  # leading blocks: the first branch offers those that all have
        for position, (started, spec) in starting.items():
            key = lease.keys[position]
            self._leases.close(lease, key)
            self._scheduler.adopt(spec, blocks_of[position], lease.blocks.num_growth, num_published)
            num_published = len(lease.block_keys)
            token_ids = list(started.branch.generated_token_ids)
            self._running.begin(RunningBranch(key, lease.router, deadline, token_ids))
            tokens = batches.add(lease.router, key, commit.first_index, token_ids[commit.first_index :])
            tokens.logprobs.extend(started.logprobs)
        self._out += batches.to_actions()

    # ------------------------------------------------------------ steps and timers

    def read(self, progress: Iterable[Progress], now: float) -> None:
        """See PartOfCore."""
        self._running.read(progress, now)

    def _lease_due(self, lease: Lease, now: float) -> None:
        if lease.state in OPEN:
            expired = now >= lease.expires_at
            lease.outcome = "expired" if expired else "DEADLINE"
            if expired:
                self._out.append(ev.Count("leases_expired"))
            self._step(lease, ReceiverEvent.EXPIRE if expired else ReceiverEvent.CANCEL, now)
        elif lease.state is ReceiverState.RELEASED:
            self._leases.forget(lease)

    def settle(self, now: float) -> list[ev.Action]:
        """Let in who waits and fits, hand out the turn's actions; see PartOfCore."""
        for lease in self._door.serve(now):
            self._begin(lease, now)
        out = [*self._out, *self._local.out, *self._running.out, *self._door.out]
        self._out, self._local.out, self._running.out, self._door.out = [], [], [], []
        return out
