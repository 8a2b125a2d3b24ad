"""A node process in the simulation: the production core, scheduler, pool, transport and runner, and a shell without asyncio.

The shell is node/loop.py (tick, then one event, then its actions in order), node/routers.py, node/service.py and
node/handoff_client.py in short. Everything that the core hears goes through one inbox, as there.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from google.protobuf.message import Message

from connector.memory_transport import MemoryHub, MemoryTransport
from connector.transport import BlocksTaken, LinkClosed, ReceiverEvent, RevokeDone, SenderEvent
from engine.block_pool import BlockState
from engine.plan import BROKEN_ROW, StepResult
from node import events as ev
from node.handoff_client import RELEASE_BACKOFF_S, RELEASE_TIMEOUT_S, RELEASE_TRIES
from node.identity import NodeIdentity
from node.pd_error import pd_error
from node.validate import (
    Bounds,
    cancel_problem,
    dispatch_problem,
    move_problem,
    release_problem,
    renew_problem,
    reserve_problem,
)
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey, attempt_key, attempt_keys
from runtime.session import Peer
from tests.sim.calls import Answer, Calls
from tests.sim.engines import Life, build_parts, prefills_locally
from tests.sim.fence_model import FenceModel
from tests.sim.kernel import Kernel, Process
from tests.sim.kv_pool import SimKvPool
from tests.sim.runner import SimRunner
from tests.sim.scenario import VOCAB_SIZE, Knobs
from tests.sim.sessions import Listener
from tests.sim.trace import describe_action, describe_event


class Blames(Protocol):
    """What is known of faults: faults.py."""

    def excuses(self, hosts: frozenset[str]) -> bool:
        """Whether a fault is felt that excuses what needs all of these hosts."""

    def struck(self, hosts: frozenset[str]) -> None:
        """A fault has just hurt something of these hosts."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a node process finds around it."""

    kernel: Kernel
    hub: MemoryHub
    calls: Calls
    kv_pool: SimKvPool
    knobs: Knobs
    moment: Callable[[str, str], None]  # what has just happened, and at which host: faults may wait for it
    look: Callable[[], None]  # at the links
    blames: Blames
    computes: Callable[[AttemptKey, int], None]  # a node feeds the token at this position of this attempt's sequence


