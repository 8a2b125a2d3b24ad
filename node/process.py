"""One node process from its knobs to its exit code: builds the parts, wires them to one loop, takes them down again.

    engine            inbox --> NodeLoop(core) --> transport, runner thread, gRPC client, sessions
      |                 ^
    build, bind         +-- gRPC service, sessions, transport threads, runner thread
      |
    register with the routers --> ready file --> serve --> drain --> deregister --> take down, in reverse order

What the user can mend (model directory, sizes, a taken port) is one line and exit code 2. Every other exception is a bug, wherever
it arises: in a task, in a callback, on the runner thread. It ends the process with a traceback and exit code 1, and whoever
starts it again gets a new incarnation.

SIGTERM drains (node/ending.py); SIGINT does not: what runs is lost to this node, and its routers, who are told, go on elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal

import grpc
import zmq
from fastapi import FastAPI

from connector.choosing import ChoosingTransport, choose_transports
from connector.kv_store import KvStore
from connector.nixl_agent import NixlFault
from connector.zmq_options import Place
from node.assembly import CoreParts, NodeEngine, build_engine
from node.bugs import ThreadEnded, dying_of, keep
from node.cache_feed import TellingCore
from node.config import NodeConfig
from node.ending import Ending, Means
from node.events import NodeCore, StepDone
from node.handoff_client import SERVER_OPTIONS, HandoffClient
from node.http import make_app
from node.identity import NodeIdentity
from node.inbox import Inbox
from node.kv_pool import KvPoolBounds, KvPoolThreads
from node.kv_pool_opening import open_store
from node.loop import KvPool, NodeLoop, NoKvPool, Outlets
from node.measures import Measures
from node.metrics import Counters
from node.routers import Routers
from node.runner_thread import RunnerThread
from node.service import NodeService, PendingCalls
from node.spans import AttemptSpans
from node.validate import Bounds
from node.view import NodeFacts, NodeView, Sources
from proto import baton_pb2 as pb
from proto import baton_pb2_grpc as pb_grpc
from runtime.advertise import known_host, with_port
from runtime.credentials import Credentials
from runtime.http_server import HttpServer
from runtime.logs import log_event, set_up_logging
from runtime.process import die_with_parent, fatal, first_signal, listening_socket, warn_if_exposed, write_atomically
from runtime.registry_choice import choose_registries, registry_servers
from runtime.registry_client import RegistryClient
from runtime.session import SessionTiming
from runtime.session_driver import CHANNEL_OPTIONS
from runtime.tracing import Tracing, open_tracing

LOG = logging.getLogger(__name__)

RoleName = Literal["prefill", "decode", "mixed"]

ROLES: Final = {"prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE, "mixed": pb.ROLE_MIXED}
MAX_CONCURRENT_CALLS: Final = 4096  # of other processes, sessions included; gRPC refuses the rest
GRPC_STOP_GRACE_S: Final = 0.2
KV_POOL_STOP_S: Final = 0.2  # for threads to end that have nothing to do, however little time there is
STAGING_MIB: Final = 256
_BACKLOG: Final = 128


def run_node(role: RoleName, config: NodeConfig, make_core: Callable[[CoreParts], NodeCore]) -> int:
    """Run a node until it is to end; 0 then. Ends the process with one line and 2 for what the user can mend."""
    die_with_parent(config.parent_pid)
    name = config.node_id or f"{role}-{secrets.token_hex(4)}"
    set_up_logging(config.log_level, name, config.log_format)
    identity = NodeIdentity(name, secrets.randbelow(2**64 - 1) + 1)
    measures = Measures()
    try:
        servers = registry_servers(config.registry, config.router)
        config = replace(config, advertise=config.advertise or known_host(name, config.host, servers))
        credentials = Credentials(config.tls_dir, config.known_as)
        # What gives way on a decode node is placed anew: there may be a prefill node, or a decode node with room.
        beside_decodes = config.local_prefill_chunk if role == "decode" else None
        engine = build_engine(
            config, identity, resumes_preempted=role == "mixed", max_prompt_tokens_beside_decodes=beside_decodes
        )
        tracing = open_tracing(config.otlp_endpoint, role, name)
        store = open_store(role, config, engine.memory.block_bytes, partial(measures.add, "kv_pool_removed"))
    except ValueError as error:
        fatal(f"baton {role}: {error}")
    if engine.kernels_shortfall:
        log_event(LOG, logging.WARNING, "slow_kernels", node=name, reason=engine.kernels_shortfall)
    if engine.inexactness is not None:
        # A recomputed sequence may then differ from the one that was lost.
        log_event(LOG, logging.WARNING, "not_bit_exact", node=name, reason=engine.inexactness)
    if not credentials.is_encrypted:
        risk = "whoever can reach it can use it, and read and change what goes over the wire"
        warn_if_exposed(config.host, name, {"--tls-dir": risk})
    core = TellingCore(make_core(engine.parts), engine.parts.pool)
    process = partial(_NodeProcess, role, config, credentials, engine, core, measures, _Outside(store, tracing))
    try:
        asyncio.run(_serve(process))
    except (_CannotListen, _Refused) as error:
        fatal(f"baton {role}: {error}")
    finally:
        engine.close()
    log_event(LOG, logging.INFO, "node_stopped", node=name)
    return 0


async def _serve(make_process: Callable[[], _NodeProcess]) -> None:
    await make_process().run()


class _CannotListen(Exception):
    """An address is taken or not ours; the message names the flag."""


class _Refused(Exception):
    """A registry does not take this node, and never will as it is; the message is its sentence."""


@dataclass(frozen=True, slots=True)
class _Listeners:
    """What the process listens on, all bound before anything is started."""

    http: socket.socket
    http_address: str
    grpc: grpc.aio.Server
    grpc_address: str
    transport: ChoosingTransport


@dataclass(frozen=True, slots=True)
class _Outside:
    """What there is beside the cluster, where it is asked for."""

    store: KvStore | None  # of the KV pool
    tracing: Tracing | None  # tells a collector


class _NodeProcess:
    """One run of the loop, in which it is made."""

    def __init__(
        self,
        role: RoleName,
        config: NodeConfig,
        credentials: Credentials,
        engine: NodeEngine,
        core: NodeCore,
        measures: Measures,
        outside: _Outside,
    ) -> None:
        self._role = role
        self._config = config
        self._credentials = credentials
        self._engine = engine
        self._core = core
        self._identity = engine.parts.identity
        self._started_ms = time.time_ns() // 1_000_000
        self._counters = Counters()
        self._measures = measures
        self._store, self._tracing = outside.store, outside.tracing
        self._calls = PendingCalls()
        self._ending = Ending(core, config.drain_timeout_s)
        self._refusal: str | None = None
        self._prefills_locally = role == "mixed" or (role == "decode" and config.local_prefill == "on")

    async def run(self) -> None:
        """Serve until the end. Raises _CannotListen or _Refused, or an ExceptionGroup with the bug that ended it."""
        inbox = Inbox()
        first_signal().add_done_callback(self._on_signal)
        bug: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().set_exception_handler(dying_of(bug))
        async with AsyncExitStack() as bound:
            listeners = await self._bind(inbox, bound)
            async with asyncio.TaskGroup() as tasks, AsyncExitStack() as started:
                keep(tasks, started, bug)
                entry, means = await self._start(listeners, inbox, tasks, started)
                kernels = entry.fingerprint.kernels
                log_event(
                    LOG, logging.INFO, "node_ready", node=entry.node.name, grpc=entry.grpc_address, kernels=kernels
                )
                await self._ending.run(means)
        if self._refusal is not None:
            raise _Refused(self._refusal)

    async def _bind(self, inbox: Inbox, bound: AsyncExitStack) -> _Listeners:
        """Take every address; what is bound is released by `bound`."""
        config = self._config
        http = bound.enter_context(_listen("--http-port", config.host, config.http_port))
        # gRPC binds for itself, and would tell of a taken port in lines of its own.
        _listen("--grpc-port", config.host, config.grpc_port).close()
        # Without so_reuseport: a second node on a taken port is an error, not a second half of the first one's traffic.
        options = (*CHANNEL_OPTIONS, *SERVER_OPTIONS, ("grpc.so_reuseport", 0))
        server = grpc.aio.server(options=options, maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS)
        bound.push_async_callback(server.stop, GRPC_STOP_GRACE_S)
        try:
            grpc_port = self._credentials.bind(server, with_port(config.host, config.grpc_port))
        except RuntimeError as error:
            raise _CannotListen(f"--grpc-port {config.grpc_port}: cannot listen on {config.host}: {error}") from None
        transport = self._make_transport(inbox)
        bound.callback(transport.stop)
        http_address = with_port(config.known_as, http.getsockname()[1])
        return _Listeners(http, http_address, server, with_port(config.known_as, grpc_port), transport)

    def _make_transport(self, inbox: Inbox) -> ChoosingTransport:
        config, memory, identity = self._config, self._engine.memory, self._identity
        place = Place(config.host, config.kv_port, config.known_as)
        try:
            return choose_transports(
                config.transport,
                memory.bytes,
                memory.descriptor,
                (identity.name, identity.incarnation),
                inbox.post,
                place,
                is_encrypted=self._credentials.is_encrypted,
            )
        except zmq.ZMQError as error:
            told = f"--kv-port {config.kv_port}: zmq cannot listen on {config.host}: {error.strerror}"
            raise _CannotListen(told) from None
        except NixlFault as error:
            raise _CannotListen(f"--transport {config.transport}: {error}") from None
        except OSError as error:
            raise _CannotListen(f"--transport {config.transport}: cannot listen: {error.strerror}") from None

    async def _start(
        self, listeners: _Listeners, inbox: Inbox, tasks: asyncio.TaskGroup, started: AsyncExitStack
    ) -> tuple[pb.NodeEntry, Means]:
        """Start everything, from the inside out; `started` stops it in reverse order."""
        kv_pool = self._start_kv_pool(inbox, tasks, started)
        runner = RunnerThread(self._engine.runner, lambda result: inbox.post(StepDone(result)))
        started.push_async_callback(runner.stop)
        keep(tasks, started, runner.ended, ThreadEnded("the runner thread has ended"))
        for rank, ended in self._engine.rank_ends:
            keep(tasks, started, asyncio.wrap_future(ended), ThreadEnded(f"rank {rank} has ended"))
        for end in listeners.transport.ended:
            keep(tasks, started, asyncio.wrap_future(end), ThreadEnded("a thread of the transport has ended"))
        peers = HandoffClient(inbox.post, tasks.create_task, self._credentials)
        started.push_async_callback(peers.close)
        bounds = Bounds(
            role=ROLES[self._role],
            vocab_size=self._engine.model_config.vocab_size,
            max_model_len=self._engine.sizes.max_model_len,
            local_prefill=self._identity.to_proto() if self._prefills_locally else None,
        )
        timing = SessionTiming(grace_s=self._config.session_grace_s)
        routers = Routers(self._identity, bounds, self._counters, inbox.post, self._core.load, timing)
        transport, counters, measures = listeners.transport, self._counters, self._measures
        has_drained = self._ending.has_drained
        spans = self._open_spans(started)
        outlets = Outlets(
            runner, transport, routers, self._calls, peers, kv_pool, counters, measures, has_drained, spans
        )
        loop = tasks.create_task(NodeLoop(self._identity.name, self._core, inbox, outlets).run())
        started.callback(loop.cancel)
        started.push_async_callback(routers.sessions.close)
        service = NodeService(
            self._identity, bounds, self._counters, inbox.post, routers.sessions, self._calls, self._ending
        )
        pb_grpc.add_NodeServicer_to_server(service, listeners.grpc)
        await listeners.grpc.start()
        http = self._http_server(make_app(self._view(listeners.transport, routers, kv_pool)), listeners.http)
        tasks.create_task(http.run())
        started.callback(http.stop)
        config = self._config
        registries = choose_registries(config.registry, config.registry_namespace, config.router, self._credentials)
        registry = RegistryClient(registries, lambda: self._entry(listeners), self._on_refused)
        registry.start()
        started.push_async_callback(registry.deregister)
        entry = self._entry(listeners)
        self._write_ready_file(entry)
        sessions = routers.sessions
        return entry, Means(registry.announce, inbox.post, lambda: sessions.num_unacknowledged + peers.num_under_way)

    def _http_server(self, app: FastAPI, listener: socket.socket) -> HttpServer:
        count = partial(self._measures.add, "refused_http")
        return HttpServer(app, listener, tls=self._credentials.http_context(partial(count, "tls")), on_refused=count)

    def _start_kv_pool(self, inbox: Inbox, tasks: asyncio.TaskGroup, started: AsyncExitStack) -> KvPool:
        """The threads over the cluster's KV pool, if there is one; what is staged when the node ends has the drain's time."""
        if self._store is None:
            return NoKvPool(inbox.post)
        mib = self._config.kv_pool_staging_mib
        bounds = KvPoolBounds(staging_bytes=(STAGING_MIB if mib is None else mib) << 20)
        pool = KvPoolThreads(self._store, self._engine.memory.bytes, bounds, inbox.post, self._measures)

        async def stop() -> None:
            # A fifth is left for the call under way, which nobody can end.
            await pool.stop(max(KV_POOL_STOP_S, 0.8 * self._ending.seconds_left))
            if num_lost := pool.snapshot()["staging_blocks_used"]:
                log_event(LOG, logging.WARNING, "kv_pool_unwritten", node=self._identity.name, blocks=num_lost)

        started.push_async_callback(stop)
        for end in pool.ended:
            keep(tasks, started, asyncio.wrap_future(end), ThreadEnded("a thread of the KV pool has ended"))
        return pool

    def _open_spans(self, started: AsyncExitStack) -> AttemptSpans | None:
        """Where a collector is to be told of attempts, what tells it."""
        if self._tracing is None:
            return None
        started.push_async_callback(self._tracing.close)
        return AttemptSpans(self._tracing, self._identity.name)

    def _on_signal(self, first: asyncio.Future[signal.Signals]) -> None:
        number = first.result()
        self._ending.ask(number.name, 0 if number is signal.SIGINT else None)

    def _on_refused(self, sentence: str) -> None:
        self._refusal = f"refused by the registry: {sentence}"
        self._ending.ask("refused", 0)

    def _view(self, transport: ChoosingTransport, routers: Routers, kv_pool: KvPool) -> NodeView:
        facts = NodeFacts(
            identity=self._identity,
            role=self._role,
            threads=self._config.num_threads,
            is_bit_exact=self._engine.inexactness is None,
            fingerprint=self._engine.parts.fingerprint,
            sizes=self._engine.sizes,
            rank_pids=self._engine.rank_pids,
        )
        told = (transport.snapshot, routers.sessions.snapshot, kv_pool.snapshot)
        return NodeView(facts, Sources(self._core, self._counters, self._measures, *told, self._ending))

    def _entry(self, listeners: _Listeners) -> pb.NodeEntry:
        """What the routers are told."""
        return pb.NodeEntry(
            node=self._identity.to_proto(),
            role=ROLES[self._role],
            grpc_address=listeners.grpc_address,
            http_address=listeners.http_address,
            fingerprint=self._engine.parts.fingerprint,
            num_blocks=self._engine.sizes.num_blocks,
            max_num_seqs=self._config.max_num_seqs,
            max_model_len=self._engine.sizes.max_model_len,
            started_ms=self._started_ms,
            draining=self._ending.is_draining,
            local_prefill=self._prefills_locally,
            num_ranks=self._config.tp,
        )

    def _write_ready_file(self, entry: pb.NodeEntry) -> None:
        if self._config.ready_file is not None:
            content = {"node_id": entry.node.name, "role": self._role, "pid": os.getpid()}
            scheme = "https://" if self._credentials.is_encrypted else ""
            content |= {"http": scheme + entry.http_address, "grpc": entry.grpc_address}
            write_atomically(self._config.ready_file, content)


def _listen(flag: str, host: str, port: int) -> socket.socket:
    """A listening socket; raises _CannotListen."""
    try:
        return listening_socket(host, port, _BACKLOG)
    except OSError as error:
        raise _CannotListen(f"{flag} {port}: cannot listen on {host}: {error.strerror}") from None
