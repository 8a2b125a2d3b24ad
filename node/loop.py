"""The loop of a node: one task that owns the core, and with it scheduler, block pool, prefix cache and leases.

    Session, Reserve, … --+                                 +--> ToRouter, AnswerReserve, …
    transport's threads --+--> inbox --> tick, receive --> actions, in order
    runner's thread ------+      ^          |               +--> RunStep, WriteBlocks, …
    KV pool's threads ----+      +- timer <-+ next_deadline()

For every event: first `tick(now)` where something is due, so that what expired before the event came has expired when it is
judged; then `receive(event, now)`. One timer stands for the core's next deadline, so everything that expires does so with no new
work arriving. Not here: any decision, and any state of a request beyond the handles that actions name.

An exception out of the core, or out of performing an action, is a bug: it ends `run`, and the process with it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, assert_never

from connector.choosing import ChoosingTransport
from engine.plan import Plan
from node import events as ev
from node.handoff_client import HandoffClient
from node.inbox import Inbox
from node.measures import Measures
from node.metrics import Counters
from node.spans import AttemptSpans
from node.watch import Watch
from proto import baton_pb2 as pb
from runtime.alarm import Alarm
from runtime.logs import log_event

LOG = logging.getLogger(__name__)

MAX_EVENTS_AT_ONCE: Final = 256  # before sessions, HTTP and timers get a turn


class StepQueue(Protocol):
    """Takes plans for the runner (node/runner_thread.py)."""

    def submit(self, plan: Plan) -> None:
        """Run this plan behind all earlier ones."""


class RouterSessions(Protocol):
    """Sends to routers (node/service.py)."""

    def send(self, router: ev.RouterId, message: pb.NodeMessage) -> None:
        """Queue a message on the router's session; dropped if that is lost."""


class Calls(Protocol):
    """Answers the handoff calls of other nodes (node/service.py)."""

    def answer_reserve(self, call_id: int, reply: pb.ReserveReply) -> None:
        """Answer a ReserveAsked."""

    def answer_renew(self, call_id: int, reply: pb.RenewReply) -> None:
        """Answer a RenewAsked."""


class KvPool(Protocol):
    """Stores blocks in the cluster's KV pool and reads them there (node/kv_pool.py); calls are answered by one event each."""

    def save(self, action: ev.SaveBlocks) -> None:
        """BlocksStaged answers."""

    def take_out(self, action: ev.TakeOutBlocks) -> None:
        """Nothing answers."""

    def look(self, action: ev.LookInPool) -> None:
        """PoolLooked answers."""

    def fetch(self, action: ev.FetchBlocks) -> None:
        """BlocksFetched answers."""

    def snapshot(self) -> Mapping[str, object]:
        """JSON-able."""


class NoKvPool:
    """Where no pool is configured: takes nothing, has nothing."""

    def __init__(self, post: Callable[[ev.Event], None]) -> None:
        self._post = post

    def save(self, action: ev.SaveBlocks) -> None:
        """See KvPool."""
        self._post(ev.BlocksStaged(action.save_id, 0))

    def take_out(self, action: ev.TakeOutBlocks) -> None:
        """See KvPool."""

    def look(self, action: ev.LookInPool) -> None:
        """See KvPool."""
        self._post(ev.PoolLooked(action.look_id, 0))

    def fetch(self, action: ev.FetchBlocks) -> None:
        """See KvPool."""
        self._post(ev.BlocksFetched(action.fetch_id, 0, 0.0))

    def snapshot(self) -> Mapping[str, object]:
        """See KvPool."""
        return {}


@dataclass(frozen=True, slots=True)
class Outlets:
    """Where the core's actions go."""

    runner: StepQueue
    transport: ChoosingTransport
    routers: RouterSessions
    calls: Calls
    peers: HandoffClient
    kv_pool: KvPool
    counters: Counters
    measures: Measures
    drained: asyncio.Event  # set once the core has said that it is
    spans: AttemptSpans | None = None  # where a collector is told of attempts


