"""Everything of a node that goes with its incarnation: core, loop, sessions, transport, calls to and from other nodes.

    engine            inbox --> NodeLoop(core) --> transport, runner thread, gRPC client, sessions
      |                 ^
    (process)           +-- gRPC service, sessions, transport threads, runner thread, KV pool's threads

A process has one at a time, and a new one for each role that it takes: to everybody else a new process, so that nobody takes what
belonged to the old role for the new one's. What stays is the process's: model, KV memory, block pool with its prefix cache,
scheduler and slots, runner thread, KV pool's threads, ports, counters. Not here: those, and when a role ends (node/ending.py).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from connector.choosing import ChoosingTransport
from node.assembly import CoreParts, NodeEngine
from node.bugs import ThreadEnded, keep
from node.cache_feed import TellingCore
from node.config import NodeConfig
from node.ending import Ending
from node.events import Event, NodeCore
from node.grammar_gate import GrammarGate
from node.grammar_threads import GrammarThreads
from node.handoff_client import HandoffClient
from node.identity import NodeIdentity
from node.inbox import Inbox
from node.loop import KvPool, NodeLoop, Outlets
from node.measures import Measures
from node.metrics import Counters
from node.pool_book import PoolBook
from node.roles import ROLES, RoleName, find_leftover, prefills_locally, rules_of
from node.routers import Routers
from node.runner_thread import RunnerThread
from node.service import NodeService, PendingCalls
from node.spans import AttemptSpans
from node.validate import Bounds
from runtime.credentials import Credentials
from runtime.session import SessionTiming

MakeTransport = Callable[[NodeIdentity, Callable[[Event], None]], ChoosingTransport]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What of the process an incarnation uses, and leaves as it is."""

    config: NodeConfig
    credentials: Credentials
    engine: NodeEngine
    counters: Counters
    measures: Measures
    book: PoolBook
    ending: Ending
    make_transport: MakeTransport


@dataclass(frozen=True, slots=True)
class Threads:
    """The process's threads that every incarnation uses; they answer to the inbox of the one that is there."""

    runner: RunnerThread
    kv_pool: KvPool
    spans: AttemptSpans | None


@dataclass(frozen=True, slots=True)
class Incarnation:
    """Who the process is to others, and what it decides with."""

    role: RoleName
    identity: NodeIdentity
    started_ms: int  # by the clock; later than that of every earlier one
    core: TellingCore


def first_incarnation(
    role: RoleName, around: Surroundings, make_core: Callable[[CoreParts], NodeCore], now_ms: int
) -> Incarnation:
    """Of a process whose engine was built for this role; `now_ms` by the clock that all hosts share."""
    parts = around.engine.parts
    core = TellingCore(make_core(parts), parts.pool, book=around.book)
    return Incarnation(role, parts.identity, now_ms, core)


def next_incarnation(
    last: Running, role: RoleName, around: Surroundings, make_core: Callable[[CoreParts], NodeCore], now_ms: int
) -> Incarnation:
    """The one that follows `last`, which has been taken down. RuntimeError: something of that is left, a bug."""
    parts, before = around.engine.parts, last.incarnation
    left = last.find_leftover() or ("" if last.transport_has_ended else "a thread of the transport")
    if left:
        raise RuntimeError(f"{before.identity.name} cannot take the role {role}: {left} is left of the last one")
    before.core.forget_listeners()
    rules = rules_of(role, around.config)
    parts.scheduler.take_role(rules.resumes_preempted, rules.max_prompt_tokens_beside_decodes)
    identity = NodeIdentity(before.identity.name, draw_incarnation())
    core = TellingCore(make_core(replace(parts, identity=identity)), parts.pool, book=around.book)
    return Incarnation(role, identity, max(now_ms, before.started_ms + 1), core)


def draw_incarnation() -> int:
    """64 random bits, not zero."""
    return secrets.randbelow(2**64 - 1) + 1


class Running:
    """An incarnation at work."""

    def __init__(
        self,
        incarnation: Incarnation,
        around: Surroundings,
        threads: Threads,
        tasks: asyncio.TaskGroup,
        started: AsyncExitStack,
    ) -> None:
        """Start everything, from the inside out; `started` stops it in reverse order."""
        self.incarnation = incarnation
        self._parts = around.engine.parts
        role, identity, core, config = incarnation.role, incarnation.identity, incarnation.core, around.config
        self.inbox = Inbox()
        self.transport = around.make_transport(identity, self.inbox.post)
        started.callback(self.transport.stop)
        for end in self.transport.ended:
            keep(tasks, started, asyncio.wrap_future(end), ThreadEnded("a thread of the transport has ended"))
        self._peers = HandoffClient(self.inbox.post, tasks.create_task, around.credentials)
        started.push_async_callback(self._peers.close)
        calls = PendingCalls()
        started.callback(calls.close)
        bounds = Bounds(
            role=ROLES[role],
            vocab_size=around.engine.model_config.vocab_size,
            max_model_len=around.engine.sizes.max_model_len,
            local_prefill=identity.to_proto() if prefills_locally(role, config) else None,
        )
        timing = SessionTiming(grace_s=config.session_grace_s)
        compiling = ThreadEnded("a thread that compiles grammars has ended")
        grammars = GrammarThreads(
            around.engine.grammars, watch=lambda end: keep(tasks, started, asyncio.wrap_future(end), compiling)
        )
        started.push_async_callback(grammars.stop)
        gate = GrammarGate(self.inbox.post, grammars)
        started.push_async_callback(gate.close)
        self.routers = Routers(identity, bounds, around.counters, gate, core.load, timing)
        outlets = Outlets(
            runner=threads.runner,
            transport=self.transport,
            routers=self.routers,
            calls=calls,
            peers=self._peers,
            kv_pool=threads.kv_pool,
            counters=around.counters,
            measures=around.measures,
            drained=around.ending.has_drained,
            spans=threads.spans,
        )
        loop = tasks.create_task(NodeLoop(identity.name, core, self.inbox, outlets).run())
        started.push_async_callback(_end, loop)
        started.push_async_callback(self.routers.sessions.close)
        self.service = NodeService(identity, bounds, around.counters, gate, self.routers.sessions, calls, around.ending)

    @property
    def num_undelivered(self) -> int:
        """Messages and calls of its own that have not arrived."""
        return self.routers.sessions.num_unacknowledged + self._peers.num_under_way

    @property
    def transport_has_ended(self) -> bool:
        """Whether no thread of its transport runs any more."""
        return all(end.done() for end in self.transport.ended)

    def find_leftover(self) -> str:
        """What of its role something may still touch, as words; empty when there is nothing."""
        return find_leftover(self._parts.scheduler, self._parts.pool, self.incarnation.core.snapshot())


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})
