"""Asks grammars' processes beside the loop and the runner: bounded in time for who waits, and never in the middle of a step.

A thread waits while a grammar is compiled (node/grammar_processes.py, which ends what takes too long); with every thread waiting,
whoever else asks for a grammar is told to come back, and everybody without one is served as ever.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol, TypeVar

from engine.grammars import GrammarError
from engine.plan import Grammar
from node.grammar_book import GrammarsBusyError
from proto import baton_pb2 as pb
from runtime.threads import started_thread

NUM_THREADS: Final = 2
CHECK_S: Final = 30.0  # for all of a check, which is bounded itself: beyond it whoever asks hears that the node is slow
WAIT_S: Final = 10.0  # for a thread
OPEN_S: Final = 60.0  # a second, once: xgrammar is loaded, and the vocabulary read

T = TypeVar("T")


class Checks(Protocol):
    """Grammars as these threads need them."""

    def open(self) -> None:
        """Load what it takes. Raises GrammarError."""

    def check(self, grammar: Grammar, generated_token_ids: Sequence[int] = ()) -> None:
        """Compile it, and follow a completion. Raises GrammarError: nobody can; GrammarsBusyError: not now."""


class Flaw(NamedTuple):
    """Why a grammar cannot be followed."""

    code: pb.ErrorCode.ValueType  # INVALID, or BUSY
    reason: str


@dataclass(slots=True)
class _Job:
    grammar: Grammar
    generated_token_ids: tuple[int, ...]
    taken: Future[None] = field(default_factory=Future)  # by a thread
    begun: Future[None] = field(default_factory=Future)  # to be compiled
    done: Future[Flaw | None] = field(default_factory=Future)  # what is wrong with it


class GrammarThreads:
    """Over one model's grammars; made and stopped on the loop's thread. The threads start with the first grammar."""

    def __init__(
        self,
        grammars: Checks,
        check_s: float = CHECK_S,
        wait_s: float = WAIT_S,
        watch: Callable[[Future[None]], None] = lambda end: None,
    ) -> None:
        """`watch` is called on the loop's thread with the end of each thread that begins: none ends before `stop` but of a bug."""
        self._watch = watch
        self._grammars = grammars
        self._check_s = check_s
        self._wait_s = wait_s
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._ended: list[Future[None]] = []

    async def flaw(self, grammar: Grammar, generated_token_ids: tuple[int, ...] = ()) -> Flaw | None:
        """What is wrong with a grammar, or with a completion that begins like this; None: it is compiled, and can be followed."""
        if not self._has_threads():
            return Flaw(pb.BUSY, "no thread can be started here now, to compile its grammar")
        job = _Job(grammar, generated_token_ids)
        self._jobs.put(job)
        try:
            await _within(self._wait_s, job.taken)
        except TimeoutError:  # it is cancelled: no thread takes it any more
            return Flaw(pb.BUSY, "other requests' grammars are being compiled")
        try:
            await _within(OPEN_S, job.begun)
        except TimeoutError:
            return Flaw(pb.BUSY, "xgrammar is being loaded")
        try:
            return await _within(self._check_s, job.done)
        except TimeoutError:  # nothing says that the grammar is to blame: what it has computed, its process knows
            return Flaw(pb.BUSY, f"its grammar was not compiled within {self._check_s:g} s here")

    def _has_threads(self) -> bool:
        """Whether there are any, once those that are missing have been started, as far as the system lets it."""
        with suppress(RuntimeError):  # a limit of processes: some may do, and the next request tries again
            while len(self._ended) < NUM_THREADS:
                self._ended.append(started_thread(f"grammar-{len(self._ended)}", self._work))
                self._watch(self._ended[-1])
        return bool(self._ended)

    async def stop(self, timeout_s: float = 1.0) -> None:
        """End what is not compiling; a thread that is ends with the process."""
        for _ in self._ended:
            self._jobs.put(None)
        if self._ended:
            await asyncio.wait(list(map(asyncio.wrap_future, self._ended)), timeout=timeout_s)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not _tell(job.taken):
                continue
            flaw: Flaw | None = None
            try:
                self._grammars.open()
                _tell(job.begun)
                self._grammars.check(job.grammar, job.generated_token_ids)
            except GrammarError as error:
                flaw = Flaw(pb.INVALID, str(error))
            except GrammarsBusyError as error:
                flaw = Flaw(pb.BUSY, str(error))
            if not job.begun.done():
                _tell(job.begun)
            if job.done.set_running_or_notify_cancel():
                job.done.set_result(flaw)


async def _within(timeout_s: float, what: Future[T]) -> T:
    """Its result. TimeoutError: it was cancelled. wait_for would forget that it is cancelled itself where both come at once."""
    async with asyncio.timeout(timeout_s):
        return await asyncio.wrap_future(what)


def _tell(what: Future[None]) -> bool:
    """Say that it is so; False if nobody waits for it any more."""
    if not what.set_running_or_notify_cancel():
        return False
    what.set_result(None)
    return True
