"""A worker's end of the link to its parent: what a router process has from the parent instead of making it itself.

    listening socket  inherited: every worker takes connections from the same queue, so who hangs or dies keeps nobody waiting
    nodes             told by the parent, who has the registry, or reads it in Redis: so a successor hears at once what is known
    pages             of all workers, whoever is asked (worker_pages.py): the parent asks the others
    limits of keys    what one worker lets a client have, the others hear of, some milliseconds of it in one message

A parent that reads nothing (it was stopped, say) is asked nothing and told nothing until it does: what clients had is summed up.

`python -m router.worker_end LISTENER LINK`, two inherited descriptors; started by workers.py and by nobody else.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Final, Protocol

from proto import baton_pb2 as pb
from router.config import RouterConfig
from router.rate_limit import Taken, What
from router.worker_link import WorkerLink, read_blocking
from runtime.collecting import loading
from runtime.config import from_json, set_grpc_environment
from runtime.listing import Listed, Missed, Unlisted
from runtime.logs import log_event
from runtime.process import end_process
from runtime.redis_address import EMBEDDED
from runtime.registry_server import RegistryHandler, report
from runtime.session import Peer
from runtime.session_driver import surface

_LOG: Final = logging.getLogger(__name__)
_PAGES_S: Final = 3.0  # for the parent to answer, which itself gives the others a second
_TELL_S: Final = 0.015  # what clients had in it is told at once: each message is work for every worker
_MOST_UNREAD_BYTES: Final = 1 << 20  # that wait for the parent; beyond it what can wait does


class Counts(Protocol):
    """Of this worker's metrics what the parent has it count."""

    def refused_grpc(self, number: int) -> None:
        """Connections to the registry."""

    def count_registry(self, name: str, number: int) -> None:
        """What was met in a shared one."""


