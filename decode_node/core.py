"""What a decode node decides: which attempts get blocks, when they become sequences, which tokens go to whom.

Pure: events and times in, actions out (node/events.py). The legal order of a handoff is connector/handoff.py; room is
decode_node/admission.py; which rows a step computes is engine/scheduler.py.

    Reserve -> lease (blocks leased, a slot reserved), at once or from the line (decode_node/door.py)
    every block landed, Commit -> sequence (decode_node/receiving.py)
    Dispatch to itself -> sequence (decode_node/local_prompts.py), where the node computes prompts too
    each step -> one batch per router (decode_node/running.py)
    drain, or too few blocks -> sequence and KV go to another node (decode_node/mover.py)

Who waits in the scheduler's queue, for its prompt to be computed here, goes before who asks for a lease: were leases given while
the head of the queue finds no room, ever new ones could take what it waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf

from connector.fence import FenceFloor
from connector.transport import (
    Answered,
    BlocksLanded,
    BlocksTaken,
    LinkClosed,
    NotifyArrived,
    RevokeDone,
    WriteRefused,
)
from decode_node import admission
from decode_node.door import Door
from decode_node.lease import router_of
from decode_node.local_prompts import LocalPrompts
from decode_node.mover import Mover
from decode_node.receiving import Receiving
from decode_node.running import RunningBranches
from engine.block_pool import BlockPool
from engine.scheduler import Scheduler
from engine.sequence import Progresses
from node import events as ev
from node.handing_over import Handovers
from node.identity import NodeIdentity, NodeLimits
from node.load import load_report
from node.steps import StepsAhead, saves_of
from node.timers import earliest
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey, attempt_key, attempt_keys

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
        self._fence = FenceFloor(limits.max_fences)
        self._handovers = Handovers(identity, limits, fingerprint, pool.block_size, [], tag="m")
        mover = Mover(self._handovers, scheduler, key_seed, pool.block_size, limits.preempt_move_s)
        self._running = RunningBranches(identity, self._fence, mover)
        self._local = LocalPrompts(identity, limits, scheduler, pool, key_seed, self._fence, self._running)
        self._steps = StepsAhead(scheduler)
        self._receiving = Receiving(identity, limits, scheduler, pool, key_seed, self._fence, self._running)
        self._leases = self._receiving.leases
        self._door = Door(identity, limits, scheduler, pool, self._fence, self._leases, draw)
        self._drain_deadline = inf
        self._has_said_drained = False
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
                self._out.append(ev.AnswerRenew(call_id, self._receiving.renew(request, now)))
            case ev.ReleaseAsked(request):
                self._release(request, now)
            case BlocksLanded() | WriteRefused() | NotifyArrived() | RevokeDone():
                self._receiving.take(event, now)
            case ev.StepDone(result):
                self.read(self._scheduler.complete(result), now)
            case ev.BlocksStaged(save_id):
                self._scheduler.saved(save_id)
            case ev.FromRouter(_, message) if message.WhichOneof("kind") == "cancel":
                self._cancel(message.cancel, now)
            case ev.FromRouter(router, message) if message.WhichOneof("kind") == "dispatch":
                self._end_below(self._local.start(router, message.dispatch, self.holds, now), now)
            case ev.FromRouter(_, message) if message.WhichOneof("kind") == "move":
                self._running.move(message.move, now)
            case ev.ReserveAnswered() | ev.RenewAnswered() | BlocksTaken() | Answered() | LinkClosed():
                self._running.take(event, now)
            case ev.RouterLost(router):
                self._router_lost(router, now)
            case ev.DrainAsked(deadline):
                self._drain(deadline, now)
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
        return [*steps, *self.settle(now), *saves_of(self._scheduler)]

    def expire(self, now: float) -> None:
        """See PartOfCore."""
        self._fence.tick(now)
        self._receiving.expire(now)
        self._running.expire(now)
        for waiting in [each for each in self._door.line if each.until <= now]:
            self._door.expire(waiting, now)

    def next_deadline(self) -> float | None:
        """See NodeCore."""
        return earliest(
            self._receiving.next_deadline(),
            self._running.next_deadline(),
            self._fence.next_expiry(),
            self._door.next_expiry(),
        )

    def snapshot(self) -> Mapping[str, object]:
        """See NodeCore."""
        return {
            "leases": len(self._leases),
            "leases_by_state": self._leases.states(),
            "blocks_of_leases": self._leases.num_blocks(),
            **self._running.snapshot(),
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

    def refuse_who(self, is_elsewhere: Callable[[AttemptKey], bool]) -> None:
        """Give no lease to an attempt that another core of this node has, and the scheduler does not know yet."""
        self._door.is_elsewhere = is_elsewhere

    def sends(self, event: ev.Event) -> bool:
        """Whether it is the answer to a handoff of a sequence that moves."""
        return self._handovers.is_mine(event)

    def hold_back(self, is_held_up: bool) -> None:
        """Whether no lease is to be given now, because somebody who was here before does not find room."""
        self._door.is_held_up = is_held_up

    @property
    def has_line(self) -> bool:
        """Whether anybody waits here for room for a lease."""
        return len(self._door.line) > 0

    # ------------------------------------------------------------ Reserve, Renew, Release

    def _reserve(self, call_id: int, request: pb.ReserveRequest, now: float) -> None:
        keys = attempt_keys(request)
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
            self._receiving.begin(lease, now)

    def _release(self, request: pb.ReleaseRequest, now: float) -> None:
        keys = attempt_keys(request)
        if not any(map(self._fence.admits, keys)):  # each has ended here, or a newer one has been here since
            self._out.append(ev.Count("stale_refused"))
        for key in keys:
            self._fence.end(key, now + request.ms_left / 1000, now)
            lease = self._leases.of_any((key,))
            if (waiting := self._door.line.find(key)) is not None:
                self._door.close(waiting, key, now)
            if lease is not None:
                self._receiving.release(lease, now)
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
            self._receiving.close(lease, older, "cancelled", now)
        self._running.end_older(floors, now)

    def _router_lost(self, router: ev.RouterId, now: float) -> None:
        for waiting in [w for w in self._door.line if router_of(w.request) == router]:
            for key in list(waiting.open):
                self._door.close(waiting, key, now)
        for lease in self._leases.of_router(router):
            self._receiving.cancel(lease, now)
        self._running.end_of_router(router, now)

    # ------------------------------------------------------------ steps and timers

    def read(self, progress: Progresses, now: float) -> None:
        """See PartOfCore."""
        self._running.read(progress, now)

    def settle(self, now: float) -> list[ev.Action]:
        """Let in who waits and fits, hand out the turn's actions; see PartOfCore."""
        for lease in self._door.serve(now):
            self._receiving.begin(lease, now)
        self._running.settle(now)
        self._local.settle(now)
        if now >= self._drain_deadline:
            for lease in self._leases.not_over():
                self._receiving.drain(lease, now)
        outs = (self._out, self._local.out, self._receiving.out, self._running.out, self._door.out)
        out = [action for each in outs for action in each]
        for each in outs:
            each.clear()
        if self._drain_deadline < inf and not self._has_said_drained and self._is_empty():
            self._has_said_drained = True
            out.append(ev.Drained())
        return out

    # ------------------------------------------------------------ the node is to end

    def _drain(self, deadline: float, now: float) -> None:
        """Nothing new comes in; leases may still become sequences, and all that runs goes elsewhere, until the deadline."""
        self._drain_deadline = min(deadline, self._drain_deadline)
        self._door.drain(now)
        self._local.drain(now)
        self._running.drain(deadline)

    def _is_empty(self) -> bool:
        has_work = self._leases.has_blocks or len(self._door.line) or self._scheduler.has_sequences
        return not has_work and self._running.is_quiet