class SimNode(Process):
    """One process; a restarted node is another one."""

    def __init__(self, around: Surroundings, host: str, generation: int, address: str, rate: float, life: Life) -> None:
        super().__init__(around.kernel, host, generation, rate)
        self._around = around
        knobs = around.knobs
        self.rng: random.Random = around.kernel.rng(f"node {self.label}")
        self.role, self.model = life.role, life.model
        self.address = address
        self.identity = NodeIdentity(life.name, self.rng.getrandbits(63) + 1)
        self.started_ms = 1 + int(around.kernel.now * 1000)
        self.parts = parts = build_parts(life, self.identity, knobs, self.rng)
        self.limits, self.pool, self.scheduler = parts.limits, parts.pool, parts.scheduler
        self.memory, self.core = parts.memory, parts.core
        self.transport = MemoryTransport(self.memory, host, around.hub, self._emitted)
        self.listener = Listener(self, Peer(*self._peer()), self, self.core.load, self._tell)
        self.is_registering = True
        self.is_draining = False
        self.has_drained = False
        self.leases: dict[int, tuple[int, ...]] = {}  # not yet quiet: block ids, -1 for what nobody writes
        self.num_held: dict[int, int] = {}  # of those, blocks that the node had already
        self.reading: dict[tuple[str, int], deque[int]] = {}  # blocks that a link will read, by link and lease
        self.num_slots = knobs.num_slots
        self.is_busy = False
        self.is_changed = True  # since the invariants of the core were looked at
        self._is_heard = True  # since the core was asked for its deadline
        self._core_deadline: float | None = None
        engine = (self.scheduler, self.pool, self.memory, parts.runner)
        self.runner = SimRunner(self, engine, knobs, self.rng, self._step_done, around.computes)
        self.prefills_locally = prefills_locally(self.role, knobs)
        itself = self.identity.to_proto() if self.prefills_locally else None
        self._bounds = Bounds(self.role, VOCAB_SIZE, knobs.max_model_len, itself)
        self._inbox: deque[ev.Event] = deque()
        self.unanswered: dict[int, Answer] = {}  # calls of others
        self._num_calls = 0
        self._fences = FenceModel()
        self._asked: dict[int, tuple[AttemptKey, ...]] = {}  # by call: what a lease is asked for

    def _peer(self) -> tuple[str, int]:
        return self.identity.name, self.identity.incarnation

    def entry(self) -> pb.NodeEntry:
        """What the routers are told."""
        knobs = self._around.knobs
        return pb.NodeEntry(
            node=self.identity.to_proto(),
            role=self.role,
            grpc_address=self.address,
            http_address=f"{self.host}:80",
            fingerprint=self.model.fingerprint,
            num_blocks=knobs.num_blocks,
            max_num_seqs=knobs.num_slots,
            max_model_len=knobs.max_model_len,
            started_ms=self.started_ms,
            draining=self.is_draining,
            local_prefill=self.prefills_locally,
        )

    def _tell(self, what: str, why: str) -> None:
        if what == "session up":
            self._around.moment(what, self.host)
        self.kernel.tell(self.label, what, why)

    # ---------------------------------------------------------------- Process

    def next_deadline(self) -> float | None:
        """Of the core and of every session."""
        due = [at for at in (self.core_deadline(), self.listener.next_deadline()) if at is not None]
        return min(due, default=None)

    def core_deadline(self) -> float | None:
        """The core's, which only an event or a tick changes."""
        if self._is_heard:
            self._core_deadline, self._is_heard = self.core.next_deadline(), False
        return self._core_deadline

    def on_alarm(self) -> None:
        """Tick what is due."""
        self.listener.tick()
        self._tick_if_due()

    # ---------------------------------------------------------------- the loop

    def post(self, event: ev.Event) -> None:
        """To the core, behind everything that was posted before."""
        self._inbox.append(event)
        if len(self._inbox) == 1:
            self.kernel.after(0.0, self._turn, self)

    def _emitted(self, event: SenderEvent | ReceiverEvent) -> None:
        match event:
            case RevokeDone(lease_id):
                del self.leases[lease_id], self.num_held[lease_id]
            case BlocksTaken(link_id, lease_id, block_indices):
                for _ in block_indices:
                    self.reading[link_id, lease_id].popleft()
            case LinkClosed(link_id):
                self.reading = {name: blocks for name, blocks in self.reading.items() if name[0] != link_id}
        if self.is_alive:
            self.post(event)

    def _tick_if_due(self) -> None:
        now = self.clock()
        if (due := self.core_deadline()) is not None and due <= now:
            self.is_changed = self._is_heard = True
            self._perform(self.core.tick(now))

    def _turn(self) -> None:
        event = self._inbox.popleft()
        if self._inbox:
            self.kernel.after(0.0, self._turn, self)
        self._tick_if_due()
        if self.kernel.trace is not None:
            self._tell(*describe_event(event))
        if isinstance(event, ev.StepDone):
            self.runner.read()
        self._note_fences(event)
        self.is_changed = self._is_heard = True
        self._perform(self.core.receive(event, self.clock()))

    def _note_fences(self, event: ev.Event) -> None:
        match event:
            case ev.FromRouter(_, message) if message.WhichOneof("kind") == "cancel":
                self._fences.end([attempt_key(message.cancel.key)], self.clock())
            case ev.ReleaseAsked(request):
                self._fences.end(attempt_keys(request), self.clock())
            case ev.ReserveAsked(call_id, request):
                self._asked[call_id] = attempt_keys(request)

    def _perform(self, actions: Sequence[ev.Action]) -> None:
        touches_links = False
        for action in actions:
            if not self.is_alive:
                return
            if self.kernel.trace is not None and (line := describe_action(action)) is not None:
                self._tell(*line)
            match action:
                case ev.ToRouter(router, message):
                    self.listener.send(Peer(router.name, router.incarnation), message)
                    if message.WhichOneof("kind") != "cache":
                        self._around.moment("tokens", self.host)
                case ev.RunStep(plan):
                    self.runner.submit(plan)
                case ev.SendReserve() | ev.SendRenew() | ev.SendRelease():
                    self._call(action)
                case ev.AnswerReserve(call_id, reply):
                    self._answer_reserve(call_id, reply)
                case ev.AnswerRenew(call_id, answer):
                    self.unanswered.pop(call_id)(answer)
                case ev.Count(name, amount):
                    for _ in range(amount):
                        self.kernel.count(name)
                case ev.Ended(_, outcome):
                    self.kernel.count(f"ended:{outcome}")
                case ev.Drained():
                    assert self.is_draining and not self.has_drained, f"{self.label} has drained twice, or unasked"
                    self.has_drained = True
                case _:
                    touches_links = True
                    self._move_kv(action)
        if touches_links:
            self._around.look()

    def _move_kv(self, action: ev.Action) -> None:
        match action:
            case ev.OpenLink(link_id, endpoints):
                self.transport.open(link_id, endpoints[0])
            case ev.WriteBlocks(link_id, lease, blocks):
                if self._around.hub.find_open(self.transport.link_key(link_id)) is not None:
                    source = (block_id for _, block_id in blocks)
                    self.reading.setdefault((link_id, lease.lease_id), deque()).extend(source)
                self.transport.write(link_id, lease, blocks)
                self._around.moment("write", self.host)
            case ev.NotifyLink(link_id, message):
                self.transport.notify(link_id, message.SerializeToString())
                self._around.moment("commit", self.host)
            case ev.DropWrites(link_id, lease):
                self.transport.drop(link_id, lease)
            case ev.CloseLink(link_id):
                self.transport.close(link_id)
            case ev.AdmitLease(lease_id, secret, block_ids):
                self.leases[lease_id] = block_ids
                self.transport.admit(lease_id, secret, block_ids)
            case ev.RevokeLease(lease_id):
                self.transport.revoke(lease_id)
            case ev.AnswerCommit(reply_to, message):
                self.transport.answer(reply_to, message.SerializeToString())
                self._around.moment("activate", self.host)
            case ev.SaveBlocks() | ev.TakeOutBlocks() | ev.LookInPool() | ev.FetchBlocks():
                self._around.kv_pool.ask(self, action)

    # ---------------------------------------------------------------- the runner

    def _step_done(self, result: StepResult) -> None:
        self._around.moment("step", self.host)
        if BROKEN_ROW in result.token_ids:
            self._around.blames.struck(frozenset((self.host,)))
        self.post(ev.StepDone(result))

    def block_states(self) -> tuple[BlockState, ...]:
        """Of every block."""
        states: tuple[BlockState, ...] = self.pool.snapshot()["states"]  # type: ignore[assignment]
        return states

    def admitted_blocks(self) -> set[int]:
        """Blocks that some lease may be written into."""
        return {block_id for block_ids in self.leases.values() for block_id in block_ids if block_id >= 0}

    # ---------------------------------------------------------------- NodeHears: what node/routers.py does

    def on_message(self, router: Peer, message: pb.RouterMessage) -> None:
        """Check it, and hand it to the core."""
        match message.WhichOneof("kind"):
            case "dispatch":
                problem = dispatch_problem(message.dispatch, self._bounds)
                self._around.moment("dispatch", self.host)
            case "move":
                problem = move_problem(message.move, self._bounds)
                self._around.moment("move", self.host)
            case "cache":
                problem = None
            case _:
                problem = cancel_problem(message.cancel)
        assert problem is None, f"{router.name} said what {self.label} cannot act on: {problem}"
        self.post(ev.FromRouter(ev.RouterId(*router), message))

    def on_lost(self, router: Peer) -> None:
        """Tell the core."""
        self.post(ev.RouterLost(ev.RouterId(*router)))

    # ---------------------------------------------------------------- calls: node/handoff_client.py, node/service.py

    @property
    def num_events_waiting(self) -> int:
        """Events that the core has not heard yet."""
        return len(self._inbox)

    def _call(self, action: ev.SendReserve | ev.SendRenew | ev.SendRelease) -> None:
        host = action.address.partition(":")[0]
        match action:
            case ev.SendReserve(key, _, request, timeout_s):
                self._around.calls.call(
                    self,
                    host,
                    request,
                    SimNode.serve_reserve,
                    lambda reply: self.post(ev.ReserveAnswered(key, reply)),
                    timeout_s=timeout_s,
                    waits=True,
                )
            case ev.SendRenew(key, _, renewal, timeout_s):
                self._around.calls.call(
                    self,
                    host,
                    renewal,
                    SimNode.serve_renew,
                    lambda reply: self.post(ev.RenewAnswered(key, reply)),
                    timeout_s=timeout_s,
                    waits=True,
                )
            case ev.SendRelease(_, release):
                self._release(host, release, self.clock() + release.ms_left / 1000, 0)

    def _release(self, host: str, request: pb.ReleaseRequest, deadline: float, attempt: int) -> None:
        request = pb.ReleaseRequest.FromString(request.SerializeToString())
        request.ms_left = max(0, int((deadline - self.clock()) * 1000))

        def outcome(reply: pb.ReleaseReply | None) -> None:
            pause_s = RELEASE_BACKOFF_S * 2**attempt
            if reply is None and attempt + 1 < RELEASE_TRIES and self.clock() + pause_s < deadline:
                again = lambda: self._release(host, request, deadline, attempt + 1)  # noqa: E731
                self.kernel.after(self.seconds(pause_s), again, self)

        self._around.calls.call(self, host, request, SimNode.serve_release, outcome, timeout_s=RELEASE_TIMEOUT_S)

    def serve_reserve(self, message: Message, answer: Answer) -> None:
        """As NodeService.Reserve."""
        assert isinstance(message, pb.ReserveRequest)
        self._around.moment("reserve", self.host)
        refusal: tuple[pb.ErrorCode.ValueType, str] | None = None
        if message.to_incarnation != self.identity.incarnation:
            refusal = (pb.TRANSFER_FAILED, "Reserve is meant for an earlier process at this address")
            self.kernel.count("wrong_incarnation")
        elif problem := reserve_problem(message, self._bounds):
            raise AssertionError(f"{self.label} was asked for an unsound lease: {problem}")
        elif not self.listener.knows(Peer(message.router.name, message.router.incarnation)):
            refusal = (pb.BUSY, "there is no session with the attempt's router")
        if refusal is not None:
            error = pd_error(*refusal, attempt_key(message.key), self.identity.name)
            answer(pb.ReserveReply(error=error))
            return
        self.post(ev.ReserveAsked(self._remember(answer), message))

    def _answer_reserve(self, call_id: int, reply: pb.ReserveReply) -> None:
        keys = self._asked.pop(call_id)
        completed = pb.ReserveReply.FromString(reply.SerializeToString())
        if reply.WhichOneof("result") == "lease":
            completed.lease.endpoints.append(self.transport.endpoint())
            self.num_held[reply.lease.lease_id] = reply.lease.num_blocks_held
            self._around.moment("lease", self.host)
            is_stale = self._fences.forbids(keys, self.clock())
            assert not is_stale, f"{self.label}: a lease for {keys[0]}, which was cancelled or released here"
        self.unanswered.pop(call_id)(completed)

    def serve_renew(self, message: Message, answer: Answer) -> None:
        """As NodeService.Renew."""
        assert isinstance(message, pb.RenewRequest)
        if message.to_incarnation != self.identity.incarnation:
            answer(pb.RenewReply(life_ms=0))
            return
        assert renew_problem(message, self._bounds) is None
        self.post(ev.RenewAsked(self._remember(answer), message))

    def serve_release(self, message: Message, answer: Answer) -> None:
        """As NodeService.Release."""
        assert isinstance(message, pb.ReleaseRequest)
        if message.to_incarnation == self.identity.incarnation:
            assert release_problem(message, self._bounds) is None
            self.post(ev.ReleaseAsked(message))
        answer(pb.ReleaseReply())

    def _remember(self, answer: Answer) -> int:
        self._num_calls += 1
        self.unanswered[self._num_calls] = answer
        return self._num_calls