class NodeLoop:
    """Drives one core."""

    def __init__(self, name: str, core: ev.NodeCore, inbox: Inbox, outlets: Outlets) -> None:
        self._name = name
        self._core = core
        self._inbox = inbox
        self._out = outlets
        self._watch = Watch(outlets.measures)
        self._loop = asyncio.get_running_loop()
        self._alarm = Alarm(self._loop, inbox.wake)
        self._due_at: float | None = float("-inf")  # the core's next deadline, which only a tick or an event changes

    async def run(self) -> None:
        """Feed events until cancelled."""
        try:
            while True:
                self._feed_all()
                self._alarm.arm(self._due_at)
                await self._inbox.wait()
        finally:
            self._alarm.cancel()

    def _feed_all(self) -> None:
        """Take what is there, a bounded lot of it; nothing, where a timer has fired."""
        spans = self._out.spans
        for _ in range(MAX_EVENTS_AT_ONCE):
            now = time.monotonic()  # the loop's clock, finer than some loops tell it
            if self._due_at is not None and now >= self._due_at:  # before that a tick does nothing
                self._perform(self._core.tick(now), now)
            if (event := self._inbox.take()) is not None:
                self._watch.received(event, now)
                if spans is not None:
                    spans.received(event)
                self._perform(self._core.receive(event, now), now)
            self._due_at = self._core.next_deadline()
            if self._inbox.is_empty:
                return  # what is due by now rings the alarm
        self._inbox.wake()

    def _perform(self, actions: Iterable[ev.Action], now: float) -> None:
        out = self._out
        for action in actions:
            self._watch.performed(action, now)
            if out.spans is not None:
                out.spans.performed(action)
            match action:
                case ev.ToRouter():
                    out.routers.send(action.router, action.message)
                case ev.RunStep():
                    out.runner.submit(action.plan)
                case ev.WriteBlocks():
                    out.transport.write(action.link_id, action.lease, action.blocks)
                case ev.SendReserve():
                    out.peers.reserve(action)
                case ev.SendRenew():
                    out.peers.renew(action)
                case ev.SendRelease():
                    out.peers.release(action)
                case ev.AnswerReserve():
                    out.calls.answer_reserve(action.call_id, self._with_endpoints(action.reply))
                case ev.AnswerRenew():
                    out.calls.answer_renew(action.call_id, action.reply)
                case ev.OpenLink():
                    out.transport.open(action.link_id, action.endpoints)
                case ev.NotifyLink():
                    out.transport.notify(action.link_id, action.message.SerializeToString())
                case ev.DropWrites():
                    out.transport.drop(action.link_id, action.lease)
                case ev.CloseLink():
                    out.transport.close(action.link_id)
                case ev.AdmitLease():
                    out.transport.admit(action.lease_id, action.secret, action.block_ids)
                case ev.RevokeLease():
                    out.transport.revoke(action.lease_id)
                case ev.AnswerCommit():
                    out.transport.answer(action.reply_to, action.message.SerializeToString())
                case ev.SaveBlocks():
                    out.kv_pool.save(action)
                case ev.TakeOutBlocks():
                    out.kv_pool.take_out(action)
                case ev.LookInPool():
                    out.kv_pool.look(action)
                case ev.FetchBlocks():
                    out.kv_pool.fetch(action)
                case ev.Count():
                    out.counters.count(action.name, action.amount)
                case ev.Ended():
                    self._log_end(action)
                case ev.Drained():
                    out.drained.set()
                case _:
                    assert_never(action)

    def _with_endpoints(self, reply: pb.ReserveReply) -> pb.ReserveReply:
        """The reply with where this node's transports listen in its lease; the core's message stays as it was."""
        if reply.WhichOneof("result") != "lease":
            return reply
        completed = pb.ReserveReply()
        completed.CopyFrom(reply)
        completed.lease.endpoints.extend(self._out.transport.endpoints())
        return completed

    def _log_end(self, ended: ev.Ended) -> None:
        key = ended.key
        log_event(
            LOG,
            logging.INFO,
            "attempt_ended",
            request=key.request_id,
            choice=key.choice,
            attempt=key.attempt,
            node=self._name,
            outcome=ended.outcome,
        )
