"""The router process from its knobs to its exit code: builds the parts, wires them to one loop, takes them down again.

    model text    registry server (gRPC), or reader (Redis) ──> shell(core) <── session dialer
        └─────────────────────────> HTTP API ────────────────────┘

What the user can mend (model directory, a taken port) is one line and exit code 2. Any other exception, in a task or a callback,
is a bug: a traceback and exit code 1; whoever starts it again gets a new incarnation, and nodes free the old one's work in time.

SIGTERM drains: connections that clients keep for later are closed, new requests are answered 503, `/ready` says so, and what was
accepted ends as if nothing had happened, until the drain timeout. SIGINT, or the end of that time, ends every request with an
error. SIGHUP ends nothing but what a terminal has started (key_file.py).
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import uvloop
from starlette.types import ASGIApp

from proto import baton_pb2_grpc as pb_grpc
from router.api import Api, ApiSettings
from router.api_keys import KeyFileError
from router.chat_template import ModelDirectoryError
from router.config import RouterConfig
from router.core import RouterCore
from router.dashboard import AllWorkers
from router.entrance import RouterCoreConfig
from router.gate import Gate
from router.key_file import KeyFile
from router.launcher_link import LauncherLink
from router.placement import CACHE_AWARE, Imbalance, Placement
from router.shell import RouterShell
from router.spans import RequestSpans
from router.streaming import LAST_WRITE_S
from router.text import ModelText
from router.worker_pages import own_page
from runtime.advertise import with_port
from runtime.certificate_watch import watch_certificates
from runtime.collecting import collect_at_rest
from runtime.config import log_unread_variables
from runtime.credentials import Credentials, CredentialsError
from runtime.grpc_server import GrpcServer
from runtime.http_protocol import HttpBounds
from runtime.http_server import BACKLOG, HttpServer
from runtime.logs import log_event, set_up_logging
from runtime.process import (
    CannotWrite,
    allow_descriptors,
    check_writable,
    die_with_parent,
    fatal,
    first_signal,
    ignore_hangups,
    is_everywhere,
    listening_socket,
    reached_here,
    warn_if_exposed,
    why_not_listening,
    write_ready_file,
)
from runtime.redis_address import DEFAULT_NAMESPACE, EMBEDDED
from runtime.registry_server import TTL_S, RegistryHandler, RegistryServer
from runtime.session import Peer, SessionTiming
from runtime.tracing import NoTracing, Tracing, open_tracing

if TYPE_CHECKING:
    from router.cache_map import CacheMap
    from router.worker_end import WorkerEnd

_LOG: Final = logging.getLogger(__name__)
_DRAIN_POLL_S: Final = 0.05
_PAIR_POLL_S: Final = 0.02
_OTHER_DESCRIPTORS: Final = 1024  # nodes, the kernel's queue, files
_MAX_CONCURRENT_CALLS: Final = 4096  # of nodes at the registry; gRPC refuses the rest


class CannotListen(Exception):
    """An address is taken or not ours; the message names the flag."""


def run_router(config: RouterConfig, worker: WorkerEnd | None = None) -> int:
    """Run a router until a signal; 0 after one. Ends the process with one line and 2 for what the user can mend.

    `worker`: what it has from its parent, if it is one of several processes (workers.py).
    """
    die_with_parent(config.parent_pid)
    ignore_hangups()
    set_up_logging(config.log_level, "router" if worker is None else f"router/{worker.index}", config.log_format)
    try:
        check_writable("--ready-file", config.ready_file)
        credentials = Credentials(config.tls_dir, None if is_everywhere(config.host) else config.host)
        if worker is None:
            warn_of_what_is_missing(config)
        tracing = open_tracing(config.otlp_endpoint, "router", f"{config.host}:{config.port}")
        uvloop.run(_serve(config, ModelText(config.model), credentials, tracing, worker))
    except (ModelDirectoryError, CannotListen, CannotWrite, CredentialsError, KeyFileError, NoTracing) as error:
        fatal(f"baton router: {error}", error)
    return 0


async def _serve(
    config: RouterConfig, text: ModelText, credentials: Credentials, tracing: Tracing | None, worker: WorkerEnd | None
) -> None:
    """Serve until a signal; raises CannotListen, KeyFileError, or the bug that ended it."""
    stopped = first_signal()
    bug: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().set_exception_handler(dying_of(bug))
    async with AsyncExitStack() as started:
        listener = listen(config, "--port", config.port) if worker is None else worker.listener
        started.enter_context(listener)
        if tracing is not None:
            started.push_async_callback(tracing.close)
        shell = make_shell(config, text, credentials, None if tracing is None else RequestSpans(tracing))
        started.push_async_callback(shell.close)
        shell.metrics.show_certificates(credentials.ends_at)
        registry = await _find_nodes(config, shell, credentials, worker, started)
        name = config.served_model_name or config.model.resolve().name
        all_workers = None if worker is None else AllWorkers(worker.index, config.workers, worker.page_of_all)
        settings = api_settings(config, name, all_workers)
        app = _behind_keys(config, Api(shell, text, settings).app(), shell, worker, started)
        http = _http_server(config, app, listener, shell, credentials)
        if worker is not None:
            await _await_pair(shell, worker.pair_wait_s, (stopped, bug))
        serving = asyncio.create_task(http.run())
        started.push_async_callback(_stop_serving, http, serving, shell)
        collecting = asyncio.create_task(collect_at_rest(lambda: http.num_under_way == 0))
        started.callback(collecting.cancel)
        if worker is not None:
            worker.say_up()
        url = f"{credentials.scheme}://{address_here(config, listener.getsockname()[1])}"
        _announce(config, url, registry, name)
        failures: list[asyncio.Future[Any]] = [serving, collecting, bug]
        await asyncio.wait([stopped, *failures], return_when=asyncio.FIRST_COMPLETED)
        if stopped.done() and stopped.result() is signal.SIGTERM:
            drain = asyncio.create_task(_drain(shell, http, config.drain_timeout_s))
            await asyncio.wait([drain, *failures], return_when=asyncio.FIRST_COMPLETED)
            drain.cancel()
        if bug.done():
            await bug
    log_event(_LOG, logging.INFO, "router_stopped")


async def _await_pair(shell: RouterShell, bound_s: float, ends: Sequence[asyncio.Future[Any]]) -> None:
    """Return once a pair of nodes can serve, at the latest after so long, or with one of `ends`.

    Connections are other workers' meanwhile: whoever took them with its sessions under way would answer that there are no nodes.
    """
    now = asyncio.get_running_loop().time
    deadline = now() + bound_s
    while shell.missing() and now() < deadline:
        ended, _ = await asyncio.wait(ends, timeout=_PAIR_POLL_S)
        if ended:
            return


async def _drain(shell: RouterShell, http: HttpServer, timeout_s: float) -> None:
    """Turn new requests away until no answer is under way, or the time is over."""
    shell.drain()
    http.close_idle()
    now = asyncio.get_running_loop().time
    deadline = now() + timeout_s
    shown = -1
    while http.num_under_way and now() < deadline:
        if http.num_under_way != shown:
            shown = http.num_under_way
            log_event(_LOG, logging.INFO, "draining", answers=shown, seconds_left=round(deadline - now(), 1))
        await asyncio.sleep(_DRAIN_POLL_S)


async def _find_nodes(
    config: RouterConfig,
    shell: RouterShell,
    credentials: Credentials,
    worker: WorkerEnd | None,
    started: AsyncExitStack,
) -> str:
    """Have the shell told of nodes; where they announce themselves. Raises CannotListen."""
    if worker is not None:
        await worker.open(shell, shell.metrics, partial(own_page, shell), started)
        if worker.is_told_nodes:
            return worker.registry
    watch_certificates(credentials, started)
    if config.registry != EMBEDDED:
        return await read_registry(config, shell, shell.metrics.count_registry, started)
    return await embed_registry(config, shell, credentials, shell.metrics.refused_grpc, started)


async def embed_registry(
    config: RouterConfig,
    handler: RegistryHandler,
    credentials: Credentials,
    on_refused: Callable[[], None],
    started: AsyncExitStack,
) -> str:
    """Let nodes announce themselves here; the address where they do. Raises CannotListen.

    `on_refused` is called for each connection of somebody who may not.
    """
    grpc = GrpcServer(credentials, on_refused, (("grpc.so_reuseport", 0),), _MAX_CONCURRENT_CALLS)
    port = _bind_registry(grpc, config)
    registry = RegistryServer(handler)
    started.callback(registry.close)
    pb_grpc.add_RegistryServicer_to_server(registry, grpc.server)
    await grpc.server.start()
    started.push_async_callback(grpc.stop, 0)
    return with_port(reached_here(config.registry_address), port)


async def read_registry(
    config: RouterConfig, handler: RegistryHandler, count: Callable[[str, int], None], started: AsyncExitStack
) -> str:
    """Look for the nodes in Redis, which need not be there yet; its URL without secrets. `count` as RedisReader's."""
    from runtime.redis_reader import RedisReader  # heavy: only who uses Redis pays for its client
    from runtime.redis_store import RedisStore

    store = RedisStore(config.registry, config.registry_namespace or DEFAULT_NAMESPACE, TTL_S)
    reader = RedisReader(handler, store, TTL_S, count)
    reader.start()
    started.push_async_callback(reader.close)
    return store.name


