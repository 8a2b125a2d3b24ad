"""What a prefill node decides: which prompts it accepts, when it asks for a lease, what it writes when, who hears of failure.

Pure: events and times in, actions out (node/events.py). The legal order of a handoff is connector/handoff.py; which rows a step
computes is engine/scheduler.py; this file ties an attempt's computing to its handoff:

    Dispatch -> queued -> first chunk planned: Reserve, beside the computing
    chunk read -> blocks it completed are written (H01); last chunk read -> first token to the router, tail block, Commit

A block's life here: in use while computed and while lent; the scheduler's reference is dropped by DROP_BLOCKS only, which
connector/handoff.py allows only when no link reads it. Full blocks stay in the prefix cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, cast

from google.protobuf.message import DecodeError

from connector.handoff import SenderAction, SenderEvent, SenderState, step_sender
from connector.transport import Answered, BlocksTaken, LeaseRef, LinkClosed
from engine.block_pool import BlockPool
from engine.plan import BranchToken
from engine.scheduler import Scheduler
from engine.sequence import Progress
from node import events as ev
from node.identity import NodeIdentity, NodeLimits
from node.load import load_report
from node.pd_error import ENDS_WITHOUT_TOKEN, pd_error, refusal
from node.sampling import to_logprobs_message
from node.steps import plan_ahead
from node.timers import Timers
from node.token_batches import TokenBatches
from prefill_node import messages
from prefill_node.links import Links
from prefill_node.task import HeldLease, PrefillTask, Work, work_of
from prefill_node.tasks import Tasks
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey, attempt_key

_GIVEN_UP: Final = {SenderState.DRAINING, SenderState.FAILED, SenderState.DONE}


class PrefillCore:
    """The prefill role of one node process."""

    def __init__(
        self,
        identity: NodeIdentity,
        limits: NodeLimits,
        scheduler: Scheduler,
        pool: BlockPool,
        fingerprint: pb.Fingerprint,
        key_seed: bytes,
    ) -> None:
        self._identity = identity
        self._limits = limits
        self._scheduler = scheduler
        self._pool = pool
        self._fingerprint = fingerprint
        self._key_seed = key_seed
        self._tasks = Tasks(limits.max_attempts, limits.max_fences)
        self._not_started: dict[AttemptKey, None] = {}  # the scheduler's waiting queue, in its order
        self._asked: dict[AttemptKey, PrefillTask] = {}  # Reserve sent, answer not here; may outlive the task
        self._links = Links()
        self._timers: Timers[AttemptKey] = Timers()
        self._out: list[ev.Action] = []

    # ------------------------------------------------------------ the four methods of a core, and their halves (PartOfCore)

    def receive(self, event: ev.Event, now: float) -> list[ev.Action]:
        """Take one event; see NodeCore."""
        self.take(event, now)
        self._out += plan_ahead(self._scheduler)
        return self.settle(now)

    def take(self, event: ev.Event, now: float) -> None:
        """See PartOfCore."""
        match event:
            case ev.FromRouter(router, message):
                self._from_router(router, message, now)
            case ev.RouterLost(router):
                for task in self._tasks.of_router(router):
                    self._cancel(task, tuple(task.open), now)
            case ev.ReserveAnswered(key, reply):
                self._reserve_answered(key, reply, now)
            case ev.RenewAnswered(key, answer):
                self._renew_answered(key, answer, now)
            case BlocksTaken(link_id, lease_id, indices):
                self._blocks_taken(link_id, lease_id, len(indices), now)
            case Answered(link_id, payload):
                self._answered(link_id, payload, now)
            case LinkClosed(link_id, reason):
                for key in self._links.lost(link_id):
                    error = self._error(pb.TRANSFER_FAILED, f"the link broke: {reason}")
                    self._step(self._tasks[key], SenderEvent.LINK_LOST, now, error)
            case ev.StepDone(result):
                self.read(self._scheduler.complete(result), now)
            case _:
                self._out.append(ev.Count("unexpected_events"))  # a peer took us for a decode node

    def tick(self, now: float) -> list[ev.Action]:
        """Fire what is due; see NodeCore."""
        self.expire(now)
        self._out += plan_ahead(self._scheduler)
        return self.settle(now)

    def expire(self, now: float) -> None:
        """See PartOfCore."""
        self._tasks.fence.tick(now)
        for key in self._timers.pop_due(now):
            self._on_timer(self._tasks[key], now)

    def next_deadline(self) -> float | None:
        """See NodeCore."""
        times = [t for t in (self._timers.next(), self._tasks.fence.next_expiry()) if t is not None]
        return min(times, default=None)

    def snapshot(self) -> Mapping[str, object]:
        """See NodeCore."""
        return {
            "attempts": len(self._tasks),
            "attempts_by_state": dict(Counter(task.state.name for task in self._tasks)),
            "reserves_unanswered": len(self._asked),
            "links": len(self._links),
            "fences": len(self._tasks.fence),
            "scheduler": self._scheduler.snapshot(),
        }

    def load(self) -> pb.LoadReport:
        """See NodeCore."""
        return load_report(self._scheduler, self._pool)

    # ------------------------------------------------------------ from the router

    def _from_router(self, router: ev.RouterId, message: pb.RouterMessage, now: float) -> None:
        match message.WhichOneof("kind"):
            case "dispatch":
                self._dispatch(work_of(router, message.dispatch, self._key_seed, self._pool.block_size, now), now)
            case "cancel":
                key = attempt_key(message.cancel.key)
                self._tasks.fence.end(key, now + message.cancel.ms_left / 1000, now)
                self._end_below(key._replace(attempt=key.attempt + 1), now)
            case _:
                self._out.append(ev.Count("unexpected_events"))

    def _dispatch(self, work: Work, now: float) -> None:
        if work.key in self._asked or self._scheduler.knows(work.key) or self._tasks.is_stale(work):
            self._out.append(ev.Count("stale_refused"))
            return
        if (lack := self._tasks.lack(work)) is not None:
            self._refuse(work, pb.BUSY, lack)
            return
        for key in work.keys:
            self._tasks.fence.begin(key, work.deadline)
            self._end_below(key, now)
        task = self._tasks.add(work)
        self._not_started[work.key] = None
        self._scheduler.submit(work.to_spec())
        self._timers.set(work.key, task.next_timer())

    def _end_below(self, key: AttemptKey, now: float) -> None:
        """End what is older than `key` of its branch."""
        if (older := self._tasks.older(key)) is not None:
            task, older_key = older
            self._cancel(task, (older_key,), now)

    def _cancel(self, task: PrefillTask, keys: Iterable[AttemptKey], now: float) -> None:
        """Nobody wants these branches any more; without any the attempt ends."""
        for key in keys:
            self._tasks.close(task, key, "cancelled")
        if not task.open and task.work.key in self._tasks:
            self._step(task, SenderEvent.CANCEL, now)

    def _refuse(self, work: Work, code: pb.ErrorCode.ValueType, reason: str) -> None:
        self._out += refusal(code, reason, work.keys, work.router, self._identity.name, work.generated_token_ids)

    # ------------------------------------------------------------ from the receiver

    def _reserve_answered(self, key: AttemptKey, reply: pb.ReserveReply | None, now: float) -> None:
        task = self._asked.pop(key)
        if reply is None:
            error = self._error(pb.TRANSFER_FAILED, f"{task.work.target.node.name} did not answer Reserve")
            self._step(task, SenderEvent.UNANSWERED, now, error)
        elif reply.WhichOneof("result") == "error":
            self._step(task, SenderEvent.REFUSED, now, messages.known_error(reply.error))
        elif task.state is SenderState.RESERVING:
            is_new = self._links.is_new_lease(messages.receiver_of(task.work), reply.lease.lease_id)
            if (flaw := messages.lease_flaw(task.work, reply.lease, self._pool.block_size, is_new)) is not None:
                error = self._error(pb.TRANSFER_FAILED, f"{task.work.target.node.name} granted a lease with {flaw}")
                self._step(task, SenderEvent.UNANSWERED, now, error)
            else:
                self._hold(task, reply.lease, now)
                self._step(task, SenderEvent.GRANTED, now)
        else:
            self._step(task, SenderEvent.GRANTED, now)

    def _hold(self, task: PrefillTask, lease: pb.Lease, now: float) -> None:
        receiver = messages.receiver_of(task.work)
        link_id = self._links.find(receiver)
        if link_id is None:
            link_id = self._links.make(receiver)
            self._out.append(ev.OpenLink(link_id, tuple(lease.endpoints)))
        self._links.attach(link_id, lease.lease_id, task.work.key)
        task.lease = HeldLease(LeaseRef(lease.lease_id, lease.secret), link_id, lease.life_ms / 1000)
        task.num_queued = lease.num_blocks_held
        task.renew_at = now + task.lease.life_s / 3
        task.overdue_at = now + task.lease.life_s

    def _renew_answered(self, key: AttemptKey, reply: pb.RenewReply | None, now: float) -> None:
        task = self._tasks.get(key)
        if task is None or task.lease is None or reply is None:
            return  # unanswered: the next one may get through before the lease ends
        if reply.life_ms == 0:
            error = self._error(pb.LEASE_EXPIRED, f"{task.work.target.node.name} has no such lease any more")
            self._step(task, SenderEvent.LEASE_GONE, now, error)
        elif task.state is SenderState.WRITING:
            task.overdue_at = now + reply.life_ms / 1000
            self._timers.set(key, task.next_timer())

    def _blocks_taken(self, link_id: str, lease_id: int, num_blocks: int, now: float) -> None:
        key = self._links.attempt(link_id, lease_id)
        if key is None:
            return
        task = self._tasks[key]
        task.num_unread -= num_blocks
        if task.num_unread == 0:
            self._step(task, SenderEvent.QUIET, now)

    def _answered(self, link_id: str, payload: bytes, now: float) -> None:
        try:
            answer = pb.DataMessage.FromString(payload).answer
        except DecodeError:
            self._out.append(ev.Count("malformed_messages"))
            return
        key = self._links.attempt(link_id, answer.lease_id)
        if key is None:
            self._out.append(ev.Count("stale_refused"))
            return
        task = self._tasks[key]
        if task.state is not SenderState.COMMITTING or task.num_unread > 0:
            self._out.append(ev.Count("unexpected_events"))  # too late to matter, or before it can have seen the Commit
        elif answer.HasField("error"):
            self._step(task, SenderEvent.COMMIT_REFUSED, now, messages.known_error(answer.error))
        else:
            self._step(task, SenderEvent.ACKED, now)

    # ------------------------------------------------------------ steps and timers

    def read(self, progress: Iterable[Progress], now: float) -> None:
        """See PartOfCore."""
        batches = TokenBatches(from_receiver=False)
        advanced: list[PrefillTask] = []
        for item in progress:
            task = self._tasks.get(cast(AttemptKey, item.sequence_id))
            if task is None or task.state in _GIVEN_UP:
                continue
            if item.finish == "broken":
                self._report(task, self._error(*ENDS_WITHOUT_TOKEN[item.finish]))
                self._step(task, SenderEvent.CANCEL, now)
                continue
            task.num_computed = item.num_computed
            task.prompt_logprobs += map(to_logprobs_message, item.prompt_logprobs)
            if item.token_id is not None:
                own = BranchToken(item.token_id, item.logprobs)
                task.first_tokens = dict(zip(task.work.keys, (own, *item.branch_tokens), strict=True))
                self._say_first_tokens(task, batches)
            advanced.append(task)
        self._out += batches.to_actions()
        for task in advanced:
            if task.open:
                self._write_computed(task, now)
            else:
                self._step(task, SenderEvent.WITHDRAW, now)

    def _say_first_tokens(self, task: PrefillTask, batches: TokenBatches) -> None:
        """Of every branch that is open; one that ends with it is closed."""
        work = task.work
        for key in list(task.open):
            token_id, logprobs = task.first_tokens[key]
            finish = work.finish_of(token_id)
            first_index = len(work.generated_token_ids)
            tokens = batches.add(work.router, key, first_index, [token_id], finish, logprobs)
            tokens.prompt_logprobs.extend(task.prompt_logprobs)
            if finish is not None:
                self._tasks.close(task, key, "finished")

    def _write_computed(self, task: PrefillTask, now: float) -> None:
        """Queue every block that is complete by now; the partial last one only behind the last chunk (H01)."""
        if task.state is not SenderState.WRITING:
            return
        lease = task.held_lease
        blocks = task.blocks_to_write(self._scheduler.block_ids(task.work.key), self._pool.block_size)
        if blocks:
            self._out.append(ev.WriteBlocks(lease.link_id, lease.ref, blocks))
        if task.first_tokens:
            self._step(task, SenderEvent.ALL_WRITTEN, now)

    def _on_timer(self, task: PrefillTask, now: float) -> None:
        if now >= task.work.deadline and task.state not in _GIVEN_UP:
            if task.state is not SenderState.COMMITTING:  # after Commit the receiver says so
                self._report(task, self._error(pb.DEADLINE, "the request's deadline has passed"))
            self._step(task, SenderEvent.CANCEL, now)
        elif now >= task.overdue_at:
            if task.state is SenderState.WRITING:
                error = self._error(pb.LEASE_EXPIRED, "a lease life passed without renewal")
                self._step(task, SenderEvent.LEASE_GONE, now, error)
            else:
                error = self._error(pb.TRANSFER_FAILED, "Commit was not answered within a lease life")
                self._step(task, SenderEvent.OVERDUE, now, error)
        elif now >= task.renew_at and task.state is SenderState.WRITING:
            work, lease = task.work, task.held_lease
            task.renew_at = now + lease.life_s / 3
            request = messages.renew_request(work, lease)
            self._out.append(ev.SendRenew(work.key, work.target.grpc_address, request, self._patience_s(work, now)))
        if task.work.key in self._tasks:
            self._timers.set(task.work.key, task.next_timer())

    def settle(self, now: float) -> list[ev.Action]:
        """Ask for leases for what the plans begin, hand out the turn's actions; see PartOfCore."""
        while (key := next(iter(self._not_started), None)) is not None and self._scheduler.block_ids(key):
            del self._not_started[key]
            if not self._tasks[key].work.ends_with_first_token:
                self._step(self._tasks[key], SenderEvent.START, now)
        out, self._out = self._out, []
        return out

    # ------------------------------------------------------------ the handoff machine

    def _step(self, task: PrefillTask, event: SenderEvent, now: float, error: pb.PDError | None = None) -> None:
        before = task.state
        task.state, actions = step_sender(before, event)
        if task.state is SenderState.DRAINING and before is not SenderState.DRAINING:
            task.overdue_at = now + self._limits.lease_life_s
        for action in actions:
            self._do(task, action, now, error)
        if task.state is SenderState.DRAINING and task.num_unread == 0:
            self._step(task, SenderEvent.QUIET, now)
        if task.work.key in self._tasks:
            self._timers.set(task.work.key, task.next_timer())

    def _do(self, task: PrefillTask, action: SenderAction, now: float, error: pb.PDError | None) -> None:
        work = task.work
        match action:
            case SenderAction.SEND_RESERVE:
                self._asked[work.key] = task
                wait_s = min(self._limits.reserve_wait_s, max(work.deadline - now, 0))
                request = messages.reserve_request(work, self._identity, self._fingerprint, wait_s, now)
                patience_s = wait_s + self._patience_s(work, now)
                self._out.append(ev.SendReserve(work.key, work.target.grpc_address, request, patience_s))
            case SenderAction.START_WRITING:
                self._write_computed(task, now)
            case SenderAction.SEND_COMMIT:
                lease = task.held_lease
                task.overdue_at = now + lease.life_s
                self._out.append(ev.NotifyLink(lease.link_id, messages.commit(task, lease, now)))
            case SenderAction.SEND_RELEASE:
                self._out.append(ev.SendRelease(work.target.grpc_address, messages.release_request(work, now)))
            case SenderAction.CLOSE_LINK:
                task.overdue_at = float("inf")  # LinkClosed is certain to come
                link_id = task.held_lease.link_id
                self._links.retire(link_id)
                self._out.append(ev.CloseLink(link_id))
            case SenderAction.STOP_COMPUTING:
                self._not_started.pop(work.key, None)
                self._scheduler.abort(work.key)
            case SenderAction.DROP_BLOCKS:
                self._forget(task, now)
            case SenderAction.REPORT | SenderAction.REPORT_UNANSWERED:
                if error is None:
                    raise AssertionError(f"{action.name} without an error")
                error.commit_unanswered = action is SenderAction.REPORT_UNANSWERED
                self._report(task, error)

    def _patience_s(self, work: Work, now: float) -> float:
        return min(self._limits.rpc_timeout_s, max(work.deadline - now, 0.001))

    def _forget(self, task: PrefillTask, now: float) -> None:
        key = task.work.key
        if task.lease is not None:
            self._links.detach(task.lease.link_id, task.lease.ref.lease_id)
        self._scheduler.release(key)
        self._timers.set(key, None)
        outcome = "committed" if task.state is SenderState.DONE else "cancelled"
        self._out += self._tasks.forget(task, outcome, now)

    def _report(self, task: PrefillTask, error: pb.PDError) -> None:
        self._out += [ev.ToRouter(task.work.router, message) for message in self._tasks.close_with(task, error)]

    def _error(self, code: pb.ErrorCode.ValueType, reason: str) -> pb.PDError:
        """For _report, which sends it for each branch."""
        return pd_error(code, reason, None, self._identity.name)