class WorkerEnd:
    """One worker's link, from its first message on."""

    def __init__(self, listener: socket.socket, end: socket.socket) -> None:
        settings = read_blocking(end).settings
        self.index = settings.index
        self.listener = listener
        self.config = from_json(RouterConfig, settings.config)
        self.registry = settings.registry
        self.pair_wait_s = settings.pair_wait_s
        # A parent of an older version, whose package was replaced under it, reads no Redis for its workers.
        self.is_told_nodes = settings.tells_nodes or self.config.registry == EMBEDDED
        self._end = end
        self._link: WorkerLink[pb.ToWorker, pb.FromWorker] | None = None
        self._handler: RegistryHandler | None = None
        self._own_page: Callable[[str], str] = str
        self._counts: Counts | None = None
        self._hear: Callable[[Taken], None] = _nobody
        self._untold: dict[tuple[str, What], Taken] = {}  # by client and kind
        self._questions: dict[int, asyncio.Future[dict[int, str]]] = {}
        self._num_questions = 0
        self._waiting: dict[str, asyncio.Task[dict[int, str]]] = {}  # by page: who has not asked yet
        self._asking: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by page

    async def open(
        self,
        handler: RegistryHandler,
        counts: Counts,
        own_page: Callable[[str], str],
        started: AsyncExitStack,
    ) -> None:
        """Listen to the parent from now on. `own_page`: this worker's part of a page, by its name."""
        self._handler, self._counts, self._own_page = handler, counts, own_page
        self._link = await WorkerLink[pb.ToWorker, pb.FromWorker].opened(pb.ToWorker.FromString, self._end)
        task = asyncio.create_task(self._read(), name="link to the parent")
        task.add_done_callback(surface)
        started.callback(self._link.close)
        started.callback(task.cancel)
        started.callback(self._tell_all)

    def say_up(self) -> None:
        """Connections are taken."""
        self._send(pb.FromWorker(up=True))

    def tell(self, taken: Taken) -> None:
        """Let the other workers know soon what a client has had here."""
        if not self._untold:
            asyncio.get_running_loop().call_later(_TELL_S, self._tell_if_read)
        key = taken.name, taken.what
        before = self._untold.get(key)
        self._untold[key] = taken if before is None else replace(taken, amount=before.amount + taken.amount)

    def _tell_if_read(self) -> None:
        if self._is_unread:
            asyncio.get_running_loop().call_later(_TELL_S, self._tell_if_read)
        else:
            self._tell_all()

    def _tell_all(self) -> None:
        for taken in self._untold.values():
            is_tokens = taken.what == "tokens"
            told = pb.ClientTook(name=taken.name, tokens=is_tokens, amount=taken.amount, limit=taken.limit)
            self._send(pb.FromWorker(took=told))
        self._untold.clear()

    @property
    def _is_unread(self) -> bool:
        """The parent has more to read than may wait for it."""
        return self._link is not None and self._link.num_unread > _MOST_UNREAD_BYTES

    def on_taken(self, hear: Callable[[Taken], None]) -> None:
        """Have `hear` called with what they tell."""
        self._hear = hear

    @property
    def num_remembered(self) -> int:
        """Pages that somebody asks for, or waits to."""
        return len(self._asking.keys() | self._waiting.keys())

    async def page_of_all(self, page: str) -> dict[int, str]:
        """Every worker's part of it, by worker; of those only that answer in time.

        One question at a time: whoever asks meanwhile shares the next one's answer, however many they are.
        """
        waiting = self._waiting.get(page)
        if waiting is None:
            waiting = self._waiting[page] = asyncio.create_task(self._ask_next(page), name=f"page {page}")
        return await asyncio.shield(waiting)

    async def _ask_next(self, page: str) -> dict[int, str]:
        try:
            async with self._asking[page]:
                del self._waiting[page]  # whoever comes from now on wants to know what is true then
                return await self._ask(page)
        finally:
            if page not in self._waiting:  # nobody wants the lock; clients name pages as they like
                del self._asking[page]

    async def _ask(self, page: str) -> dict[int, str]:
        self._num_questions += 1
        question, text = self._num_questions, self._own_page(page)
        if self._is_unread:
            log_event(_LOG, logging.WARNING, "page_of_one_worker_only", worker=self.index)
            return {self.index: text}
        answer: asyncio.Future[dict[int, str]] = asyncio.get_running_loop().create_future()
        self._questions[question] = answer
        self._send(pb.FromWorker(want_page=pb.WorkerPage(question=question, page=page, text=text)))
        try:
            return await asyncio.wait_for(answer, _PAGES_S)
        except TimeoutError:
            log_event(_LOG, logging.WARNING, "page_of_one_worker_only", worker=self.index)
            return {self.index: text}
        finally:
            del self._questions[question]

    def _send(self, message: pb.FromWorker) -> None:
        assert self._link is not None
        self._link.send(message)

    async def _read(self) -> None:
        """Until the parent has gone; then the kernel ends this process."""
        assert self._link is not None
        while (message := await self._link.read()) is not None:
            match message.WhichOneof("kind"):
                case "tell_page":
                    wanted = message.tell_page
                    answer = pb.WorkerPage(question=wanted.question, text=self._own_page(wanted.page))
                    self._send(pb.FromWorker(page=answer))
                case "pages":
                    waiter = self._questions.get(message.pages.question)
                    if waiter is not None and not waiter.done():
                        waiter.set_result(dict(message.pages.texts))
                case "took":
                    took = message.took
                    self._hear(Taken(took.name, "tokens" if took.tokens else "requests", took.amount, took.limit))
                case "ping":
                    self._send(pb.FromWorker(pong=True))
                case _:
                    self._hear_of_registry(message)

    def _hear_of_registry(self, message: pb.ToWorker) -> None:
        assert self._handler is not None and self._counts is not None
        match message.WhichOneof("kind"):
            case "listed":
                report(self._handler, [Listed(message.listed)])
            case "missed":
                report(self._handler, [Missed(_peer(message.missed))])
            case "unlisted":
                report(self._handler, [Unlisted(_peer(message.unlisted))])
            case "refused_grpc":
                self._counts.refused_grpc(message.refused_grpc)
            case "registry":
                self._counts.count_registry(message.registry.what, message.registry.number)


def _nobody(taken: Taken) -> None:
    """There are no keys here, or not yet."""


def _peer(node: pb.PeerId) -> Peer:
    return Peer(node.name, node.incarnation)


def main(argv: Sequence[str]) -> int:
    """Run a worker until a signal."""
    set_grpc_environment()
    listener, end = (socket.socket(fileno=int(number)) for number in argv)
    for inherited in (listener, end):
        os.set_inheritable(inherited.fileno(), False)
    with loading():
        from router.process import run_router

    worker = WorkerEnd(listener, end)
    return run_router(worker.config, worker)


if __name__ == "__main__":
    end_process(lambda: main(sys.argv[1:]))