async def _stop_serving(http: HttpServer, serving: asyncio.Task[None], shell: RouterShell) -> None:
    """End every request with an error, let the answers out, close."""
    await shell.close()
    http.stop()
    await serving


def _behind_keys(
    config: RouterConfig, app: ASGIApp, shell: RouterShell, worker: WorkerEnd | None, started: AsyncExitStack
) -> ASGIApp:
    """The app as clients get at it. Raises KeyFileError."""
    if config.api_keys is None:
        return app
    file = KeyFile(config.api_keys)
    tell = None if worker is None else worker.tell
    gate = Gate(app, lambda: file.keys, shell.metrics, metrics_need_key=config.metrics_need_key, tell=tell)
    if worker is not None:
        worker.on_taken(gate.hear)
    file.start(gate.keys_changed)
    started.push_async_callback(file.close)
    return gate


def _http_server(
    config: RouterConfig, app: ASGIApp, listener: socket.socket, shell: RouterShell, credentials: Credentials
) -> HttpServer:
    bounds = http_bounds(config, _allowed_connections(config.max_connections))
    count = shell.metrics.turned_away
    tls = credentials.http_context(lambda: count("tls"))
    return HttpServer(app, listener, is_shared=config.workers > 1, bounds=bounds, tls=tls, on_refused=count)


