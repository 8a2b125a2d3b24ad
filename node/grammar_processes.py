"""The processes of a node's grammars, as the node has them: started with the first grammar, found, killed.

    threads that compile ──► check ──► a grammar's process ◄── add, allowed ── the runner's thread

One that holds up a step for too long is killed, and its rows get no token: stalled, where the grammar is to blame, and otherwise
broken, so that they go on elsewhere. One that nobody has used for long is ended. Not here: how one is asked (grammar_asked.py), and
what it does (grammar_process.py).
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Final

from engine.binding import Nothing
from engine.grammars import GrammarError
from engine.plan import Grammar
from node.grammar_asked import COMPILE_S, COMPILE_WAIT_S, AskedProcess, Row
from node.grammar_book import STALL_S, GrammarBook, GrammarsBusyError, Verdict, check_cpu_s
from node.grammar_lines import MAX_BYTES
from runtime.config import child_environment
from runtime.logs import log_event
from runtime.threads import started_thread

LOG: Final = logging.getLogger(__name__)
_ROOT: Final = Path(__file__).resolve().parent.parent
LOAD_S: Final = 120.0  # seconds, once: xgrammar is loaded, and the vocabulary read
END_TIMEOUT_S: Final = 2.0
USED_EVERY_S: Final = 1.0  # the book is told of a process's use
IDLE_LOOK_S: Final = 30.0  # who has not been used for long is looked for
TOO_SLOW: Final = "it can be read in too many ways: a step had to wait for it too long"


class _EndedCompiling(GrammarError):
    """Its process has ended as it compiled: of the grammar, or of whatever else ends processes, such as want of memory."""

    def __init__(self) -> None:
        super().__init__("it ended the process that compiled it")


class GrammarProcesses:
    """Of one model's vocabulary. Any thread may call any method; one thread at a time has rows."""

    def __init__(self, directory: Path, vocab_size: int) -> None:
        """`directory`: the model's; nothing is started before the first grammar. `vocab_size`: of the logits."""
        self._directory = directory
        self._vocab_size = vocab_size
        self._book: GrammarBook[AskedProcess] = GrammarBook()
        self._lock = threading.Lock()  # of the book
        self._opening = threading.Lock()
        self._control: socket.socket | None = None
        self._forker: subprocess.Popen[bytes] | None = None
        self._numbers = count()
        self._rows = count()
        self._is_closed = threading.Event()
        self._idle_thread: Future[None] | None = None

    # ---------------------------------------------------------------- the process that forks

    @property
    def pid(self) -> int | None:
        """Of the process that forks; None: there is none."""
        return None if self._forker is None else self._forker.pid

    def open(self) -> None:
        """Have xgrammar loaded, which takes seconds the first time; raises GrammarError if it, or the vocabulary, is missing."""
        if importlib.util.find_spec("xgrammar") is None:
            raise GrammarError("this node has no xgrammar (pip install -c constraints.txt -e '.[structured]')")
        with self._opening:
            if self._forker is not None and self._forker.poll() is None:
                return
            self._end()
            try:
                self._forker, own = _start_forker()
            except OSError as error:  # no descriptor, no process or no memory left
                raise GrammarsBusyError(
                    f"the process that follows grammars cannot be started: {error.strerror}"
                ) from None
            self._control = own
            own.settimeout(LOAD_S)
            try:
                own.send(json.dumps({"directory": str(self._directory), "vocab_size": self._vocab_size}).encode())
                answer = own.recv(MAX_BYTES)
            except OSError:
                answer = b""
            if not answer:
                self._end()
                raise GrammarsBusyError("the process that follows grammars did not start")
            if problem := json.loads(answer):
                self._end()
                raise GrammarError(problem)
            own.settimeout(STALL_S)
            if self._idle_thread is None:
                with suppress(RuntimeError):  # a limit of processes: who opens next tries again
                    self._idle_thread = started_thread("grammars-idle", self._end_idle)

    def close(self) -> None:
        """End all processes, also one that loads yet, which `open` waits for."""
        self._is_closed.set()
        if (control := self._control) is not None:
            with suppress(OSError):
                control.shutdown(socket.SHUT_RDWR)
        with self._opening:
            self._end()

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._forker is not None:
            try:
                self._forker.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._forker.kill()
                self._forker.wait()
            self._forker = None
        with self._lock:
            left = self._book.take_all()
        for process in left:
            process.hang_up()

    # ---------------------------------------------------------------- grammars

    def check(self, grammar: Grammar, generated_token_ids: Sequence[int] = ()) -> None:
        """Compile it, try it, and follow it along a completion; raises GrammarError if nothing can follow, or too slowly.

        GrammarsBusyError: too many others are followed, or it may well be compiled in time elsewhere: its process was given too
        little time to compute, or its completion has begun, which shows that it was.
        """
        try:
            self._check(grammar, generated_token_ids)
        except _EndedCompiling:
            self._check(grammar, generated_token_ids)  # the grammar's doing, if it does so again

    def _check(self, grammar: Grammar, generated_token_ids: Sequence[int]) -> None:
        process = self._find(grammar)
        cpu_then_s = process.cpu_s()
        try:
            problem = process.check(generated_token_ids)
        except TimeoutError:
            cpu_s = process.cpu_s() - cpu_then_s
            self._drop(process)
            if not process.has_compiled and process.compiles_too_long and not generated_token_ids:
                raise GrammarError(f"it takes longer than {COMPILE_S:g} s to compile") from None
            if not process.has_compiled:
                most_s = COMPILE_S if process.compiles_too_long else COMPILE_WAIT_S
                raise GrammarsBusyError(f"its grammar takes longer than {most_s:g} s to compile here") from None
            if cpu_s < check_cpu_s(len(generated_token_ids)):
                raise GrammarsBusyError("the process of its grammar does not answer") from None
            raise GrammarError(TOO_SLOW) from None
        except OSError:
            raise self._reason(process) from None
        if problem:
            if not process.has_compiled:
                self._drop(process)  # it has ended
            raise GrammarError(problem)

    def _reason(self, process: AskedProcess) -> GrammarError | GrammarsBusyError:
        """Why a process has ended that was asked."""
        was, forker = process.verdict, self._forker
        self._drop(process)
        if was is Verdict.STALLED:
            return GrammarError(TOO_SLOW)
        if was is Verdict.LOST or process.has_compiled or forker is None or forker.poll() is not None:
            return GrammarsBusyError("the process of its grammar was ended meanwhile")
        if process.why_not_begun:
            return GrammarsBusyError(f"the process of its grammar cannot be started: {process.why_not_begun}")
        return _EndedCompiling()

    def constraint(self, grammar: Grammar, generated_token_ids: Iterable[int] = ()) -> Row | Nothing:
        """See Binder. Its process is there, unless it was forgotten; then it is begun, and the row's first step waits for it."""
        try:
            process = self._find(grammar)
        except (GrammarError, GrammarsBusyError) as error:
            return Nothing(isinstance(error, GrammarError), self._vocab_size)
        return Row(process, next(self._rows) % (1 << 32), [*generated_token_ids], self._heard)

    def _heard(self, process: AskedProcess) -> None:
        """A row has asked, and was answered, or its process is to be killed."""
        with self._lock:
            if process.verdict is Verdict.WAIT:
                if (now := time.monotonic()) > process.used_at + USED_EVERY_S:
                    process.used_at = now
                    self._book.used(process.grammar, process, now)
                return
            if process.verdict is Verdict.STALLED and not self._book.is_refused(process.grammar):
                self._book.refuse(process.grammar)
                log_event(LOG, logging.WARNING, "grammar_refused", kind=process.grammar.kind, reason="stalled a step")
        self._drop(process)

    def _find(self, grammar: Grammar) -> AskedProcess:
        with self._lock:
            if self._book.is_refused(grammar):
                raise GrammarError(TOO_SLOW)
            now = time.monotonic()
            found = self._book.find(grammar, now)
            if found is not None:
                return found
            try:
                process = AskedProcess(grammar, next(self._numbers), self._vocab_size)
            except OSError as error:
                raise GrammarsBusyError(f"its grammar cannot be asked for: {error.strerror}") from None
            gone = self._book.add(grammar, process, now)
        if gone is not None:
            self._drop(gone)
        self._tell({"fork": process.number}, process.descriptors_there())
        try:
            process.begin()
        except OSError:
            self._drop(process)  # it has not read the grammar, which is not to blame
            why = f"cannot be started: {process.why_not_begun}" if process.why_not_begun else "was ended meanwhile"
            raise GrammarsBusyError(f"the process of its grammar {why}") from None
        return process

    def _end_idle(self) -> None:
        while not self._is_closed.wait(IDLE_LOOK_S):
            with self._lock:
                idle = self._book.take_idle(time.monotonic())
            for process in idle:
                self._drop(process)

    def _drop(self, process: AskedProcess) -> None:
        with self._lock:
            self._book.forget(process.grammar, process)
        if process.verdict is Verdict.WAIT:
            process.verdict = Verdict.LOST
        process.hang_up()
        self._tell({"kill": process.number})

    def _tell(self, what: dict[str, int], descriptors: Iterable[int] = ()) -> None:
        """Where nobody is there, or listens, the other ends of a process's sockets are closed, which says it."""
        control = self._control
        try:
            if control is not None:
                socket.send_fds(control, [json.dumps(what).encode()], [*descriptors])
        except OSError as error:
            log_event(LOG, logging.WARNING, "grammars_lost", reason=error.strerror)


def _start_forker() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """And the socket to it. Raises OSError."""
    own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = child_environment(1)
    environment["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    try:
        with theirs:
            forker = subprocess.Popen(
                [sys.executable, "-P", "-m", "node.grammar_process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                pass_fds=(theirs.fileno(),),
                env=environment,
            )
    except OSError:
        own.close()
        raise
    return forker, own
