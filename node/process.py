"""One node process from its knobs to its exit code: builds the parts, wires them to one loop, takes them down again.

    build the engine, bind --> start the threads --> incarnation (node/incarnation.py) --> register --> ready file --> serve
                                                          ^                                                          |
                                                          '-- another role -- take it down <-- deregister <-- drain -'
                                                                                   |
                                                                                   '--> take down the rest, in reverse order

What the user can mend (model directory, sizes, a taken port) is one line and exit code 2. Every other exception is a bug, wherever
it arises. It ends the process with a traceback and exit code 1, and whoever starts it again gets a new incarnation.

SIGTERM drains (node/ending.py); SIGINT does not: what runs is lost to this node, and its routers, who are told, go on elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Final

import uvloop
import zmq

from connector.choosing import ChoosingTransport, HostMemory, choose_transports
from connector.kv_store import KvStore
from connector.zmq_options import Place
from node.assembly import CoreParts, NodeEngine, build_engine
from node.bugs import ThreadEnded, dying_of, keep
from node.config import NodeConfig
from node.ending import Ending, Means
from node.events import Event, NodeCore, StepDone
from node.handoff_client import SERVER_OPTIONS
from node.http import make_app
from node.identity import NodeIdentity
from node.inbox import NewestInbox
from node.incarnation import (
    Incarnation,
    Running,
    Surroundings,
    Threads,
    draw_incarnation,
    first_incarnation,
    next_incarnation,
)
from node.kv_pool import KvPoolBounds, KvPoolThreads
from node.kv_pool_opening import open_store
from node.loop import KvPool, NoKvPool
from node.measures import Measures
from node.metrics import Counters
from node.pool_book import PoolBook
from node.port import NodePort
from node.ready_file import why_not_told
from node.roles import ROLES, RoleName, prefills_locally, rules_of
from node.runner_thread import RunnerThread
from node.spans import AttemptSpans
from node.step_watch import watch_steps
from node.view import NodeFacts, NodeView, Sources
from proto import baton_pb2 as pb
from proto import baton_pb2_grpc as pb_grpc
from runtime.advertise import known_host, with_port
from runtime.certificate_watch import watch_certificates
from runtime.config import log_unread_variables
from runtime.credentials import Credentials
from runtime.grpc_server import GrpcServer
from runtime.http_server import HttpServer
from runtime.logs import log_event, set_up_logging
from runtime.process import allow_descriptors, fatal, first_signal, listening_socket, warn_if_exposed, why_not_listening
from runtime.registry_choice import choose_registries, registry_servers
from runtime.registry_client import RegistryClient
from runtime.session_driver import CHANNEL_OPTIONS
from runtime.tracing import Tracing, open_tracing

LOG = logging.getLogger(__name__)

CoreMaker = Callable[[CoreParts], NodeCore]

MAX_CONCURRENT_CALLS: Final = 4096  # of other processes, sessions included; gRPC refuses the rest
GRPC_STOP_GRACE_S: Final = 0.2
KV_POOL_STOP_S: Final = 0.2  # for threads to end that have nothing to do, however little time there is
STAGING_MIB: Final = 256
_BACKLOG: Final = 128


def run_node(role: RoleName, config: NodeConfig, make_cores: Mapping[RoleName, CoreMaker]) -> int:
    """Run a node until it is to end; 0 then. Ends the process with one line and 2 for what the user can mend.

    `make_cores`: of the roles that it can take; `role` is one of them.
    """
    name = config.node_id or f"{role}-{secrets.token_hex(4)}"
    set_up_logging(config.log_level, name, config.log_format)
    log_unread_variables()
    allow_descriptors(1 << 16)  # of which a zmq link takes five, a nixl link twenty
    identity = NodeIdentity(name, draw_incarnation())
    measures = Measures()
    try:
        servers = registry_servers(config.registry, config.router)
        config = replace(config, advertise=config.advertise or known_host(name, config.host, servers))
        credentials = Credentials(config.tls_dir, config.known_as)
        engine = build_engine(config, identity, **asdict(rules_of(role, config)))
        tracing = open_tracing(config.otlp_endpoint, role, name)
        store = open_store(role, config, engine.memory.block_bytes, partial(measures.add, "kv_pool_removed"))
    except ValueError as error:
        fatal(f"baton {role}: {error}", error)
    if engine.memory.copier is None:
        log_event(LOG, logging.WARNING, "slow_copies", node=name, reason="nothing was compiled for this CPU")
    if engine.inexactness is not None:  # a recomputed sequence may then differ from the one that was lost
        log_event(LOG, logging.WARNING, "not_bit_exact", node=name, reason=engine.inexactness)
    if not credentials.is_encrypted:
        risk = "whoever can reach it can use it, and read and change what goes over the wire"
        warn_if_exposed(config.host, name, {"--tls-dir": risk})
    built, flaw = _Built(role, config, credentials, engine, measures, store, tracing), None
    try:
        # asyncio's own loop lets go of the interpreter where another thread wakes it: the runner would have to wait for it.
        uvloop.run(_serve(partial(_NodeProcess, built, make_cores)))
    except* _CannotServe as errors:  # alone, or what ended a group of tasks
        flaw = errors.exceptions[0]
    finally:
        engine.close()
    if flaw is not None:
        fatal(f"baton {role}: {flaw}", flaw)
    log_event(LOG, logging.INFO, "node_stopped", node=name)
    return 0


async def _serve(make_process: Callable[[], _NodeProcess]) -> None:
    await make_process().run()


class _CannotServe(Exception):
    """An address is taken or not ours, or a registry will never take this node as it is; the message is the sentence."""


@dataclass(frozen=True, slots=True)
class _Listeners:
    """What the process listens on whatever its role, all bound before anything is started."""

    http: socket.socket
    http_address: str
    grpc: GrpcServer
    grpc_address: str


@dataclass(frozen=True, slots=True)
class _Built:
    """What there is before the loop runs."""

    role: RoleName
    config: NodeConfig
    credentials: Credentials
    engine: NodeEngine
    measures: Measures
    store: KvStore | None  # of the KV pool
    tracing: Tracing | None  # tells a collector


class _NodeProcess:
    """One run of the loop, in which it is made."""

    def __init__(self, built: _Built, make_cores: Mapping[RoleName, CoreMaker]) -> None:
        self._built = built
        self._config, self._engine, self._credentials = built.config, built.engine, built.credentials
        self._make_cores = make_cores
        self._measures = built.measures
        self._name = built.engine.parts.identity.name
        self._counters = Counters()
        self._ending = Ending(built.config.drain_timeout_s, built.role, frozenset(make_cores))
        self._around = Surroundings(
            config=self._config,
            credentials=self._credentials,
            engine=self._engine,
            counters=self._counters,
            measures=self._measures,
            book=PoolBook(),
            ending=self._ending,
            make_transport=self._make_transport,
        )
        self._newest = NewestInbox()
        self._is_listed = asyncio.Event()  # a registry has taken it; for good, whatever becomes of the registry
        self._refusal: str | None = None

    async def run(self) -> None:
        """Serve until the end. Raises _CannotServe, or an ExceptionGroup with the bug that ended it."""
        first_signal().add_done_callback(self._on_signal)
        bug: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().set_exception_handler(dying_of(bug))
        async with AsyncExitStack() as bound:
            listeners = await self._bind(bound)
            async with asyncio.TaskGroup() as tasks, AsyncExitStack() as started:
                keep(tasks, started, bug)
                await self._run_roles(listeners, tasks, started)
        if self._refusal is not None:
            raise _CannotServe(self._refusal)

    async def _run_roles(self, listeners: _Listeners, tasks: asyncio.TaskGroup, started: AsyncExitStack) -> None:
        """Serve in one role after the other, each as a new incarnation; `started` stops what they share, in reverse order."""
        threads = self._start_threads(tasks, started)
        doors: tuple[NodePort, NodeView] | None = None
        first = self._built.role
        incarnation = first_incarnation(first, self._around, self._make_cores[first], _now_ms())
        while True:
            async with AsyncExitStack() as taken_up:
                running = Running(incarnation, self._around, threads, tasks, taken_up)
                self._newest.turn_to(running.inbox)
                if doors is None:
                    doors = await self._open_doors(running, threads, listeners, tasks, started)
                else:
                    doors[0].turn_to(running.service)
                    doors[1].show(*self._shown(running, threads))
                taken_up.callback(doors[0].close)
                role = await self._serve(running, listeners, taken_up)
            if role is None:
                return
            incarnation = next_incarnation(running, role, self._around, self._make_cores[role], _now_ms())

    async def _serve(self, running: Running, listeners: _Listeners, taken_up: AsyncExitStack) -> RoleName | None:
        """Be found, until the role ends: the next one, or None."""
        config, incarnation = self._config, running.incarnation
        has_changed = self._ending.take_up(incarnation.core)
        registries = choose_registries(config.registry, config.registry_namespace, config.router, self._credentials)
        registry = RegistryClient(
            registries, lambda: self._entry(incarnation, listeners), self._on_refused, self._is_listed.set
        )
        taken_up.push_async_callback(registry.deregister)
        if has_changed:
            await registry.announce()
        else:
            registry.start()
        entry = self._entry(incarnation, listeners)
        scheme = "https://" if self._credentials.is_encrypted else ""
        if (flaw := why_not_told(config.ready_file, incarnation.role, entry, scheme)) and not has_changed:
            raise _CannotServe(flaw)
        told = {"node": entry.node.name, "role": incarnation.role, "grpc": entry.grpc_address}
        log_event(LOG, logging.INFO, "node_ready", **told, kernels=entry.fingerprint.kernels)
        if has_changed:
            self._counters.count("role_changes")
            self._ending.tell_changed()
        means = Means(registry.announce, running.inbox.post, lambda: running.num_undelivered, running.find_leftover)
        return await self._ending.run(means)

    async def _bind(self, bound: AsyncExitStack) -> _Listeners:
        """Take every address; what is bound is released by `bound`."""
        config = self._config
        http = bound.enter_context(_listen("--http-port", config.host, config.http_port))
        # gRPC binds for itself, and would tell of a taken port in lines of its own.
        _listen("--grpc-port", config.host, config.grpc_port).close()
        # Without so_reuseport: a second node on a taken port is an error, not a second half of the first one's traffic.
        options = (*CHANNEL_OPTIONS, *SERVER_OPTIONS, ("grpc.so_reuseport", 0))
        count_refused = partial(self._counters.count, "refused_grpc")
        server = GrpcServer(self._credentials, count_refused, options, MAX_CONCURRENT_CALLS)
        bound.push_async_callback(server.stop, GRPC_STOP_GRACE_S)
        try:
            grpc_port = server.bind(with_port(config.host, config.grpc_port))
        except RuntimeError as error:
            raise _CannotServe(f"--grpc-port {config.grpc_port}: cannot listen on {config.host}: {error}") from None
        http_address = with_port(config.known_as, http.getsockname()[1])
        return _Listeners(http, http_address, server, with_port(config.known_as, grpc_port))

    def _make_transport(self, identity: NodeIdentity, post: Callable[[Event], None]) -> ChoosingTransport:
        config, memory = self._config, self._engine.memory
        place = Place(config.host, config.kv_port, config.known_as)
        try:
            return choose_transports(
                config.transport,
                HostMemory(memory.bytes, lambda: memory.descriptor, memory.copier),
                (identity.name, identity.incarnation),
                post,
                place,
                is_encrypted=self._credentials.is_encrypted,
            )
        except zmq.ZMQError as error:
            told = f"--kv-port {config.kv_port}: zmq cannot listen on {config.host}: {error.strerror}"
            raise _CannotServe(told) from None
        except OSError as error:
            raise _CannotServe(f"--transport {config.transport}: {error.strerror or error}") from None

    def _start_threads(self, tasks: asyncio.TaskGroup, started: AsyncExitStack) -> Threads:
        """Those that every incarnation uses; they answer to the newest, which waits for what was asked before it goes."""
        post = self._newest.post
        kv_pool = self._start_kv_pool(post, tasks, started)
        runner = RunnerThread(self._engine.runner, lambda result: post(StepDone(result)))
        started.push_async_callback(runner.stop)
        started.callback(tasks.create_task(watch_steps(runner, self._config.step_timeout_s)).cancel)
        keep(tasks, started, runner.ended, ThreadEnded("the runner thread has ended"))
        for rank, ended in self._engine.rank_ends:
            keep(tasks, started, asyncio.wrap_future(ended), ThreadEnded(f"rank {rank} has ended"))
        return Threads(runner, kv_pool, self._open_spans(started))

    async def _open_doors(
        self,
        first: Running,
        threads: Threads,
        listeners: _Listeners,
        tasks: asyncio.TaskGroup,
        started: AsyncExitStack,
    ) -> tuple[NodePort, NodeView]:
        """Serve gRPC and HTTP, whichever incarnation there is."""
        port, view = NodePort(first.incarnation.identity.name, first.service), NodeView(*self._shown(first, threads))
        pb_grpc.add_NodeServicer_to_server(port, listeners.grpc.server)
        await listeners.grpc.server.start()
        count = partial(self._measures.add, "refused_http")
        tls = self._credentials.http_context(partial(count, "tls"))
        http = HttpServer(make_app(view), listeners.http, tls=tls, on_refused=count)
        tasks.create_task(http.run())
        started.callback(http.stop)
        watch_certificates(self._credentials, started)
        return port, view

    def _start_kv_pool(
        self, post: Callable[[Event], None], tasks: asyncio.TaskGroup, started: AsyncExitStack
    ) -> KvPool:
        """The threads over the cluster's KV pool, if there is one; what is staged when the node ends has the drain's time."""
        if self._built.store is None:
            return NoKvPool(post)
        mib = self._config.kv_pool_staging_mib or STAGING_MIB
        bounds = KvPoolBounds(staging_bytes=mib << 20)
        try:
            pool = KvPoolThreads(self._built.store, self._engine.memory.bytes, bounds, post, self._measures)
        except MemoryError:
            raise _CannotServe(f"--kv-pool-staging-mib {mib}: there is not so much memory here") from None

        async def stop() -> None:
            # A fifth is left for the call under way, which nobody can end.
            await pool.stop(max(KV_POOL_STOP_S, 0.8 * self._ending.seconds_left))
            if num_lost := pool.snapshot()["staging_blocks_used"]:
                log_event(LOG, logging.WARNING, "kv_pool_unwritten", node=self._name, blocks=num_lost)

        started.push_async_callback(stop)
        for end in pool.ended:
            keep(tasks, started, asyncio.wrap_future(end), ThreadEnded("a thread of the KV pool has ended"))
        return pool

    def _open_spans(self, started: AsyncExitStack) -> AttemptSpans | None:
        """Where a collector is to be told of attempts, what tells it."""
        if self._built.tracing is None:
            return None
        started.push_async_callback(self._built.tracing.close)
        return AttemptSpans(self._built.tracing, self._name)

    def _on_signal(self, first: asyncio.Future[signal.Signals]) -> None:
        number = first.result()
        self._ending.ask(number.name, 0 if number is signal.SIGINT else None)

    def _on_refused(self, sentence: str) -> None:
        self._refusal = f"refused by the registry: {sentence}"
        self._ending.ask("refused", 0)

    def _shown(self, running: Running, threads: Threads) -> tuple[NodeFacts, Sources]:
        """What the pages show of an incarnation."""
        incarnation, engine = running.incarnation, self._engine
        facts = NodeFacts(
            identity=incarnation.identity,
            role=incarnation.role,
            threads=self._config.num_threads,
            is_bit_exact=engine.inexactness is None,
            fingerprint=engine.parts.fingerprint,
            sizes=engine.sizes,
            rank_pids=engine.rank_pids,
        )
        told = (running.transport.snapshot, running.routers.sessions.snapshot, threads.kv_pool.snapshot)
        ending = (self._ending, self._is_listed.is_set, self._credentials.ends_at)
        return facts, Sources(incarnation.core, self._counters, self._measures, *told, *ending)

    def _entry(self, incarnation: Incarnation, listeners: _Listeners) -> pb.NodeEntry:
        """What the routers are told."""
        entry = self._engine.entry()
        told = pb.NodeEntry(
            node=incarnation.identity.to_proto(),
            role=ROLES[incarnation.role],
            grpc_address=listeners.grpc_address,
            http_address=listeners.http_address,
            max_num_seqs=self._config.max_num_seqs,
            started_ms=incarnation.started_ms,
            draining=self._ending.is_draining,
            local_prefill=prefills_locally(incarnation.role, self._config),
            num_ranks=self._config.tp,
        )
        entry.MergeFrom(told)
        return entry


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _listen(flag: str, host: str, port: int) -> socket.socket:
    """A listening socket; raises _CannotServe."""
    try:
        return listening_socket(host, port, _BACKLOG)
    except OSError as error:
        raise _CannotServe(why_not_listening(error, flag, host, port)) from error