def http_bounds(config: RouterConfig, max_connections: int) -> HttpBounds:
    """What is taken from strangers; `max_connections`: of those wanted, what there may be."""
    stuck_timeout_s = config.request_timeout_s + LAST_WRITE_S  # a stream may be paused so long
    return HttpBounds(max_connections, config.max_header_kib << 10, config.header_timeout_s, stuck_timeout_s)


def _allowed_connections(wanted: int) -> int:
    """As many of them as there may be files, with some left over: who comes then is told so, not cut off."""
    limit = allow_descriptors(wanted + _OTHER_DESCRIPTORS)
    left = max(limit - min(_OTHER_DESCRIPTORS, limit // 2), 1)
    if left < wanted:
        log_event(_LOG, logging.WARNING, "few_descriptors", open_files=limit, max_connections=left, wanted=wanted)
    return min(left, wanted)


def warn_of_what_is_missing(config: RouterConfig) -> None:
    """Log what a router that others reach does without, and variables that were meant for it and say nothing to anybody."""
    log_unread_variables(lacks_keys=config.api_keys is None)
    missing = {}
    if config.api_keys is None:
        missing["--api-keys"] = "whoever can reach it can use it"
    if config.tls_dir is None:
        missing["--tls-dir"] = "prompts, answers and keys can be read on the wire"
        if config.registry == EMBEDDED and config.registry_host is None:
            missing["--tls-dir"] += ", and anybody can announce a node"
    warn_if_exposed(config.host, "router", missing)
    if config.tls_dir is None and config.registry_host is not None:
        warn_if_exposed(config.registry_host, "registry", {"--tls-dir": "anybody can announce a node"})


def make_shell(
    config: RouterConfig, text: ModelText, credentials: Credentials, spans: RequestSpans | None
) -> RouterShell:
    """The core with what it places by, and the shell around it. On the loop."""
    seed = secrets.randbits(63) if config.placement_seed is None else config.placement_seed
    placement = Placement(config.placement_prefill, config.placement_decode, seed, imbalance(config))
    caches = _make_cache_map(config) if config.placement_prefill == CACHE_AWARE else None
    core = RouterCore(core_config(config, text.tokenizer_digest, seed), placement, caches)
    incarnation = secrets.randbelow(2**64 - 1) + 1
    me = Peer(f"router-{incarnation:016x}", incarnation)
    return RouterShell(core, me, SessionTiming(grace_s=config.session_grace_s), credentials, config.timelines, spans)


def core_config(config: RouterConfig, tokenizer: str, seed: int) -> RouterCoreConfig:
    """What the core goes by; `tokenizer`: digest of the router's."""
    return RouterCoreConfig(
        max_queue=config.max_queue,
        refuses_late=config.refuse_late == "on",
        max_inflight_prefills=config.max_inflight_prefills,
        tokenizer=tokenizer,
        preempt_retry_count=config.preempt_retry_count,
        local_prefill_max_tokens=config.local_prefill_max_tokens,
        preempt_retry_exclude_decode=config.preempt_retry_exclude_decode,
        max_nodes_lost=config.max_nodes_lost,
        max_moves=config.max_moves,
        no_nodes_grace_s=config.no_nodes_grace_s,
        breaker_failures=config.breaker_failures,
        seed=seed,
    )


def imbalance(config: RouterConfig) -> Imbalance:
    """When a node's queue is too long for what its cache holds to count."""
    return Imbalance(config.cache_imbalance_tokens, config.cache_imbalance_ratio)


def api_settings(config: RouterConfig, name: str, all_workers: AllWorkers | None) -> ApiSettings:
    """Of the HTTP side; `name`: the model's."""
    return ApiSettings(
        name,
        config.request_timeout_s,
        config.max_body_mib << 20,
        config.max_prompt_tokens,
        config.max_n,
        all_workers,
        config.tool_parser,
        config.reasoning_parser,
        LauncherLink(config.launcher) if config.launcher else None,
    )


def _make_cache_map(config: RouterConfig) -> CacheMap:
    from router.cache_index import CacheIndex  # heavy: only who places by cache pays for numpy
    from router.cache_map import CacheMap

    return CacheMap(CacheIndex(config.cache_index_max_mib << 20, secrets.randbits(64)))


def listen(config: RouterConfig, flag: str, port: int) -> socket.socket:
    """A socket that listens there; `flag` is for the error, CannotListen."""
    try:
        return listening_socket(config.host, port, BACKLOG)
    except OSError as error:
        raise CannotListen(why_not_listening(error, flag, config.host, port)) from error


def _bind_registry(grpc: GrpcServer, config: RouterConfig) -> int:
    """The port taken."""
    host, port = config.registry_address, config.registry_port
    try:  # first without gRPC, whose own error would be a second line, and less clear
        listening_socket(host, port, BACKLOG).close()
    except OSError as error:
        flag = "--host" if config.registry_host is None else "--registry-host"
        raise CannotListen(why_not_listening(error, "--registry-port", host, port, flag)) from error
    address = with_port(host, port)
    try:
        return grpc.bind(address)
    except RuntimeError as error:
        raise CannotListen(f"--registry-port: cannot listen on {address}: {error}") from error


def address_here(config: RouterConfig, port: int) -> str:
    """The same as this machine dials it: for whoever is told where the router is."""
    return with_port(reached_here(config.host), port)


def _announce(config: RouterConfig, url: str, registry: str, model: str) -> None:
    """Say, in the log and the ready file, where the router is. Raises CannotWrite."""
    log_event(_LOG, logging.INFO, "router_listening", url=url, registry=registry)
    write_ready_file(config.ready_file, {"url": url, "registry": registry, "pid": os.getpid(), "model": model})


def dying_of(bug: asyncio.Future[None]) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """An exception handler for the loop: what a callback or a watched task raises becomes `bug`.

    What is reported without one of these two (a connection that broke in an odd way) is logged: a client must not be able to
    end the process with it.
    """

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        error = context.get("exception")
        if error is not None and ("handle" in context or "task" in context) and not bug.done():
            bug.set_exception(error)

    return handle
