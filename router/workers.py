"""The parent of a router with several worker processes: the port, the registry, the workers' lives. Serves no request itself.

    parent ──listening socket, RouterConfig, news of nodes──> worker 0, 1, …     each a router of its own: core, sessions, identity
           <──up, pages, what clients took───────────────────

Who runs when is worker_pool.py's. A worker that dies takes its clients' streams along, as a router does, and nobody else's; its
nodes free its work within the session's grace. Connections that wait are taken by the others. One that hangs is killed once it has
not answered for long (worker_pulse.py), or much waits for it to read (worker_link.py): it dies then like any other.
Not here: what a router does; what is kept of nodes (node_relay.py).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, assert_never

from proto import baton_pb2 as pb
from router.config import RouterConfig
from router.node_relay import Link, NodeRelay
from router.process import (
    CannotListen,
    address_here,
    dying_of,
    embed_registry,
    listen,
    read_registry,
    warn_of_what_is_missing,
)
from router.worker_link import framed
from router.worker_pool import Action, Announce, Exit, PoolTiming, Signal, Start, WorkerPool
from router.worker_pulse import BEAT_S, MOST_UNANSWERED, Pulse
from runtime.alarm import Alarm
from runtime.certificate_watch import watch_certificates
from runtime.config import child_environment, to_json
from runtime.credentials import Credentials, CredentialsError
from runtime.logs import log_event, set_up_logging
from runtime.process import (
    CannotWrite,
    check_writable,
    die_with_parent,
    fatal,
    first_signal,
    ignore_hangups,
    is_everywhere,
    run_async,
    write_ready_file,
)
from runtime.redis_address import EMBEDDED
from runtime.session_driver import surface

_LOG: Final = logging.getLogger(__name__)
_PAGES_S: Final = 1.0  # for the other workers to tell theirs
_STOP_SPARE_S: Final = 5.0  # beyond the drain timeout, for what ends then to end
_DIAL_S: Final = 5.0  # for a worker that has just started to reach nodes that are missed
_MIN_PAIR_WAIT_S: Final = (
    2.0  # for one that is started again to have a pair of nodes, or as long as requests wait for one
)


def run_workers(config: RouterConfig) -> int:
    """Run them until a signal; their exit code. Ends the process with one line and 2 for what the user can mend."""
    die_with_parent(config.parent_pid)
    ignore_hangups(of_a_terminal=config.api_keys is not None)  # workers look by themselves, each second
    set_up_logging(config.log_level, "router", config.log_format)
    try:
        check_writable("--ready-file", config.ready_file)
        credentials = Credentials(config.tls_dir, None if is_everywhere(config.host) else config.host)
        warn_of_what_is_missing(config)
        return run_async(_Parent(config, credentials).run())  # not uvloop: it cannot give a child a process group
    except (CannotListen, CannotWrite, CredentialsError) as error:
        fatal(f"baton router: {error}")


@dataclass(slots=True, eq=False)
class _Child:
    """One worker's process."""

    process: asyncio.subprocess.Process
    link: Link


@dataclass(slots=True, eq=False)
class _Question:
    """Somebody wants a page of all workers."""

    asker: Link
    number: int  # the asker's
    texts: dict[int, str]
    missing: set[int] = field(default_factory=set)


