"""What a prefill node decides: which prompts it accepts, when it asks for a lease, what it writes when, who hears of failure.

Pure: events and times in, actions out (node/events.py). The sending half of a handoff is node/handing_over.py; which rows a step
computes is engine/scheduler.py; this file ties an attempt's computing to its handoff:

    Dispatch -> (blocks fetched from the KV pool) -> queued -> first chunk planned: Reserve, beside the computing
    chunk read -> blocks it completed are written (H01); last chunk read -> first token to the router, tail block, Commit

A block's life here: in use while computed and while lent; the scheduler's reference is dropped by DROP_BLOCKS only, which
connector/handoff.py allows only when no link reads it. Full blocks stay in the prefix cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from math import inf

from connector.handoff import SenderAction, SenderEvent, SenderState
from connector.transport import Answered, BlocksTaken, LinkClosed
from engine.block_pool import BlockPool
from engine.plan import BranchToken
from engine.scheduler import Scheduler
from engine.sequence import Progresses
from node import events as ev
from node.handing_over import GIVEN_UP, Due, Handover, Handovers
from node.identity import NodeIdentity, NodeLimits
from node.load import load_report, tell_speed
from node.pd_error import ENDS_WITHOUT_TOKEN, TOO_LATE, refusal
from node.sampling import to_logprobs_message
from node.steps import plan_ahead, saves_of
from node.timers import Timers, earliest
from node.timing import Computed
from node.token_batches import TokenBatches
from prefill_node import messages
from prefill_node.fetching import Fetching
from prefill_node.task import PrefillTask, Work, work_of
from prefill_node.tasks import Tasks
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey, attempt_key


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
        self._key_seed = key_seed
        self._tasks = Tasks(limits.max_attempts, limits.max_fences)
        self._not_started: dict[AttemptKey, None] = {}  # the scheduler's waiting queue, in its order
        self._timers: Timers[AttemptKey] = Timers()  # deadlines
        self._drain_deadline = inf
        self._is_over = False  # that deadline has passed
        self._has_said_drained = False
        self._out: list[ev.Action] = []
        self._handovers = Handovers(identity, limits, fingerprint, pool.block_size, self._out)
        self._fetching = Fetching(scheduler, pool, self._out, is_on=limits.reads_kv_pool)
        self._others_released: list[AttemptKey] = []

    # ------------------------------------------------------------ the four methods of a core, and their halves (PartOfCore)

    def receive(self, event: ev.Event, now: float) -> list[ev.Action]:
        """Take one event; see NodeCore."""
        self.take(event, now)
        return self._finish_turn(now)

    def take(self, event: ev.Event, now: float) -> None:
        """See PartOfCore."""
        match event:
            case ev.FromRouter(router, message):
                self._from_router(router, message, now)
            case ev.RouterLost(router):
                for task in self._tasks.of_router(router):
                    self._cancel(task, tuple(task.open), now)
            case ev.ReserveAnswered() | ev.RenewAnswered() | BlocksTaken() | Answered() | LinkClosed():
                self._do(self._handovers.take(event, now), now)
            case ev.PoolLooked() | ev.BlocksFetched():
                self._queue(self._fetching.take(event, now))
            case ev.DrainAsked(deadline):
                self._drain(deadline, now)
            case ev.StepDone(result):
                self.read(self._scheduler.complete(result), now)
            case ev.BlocksStaged(save_id):
                self._scheduler.saved(save_id)
            case _:
                self._out.append(ev.Count("unexpected_events"))  # a peer took us for a decode node

    def tick(self, now: float) -> list[ev.Action]:
        """Fire what is due; see NodeCore."""
        self.expire(now)
        return self._finish_turn(now)

    def _finish_turn(self, now: float) -> list[ev.Action]:
        """Alone over its scheduler, it plans for itself."""
        self._out += plan_ahead(self._scheduler)
        return [*self.settle(now), *saves_of(self._scheduler)]

    def expire(self, now: float) -> None:
        """See PartOfCore."""
        self._tasks.fence.tick(now)
        for key in self._timers.pop_due(now):
            self._too_late(self._tasks[key], now)
        self._do(self._handovers.expire(now), now)
        self._queue(self._fetching.expire(now))
        if now >= self._drain_deadline and not self._is_over:
            self._is_over = True
            self._give_back([task for task in self._tasks if task.handover.state not in GIVEN_UP], now)

    def next_deadline(self) -> float | None:
        """See NodeCore."""
        until = None if self._is_over or self._drain_deadline == inf else self._drain_deadline
        return earliest(
            until,
            self._timers.next(),
            self._handovers.next_deadline(),
            self._fetching.next_deadline(),
            self._tasks.fence.next_expiry(),
        )

    def snapshot(self) -> Mapping[str, object]:
        """See NodeCore."""
        return {
            "attempts": len(self._tasks),
            "attempts_by_state": dict(Counter(task.handover.state.name for task in self._tasks)),
            "reserves_unanswered": self._handovers.num_asked,
            "links": self._handovers.num_links,
            "fences": len(self._tasks.fence),
            **self._fetching.snapshot(),
            "scheduler": self._scheduler.snapshot(),
        }

    def load(self) -> pb.LoadReport:
        """See NodeCore."""
        report = load_report(self._scheduler, self._pool)
        self.tell_speed(report)
        return report

    def tell_speed(self, report: pb.LoadReport) -> None:
        """Add how fast this node computes prompts, and fetches them."""
        tell_speed(report, self._fetching.cost.speed(), self._scheduler.num_prompt_tokens)

    def hold_back(self, is_held_up: bool) -> None:
        """Whether no blocks are to be taken to read the KV pool into, because somebody who was here before does not find room."""
        self._fetching.is_held_up = is_held_up

    def hold(self, router: ev.RouterId, dispatch: pb.Dispatch, now: float) -> bool:
        """Whether somebody else's prompt waits for blocks out of the KV pool; then `take_released` names its first branch."""
        if not self._limits.reads_kv_pool:
            return False
        work = work_of(router, dispatch, self._key_seed, self._pool.block_size, now)
        return self._hold(work, now)

    def has(self, key: AttemptKey) -> bool:
        """Whether an attempt is this core's, or waits here for blocks out of the KV pool for somebody else."""
        return key in self._fetching or key in self._tasks

    def drop(self, key: AttemptKey) -> None:
        """Nobody wants it any more."""
        self._fetching.drop(key)

    def take_released(self) -> list[AttemptKey]:
        """Those of somebody else that have waited, once each."""
        released, self._others_released = self._others_released, []
        return released

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
        if self._handovers.is_asked(work.key) or self._scheduler.knows(work.key) or self._tasks.is_stale(work):
            self._out.append(ev.Count("stale_refused"))
            return
        if self._drain_deadline < inf:
            self._refuse(work, pb.DRAINING, "the node is to end")
            return
        if (lack := self._tasks.lack(work)) is not None:
            self._refuse(work, pb.BUSY, lack)
            return
        for key in work.keys:
            self._tasks.fence.begin(key, work.deadline)
            self._end_below(key, now)
        offer = messages.offer_of(work, self._limits.reserve_wait_s)
        self._tasks.add(PrefillTask(work, Handover(offer), Computed(now)))
        self._timers.set(work.key, work.deadline)
        if not self._hold(work, now):
            self._queue((work.key,))

    def _hold(self, work: Work, now: float) -> bool:
        matchable, goes_on = work.matchable_keys(self._pool.block_size), bool(work.generated_token_ids)
        return self._fetching.hold(work.key, matchable, now, goes_on=goes_on)

    def _queue(self, keys: Iterable[AttemptKey]) -> None:
        """Have them computed, with what the prefix cache holds by then."""
        for key in keys:
            if key in self._tasks:
                self._not_started[key] = None
                self._scheduler.submit(self._tasks[key].work.to_spec())
            else:
                self._others_released.append(key)

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

    # ------------------------------------------------------------ steps and timers

    def read(self, progress: Progresses, now: float) -> None:
        """See PartOfCore."""
        self._fetching.cost.read(self._scheduler.num_prompt_tokens, now)
        if not len(self._tasks):
            return  # nothing of it is this role's: a mixed node decodes
        batches = TokenBatches(from_receiver=False)
        advanced: list[PrefillTask] = []
        for item in progress.others:  # a prompt's chunk is never one token and nothing else
            task = self._tasks.get(item.sequence_id)
            if task is None or task.handover.state in GIVEN_UP:
                continue
            if item.finish in ("broken", "stalled", "barred"):
                self._report(task, self._handovers.error(*ENDS_WITHOUT_TOKEN[item.finish]))
                self._step(task, SenderEvent.CANCEL, now)
                continue
            task.num_computed = item.num_computed
            task.prompt_logprobs += map(to_logprobs_message, item.prompt_logprobs)
            if item.token_id is not None:
                own = BranchToken(item.token_id, item.logprobs)
                task.first_tokens = dict(zip(task.work.keys, (own, *item.branch_tokens), strict=True))
                self._say_first_tokens(task, batches, now, item.num_cached)
            else:
                task.times.chunk_computed(now)
            advanced.append(task)
        self._out += batches.to_actions()
        for task in advanced:
            if task.open:
                self._write_computed(task, now)
            else:
                self._step(task, SenderEvent.WITHDRAW, now)

    def _say_first_tokens(self, task: PrefillTask, batches: TokenBatches, now: float, num_cached: int) -> None:
        """Of every branch that is open; one that ends with it is closed."""
        work = task.work
        for key in list(task.open):
            token_id, logprobs = task.first_tokens[key]
            finish = work.finish_of(token_id)
            first_index = len(work.generated_token_ids)
            batches.add(work.router, key, first_index, [token_id], finish, logprobs, task.prompt_logprobs)
            batches.time(task.times.first_token(key, now, num_cached))
            if finish is not None:
                self._tasks.close(task, key, "finished")

    def _write_computed(self, task: PrefillTask, now: float) -> None:
        """Queue every block that is complete by now; the partial last one only behind the last chunk (H01)."""
        if task.handover.state is not SenderState.WRITING:
            return
        blocks = task.blocks_to_write(self._scheduler.block_ids(task.work.key), self._pool.block_size)
        if blocks:
            self._handovers.write(task.handover, blocks)
        if task.first_tokens:
            self._step(task, SenderEvent.ALL_WRITTEN, now)

    def _too_late(self, task: PrefillTask, now: float) -> None:
        """The request's deadline has passed."""
        if task.handover.state in GIVEN_UP:
            return
        if task.handover.state is not SenderState.COMMITTING:  # after Commit the receiver says so
            self._report(task, self._handovers.error(pb.DEADLINE, TOO_LATE))
        self._step(task, SenderEvent.CANCEL, now)

    def settle(self, now: float) -> list[ev.Action]:
        """Ask for leases for what the plans begin, hand out the turn's actions; see PartOfCore."""
        while (key := next(iter(self._not_started), None)) is not None and self._scheduler.block_ids(key):
            del self._not_started[key]
            self._tasks[key].times.begun_at = now
            if not self._tasks[key].work.ends_with_first_token:
                self._step(self._tasks[key], SenderEvent.START, now)
        self._fetching.cost.turned(self._scheduler.steps_in_flight > 0, now)
        if self._drain_deadline < inf and not self._has_said_drained and self._is_empty():
            self._has_said_drained = True
            self._out.append(ev.Drained())
        out = [*self._out]
        self._out.clear()
        return out

    # ------------------------------------------------------------ the node is to end

    def _is_empty(self) -> bool:
        # What was cancelled is in the scheduler until the step that computes it has been read.
        return not (len(self._tasks) or self._handovers.num_asked or self._scheduler.has_sequences)

    def _drain(self, deadline: float, now: float) -> None:
        """Take nothing new, give back what is not begun; the rest goes on until it is taken or refused, or the deadline (H15)."""
        self._drain_deadline = min(deadline, self._drain_deadline)
        ours = [key for key in self._fetching.held if key in self._tasks]
        self._give_back([self._tasks[key] for key in (*ours, *self._not_started)], now)

    def _give_back(self, tasks: Iterable[PrefillTask], now: float) -> None:
        for task in tasks:
            if task.handover.state is not SenderState.COMMITTING:  # after Commit the receiver says what becomes of it
                self._report(task, self._handovers.error(pb.DRAINING, "the node is to end"))
            self._step(task, SenderEvent.CANCEL, now)

    # ------------------------------------------------------------ the handoff

    def _step(self, task: PrefillTask, event: SenderEvent, now: float) -> None:
        self._do(self._handovers.step(task.handover, event, now), now)

    def _do(self, dues: Iterable[Due], now: float) -> None:
        """What a handover's machine leaves to this role."""
        for due in dues:
            key = due.handover.key
            match due.action:
                case SenderAction.START_WRITING:
                    self._write_computed(self._tasks[key], now)
                case SenderAction.SEND_COMMIT:
                    self._handovers.send_commit(due.handover, messages.commit(self._tasks[key], now))
                case SenderAction.STOP_COMPUTING:
                    self._not_started.pop(key, None)
                    self._fetching.drop(key)
                    self._scheduler.abort(key)
                case SenderAction.DROP_BLOCKS:
                    self._forget(self._tasks[key], now)
                case SenderAction.REPORT | SenderAction.REPORT_UNANSWERED:
                    error = due.certain_error
                    error.commit_unanswered = due.action is SenderAction.REPORT_UNANSWERED
                    self._report(self._tasks[key], error)

    def _forget(self, task: PrefillTask, now: float) -> None:
        key = task.work.key
        self._scheduler.release(key)
        self._timers.set(key, None)
        outcome = "committed" if task.handover.state is SenderState.DONE else "cancelled"
        self._out += self._tasks.forget(task, outcome, now)

    def _report(self, task: PrefillTask, error: pb.PDError) -> None:
        self._out += [ev.ToRouter(task.work.router, message) for message in self._tasks.close_with(task, error)]