class _Parent:
    """The pool's shell."""

    def __init__(self, config: RouterConfig, credentials: Credentials) -> None:
        self._config = config
        self._credentials = credentials
        self._pool = WorkerPool(config.workers, PoolTiming(stop_s=config.drain_timeout_s + _STOP_SPARE_S))
        self._pulse = Pulse()
        self._children: dict[int, _Child] = {}
        self._unsent: dict[int, int] = {}  # signals for workers whose processes are about to exist
        self._tasks: set[asyncio.Task[None]] = set()
        self._questions: dict[int, _Question] = {}
        self._num_questions = 0
        self._registry = ""  # where nodes announce themselves

    async def run(self) -> int:
        """Start, watch, stop; the exit code. Raises CannotListen."""
        self._loop = asyncio.get_running_loop()
        self._relay = NodeRelay(self._loop.time)
        self._over: asyncio.Future[int] = self._loop.create_future()
        bug: asyncio.Future[None] = self._loop.create_future()
        self._loop.set_exception_handler(dying_of(bug))
        self._alarm = Alarm(self._loop, self._tick)
        stopped = first_signal()
        stopped.add_done_callback(lambda first: self._perform(self._pool.stop(first.result(), self._loop.time())))
        async with AsyncExitStack() as started:
            self._listener = started.enter_context(listen(self._config, "--port", self._config.port))
            watch_certificates(self._credentials, started)
            self._registry = await self._find_nodes(started)
            self._go(self._beat(), "pulse of the workers")
            self._perform(self._pool.begin(self._loop.time()))
            waits: list[asyncio.Future[Any]] = [self._over, bug]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in self._tasks:
                task.cancel()
            if bug.done():
                await bug  # the workers end with this process
        log_event(_LOG, logging.INFO, "router_stopped")
        return self._over.result()

    async def _find_nodes(self, started: AsyncExitStack) -> str:
        """Have the relay told of nodes; where they announce themselves."""
        if self._config.registry != EMBEDDED:
            return await read_registry(self._config, self._relay, self._relay.count_registry, started)
        return await embed_registry(self._config, self._relay, self._credentials, self._relay.refused_grpc, started)

    # ---------------------------------------------------------------- the pool

    def _tick(self) -> None:
        self._perform(self._pool.tick(self._loop.time()))

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Start(index):
                    self._go(self._live(index), f"worker {index}")
                case Signal(index, number):
                    if (child := self._children.get(index)) is not None:
                        with suppress(ProcessLookupError):  # it has ended, and that is about to be heard
                            child.process.send_signal(number)
                    else:
                        self._unsent[index] = number
                case Announce():
                    self._announce()
                case Exit(code):
                    self._over.set_result(code)
                case _:
                    assert_never(action)
        self._alarm.arm(self._pool.next_deadline())

    def _go(self, work: Coroutine[None, None, None], name: str) -> None:
        task = self._loop.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(surface)

    async def _live(self, index: int) -> None:
        """One process of a worker, from its start to its end."""
        try:
            process, ours = await self._start_process()
        except OSError as error:  # no process, no descriptor or no memory left, now
            log_event(_LOG, logging.WARNING, "worker_not_started", worker=index, reason=error.strerror)
            self._unsent.pop(index, None)
            self._perform(self._pool.ended(index, 1, self._loop.time()))
            return

        def on_hung(unread_bytes: int) -> None:
            _kill_hung(index, process, unread_bytes=unread_bytes)

        link = await Link.opened(pb.FromWorker.FromString, ours, on_hung)
        self._children[index] = _Child(process, link)
        if (number := self._unsent.pop(index, None)) is not None:
            with suppress(ProcessLookupError):
                process.send_signal(number)
        mine = replace(self._config, parent_pid=os.getpid(), ready_file=None)
        settings = pb.WorkerSettings(index=index, config=to_json(mine), registry=self._registry, tells_nodes=True)
        if self._pool.is_announced and self._relay.knows_nodes:  # connections are the others' meanwhile
            settings.pair_wait_s = max(self._config.no_nodes_grace_s, _MIN_PAIR_WAIT_S)
        link.send(pb.ToWorker(settings=settings))
        for news in self._relay.news():
            link.send(news)
        self._relay.links[index] = link
        reading = self._loop.create_task(self._read(index, link))
        code = await process.wait()
        reading.cancel()
        link.close()
        del self._relay.links[index], self._children[index]
        self._pulse.end(index)
        self._forget_in_questions(index)
        level = logging.INFO if code == 0 else logging.WARNING
        log_event(_LOG, level, "worker_ended", worker=index, pid=process.pid, code=code)
        self._perform(self._pool.ended(index, code, self._loop.time()))

    async def _start_process(self) -> tuple[asyncio.subprocess.Process, socket.socket]:
        """And our end of its link. Raises OSError."""
        ours, theirs = socket.socketpair()
        fds = (self._listener.fileno(), theirs.fileno())
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-P",
                    "-m",
                    "router.worker_end",
                    *map(str, fds),
                    stdin=asyncio.subprocess.DEVNULL,
                    env=child_environment(),
                    pass_fds=fds,
                    process_group=0,  # Ctrl-C reaches the parent alone, which passes it on once
                )
        except OSError:
            ours.close()
            raise
        return process, ours

    def _announce(self) -> None:
        url = f"{self._credentials.scheme}://{address_here(self._config, self._listener.getsockname()[1])}"
        pids = [self._children[index].process.pid for index in sorted(self._children)]
        log_event(_LOG, logging.INFO, "router_listening", url=url, registry=self._registry, workers=len(pids))
        name = self._config.served_model_name or self._config.model.resolve().name
        told = {"url": url, "registry": self._registry, "pid": os.getpid(), "model": name, "workers": pids}
        write_ready_file(self._config.ready_file, told)

    # ---------------------------------------------------------------- what workers say

    async def _read(self, index: int, link: Link) -> None:
        while (message := await link.read()) is not None:
            match message.WhichOneof("kind"):
                case "up":
                    self._pulse.begin(index)
                    self._loop.call_later(_DIAL_S, self._tell_later_news, link)
                    self._perform(self._pool.is_up(index, self._loop.time()))
                case "pong":
                    self._pulse.heard(index)
                case "want_page":
                    self._ask_all(index, link, message.want_page)
                case "page":
                    self._answered(index, message.page)
                case "took":
                    content = framed(pb.ToWorker(took=message.took))
                    for other, its_link in self._relay.links.items():
                        if other != index:
                            its_link.write(content)

    def _tell_later_news(self, link: Link) -> None:
        for news in self._relay.later_news():
            link.send(news)

    async def _beat(self) -> None:
        """Ask all whether they run, and kill who does not."""
        while True:
            await asyncio.sleep(BEAT_S)
            for index in self._pulse.beat():
                _kill_hung(index, self._children[index].process, unanswered=MOST_UNANSWERED)
            for index in self._pulse.asked:
                self._children[index].link.send(pb.ToWorker(ping=True))

    def _ask_all(self, index: int, asker: Link, wanted: pb.WorkerPage) -> None:
        self._num_questions += 1
        number, others = self._num_questions, {i for i in self._relay.links if i != index}
        self._questions[number] = _Question(asker, wanted.question, {index: wanted.text}, others)
        for other in others:
            self._relay.links[other].send(pb.ToWorker(tell_page=pb.WorkerPage(question=number, page=wanted.page)))
        self._loop.call_later(_PAGES_S, self._answer, number)
        self._answer_if_whole(number)

    def _answered(self, index: int, page: pb.WorkerPage) -> None:
        question = self._questions.get(page.question)
        if question is not None and index in question.missing:
            question.texts[index] = page.text
            question.missing.discard(index)
            self._answer_if_whole(page.question)

    def _forget_in_questions(self, index: int) -> None:
        for number, question in list(self._questions.items()):
            question.missing.discard(index)
            self._answer_if_whole(number)

    def _answer_if_whole(self, number: int) -> None:
        if not self._questions[number].missing:
            self._answer(number)

    def _answer(self, number: int) -> None:
        """Answer with what is there; without effect if that was done before."""
        question = self._questions.pop(number, None)
        if question is not None:
            pages = pb.WorkerPages(question=question.number, texts=question.texts)
            question.asker.send(pb.ToWorker(pages=pages))


def _kill_hung(index: int, process: asyncio.subprocess.Process, **found: int) -> None:
    """What it says does not matter any more; that it has ended is heard as of any other."""
    log_event(_LOG, logging.WARNING, "worker_hangs", worker=index, pid=process.pid, **found)
    with suppress(ProcessLookupError):
        process.kill()
