"""The processes of a node's grammars, as the node has them: started with the first grammar, asked, waited for so long, killed.

    threads that compile ──► check ──► a grammar's process ◄── add, allowed ── the runner's thread

What may follow a token is asked as soon as the token is drawn, and read when the next one is to be drawn: it is found out beside
the step. A step waits no longer than the book says; then the process is killed, and its rows get no token: stalled, where the
grammar is to blame, and otherwise broken, so that they go on elsewhere. Not here: what the processes do (grammar_process.py).
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import IO, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.binding import Nothing
from engine.grammars import GrammarError
from engine.plan import Grammar
from node.grammar_book import STALL_CPU_S, STALL_S, GrammarBook, GrammarsBusyError, Patience, Verdict
from node.grammar_lines import MAX_BYTES, Asks, Outcome, Ready, Told, allowed_of, asked, opening, read_ready, read_told
from runtime.config import child_environment
from runtime.logs import log_event

LOG: Final = logging.getLogger(__name__)
_ROOT: Final = Path(__file__).resolve().parent.parent
COMPILE_S: Final = 5.0  # some a second, nearly all milliseconds
LOAD_S: Final = 120.0  # seconds, once: xgrammar is loaded, and the vocabulary read
END_TIMEOUT_S: Final = 2.0
USED_EVERY_S: Final = 1.0  # the book is told of a process's use
TOO_SLOW: Final = "it can be read in too many ways: a step had to wait for it too long"


class _Ask(NamedTuple):
    at: float
    cpu_s: float  # what the process had computed then
    num_tokens: int  # that it was given


class _Process:
    """One grammar's. Rows are the runner's thread's alone, checks whoever's holds the lock."""

    def __init__(self, grammar: Grammar, number: int, vocab_size: int) -> None:
        self.grammar = grammar
        self.number = number
        self.vocab_size = vocab_size
        self._checks, self._checks_there = socket.socketpair()
        self._rows, self._rows_there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._rows.setblocking(False)
        self._lock = threading.Lock()  # of the checks
        self._lines = self._checks.makefile("rb")
        weakref.finalize(self, _close, self._lines, self._checks, self._rows)  # nobody waits at them any more
        self._told: dict[int, Told] = {}  # by row, what nobody has asked for yet
        self._ready: Ready | None = None  # it is compiling yet, as the rows know
        self._pid = 0  # the same, as either knows
        self.has_compiled = False  # as whoever checks knows
        self._patience = Patience()
        self.used_at = 0.0
        self.verdict = Verdict.WAIT  # of the process: once it is another, it is killed

    def descriptors_there(self) -> list[int]:
        """The other ends."""
        return [self._checks_there.fileno(), self._rows_there.fileno()]

    def begin(self) -> None:
        """Have it compile; the other ends are somebody else's. OSError: nobody's."""
        self._checks_there.close()
        self._rows_there.close()
        self._checks.settimeout(STALL_S)
        self._checks.sendall(json.dumps(asdict(self.grammar)).encode() + b"\n")

    def hang_up(self) -> None:
        """Let whoever waits at either end know."""
        for each in (self._checks, self._rows):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # it has been

    def check(self, generated_token_ids: Iterable[int]) -> str:
        """What is wrong; "" if nothing is. Raises TimeoutError, and OSError: it has ended."""
        with self._lock:
            self._checks.settimeout(COMPILE_S)
            if not self.has_compiled:
                if problem := self._read_problem():
                    return problem
                self.has_compiled = True
            self._checks.sendall(json.dumps([*generated_token_ids]).encode() + b"\n")
            return self._read_problem()

    def _read_problem(self) -> str:
        answer = self._lines.readline()
        if not answer.endswith(b"\n"):
            raise ConnectionResetError
        problem: str
        problem, self._pid = json.loads(answer)
        return problem

    def say(self, data: bytes) -> None:
        """Send a message of a row. OSError: it has ended, or takes nothing."""
        ends_at = time.monotonic() + STALL_S
        while True:
            try:
                self._rows.send(data)
            except BlockingIOError:
                left_s = ends_at - time.monotonic()
                if left_s <= 0 or not select.select([], [self._rows], [], left_s)[1]:
                    raise TimeoutError from None
            else:
                return

    def forget(self, row: int) -> None:
        """What was told of it is of no use."""
        self._told.pop(row, None)

    def answer(self, row: int, ask: _Ask) -> Told | None:
        """What may follow in a row that was asked about; None: it has ended, or is to be killed (`verdict`)."""
        while row not in self._told:
            if self.verdict is not Verdict.WAIT:
                return None
            try:
                data = self._rows.recv(MAX_BYTES)
            except BlockingIOError:
                self._wait(ask)
                continue
            except OSError:
                data = b""
            if not data:
                self.verdict = Verdict.LOST
                return None
            if self._ready is None:
                self._ready = read_ready(data)
                self._pid = self._ready.pid
            else:
                told = read_told(data)
                self._told[told.row] = told
                self.verdict = self._patience.answered(told.cost_s, told.num_tokens)
        return self._told.pop(row)

    def _wait(self, ask: _Ask) -> None:
        """Until there is something to read, or a verdict."""

        def spent() -> tuple[float, float, int]:
            since_s = ask.cpu_s if self._ready is None else max(ask.cpu_s, self._ready.cpu_s)
            return self.cpu_s() - since_s, time.monotonic() - ask.at, ask.num_tokens

        if not select.select([self._rows], [], [], self._patience.left_s(*spent()))[0]:
            self.verdict = self._patience.waiting(*spent())

    def cpu_s(self) -> float:
        """What it has computed; 0 as long as it compiles, which no step has asked for, and when it has ended."""
        if not self._pid:
            return 0.0
        try:
            return time.clock_gettime((~self._pid << 3) | 2)  # its clock: linux/posix-timers.h
        except OSError:
            return 0.0


def _close(*ends: IO[bytes] | socket.socket) -> None:
    for end in ends:
        end.close()


class _Row:
    """See engine.binding.Binding. Of the runner's thread."""

    def __init__(self, owner: GrammarProcesses, process: _Process, row: int, generated_token_ids: list[int]) -> None:
        self._owner = owner
        self._process = process
        self._row = row
        self._is_asked = False
        self._mask: NDArray[np.bool_] | None = None
        self._ask = self._say(len(generated_token_ids), *opening(row, generated_token_ids))

    @property
    def is_stalled(self) -> bool:
        """See Binding."""
        return self._process.verdict is Verdict.STALLED

    def allowed(self) -> NDArray[np.bool_] | None:
        """See Binding."""
        if self._is_asked:
            self._mask, self._is_asked = self._read(), False
        return self._mask

    def add(self, token_id: int) -> None:
        """See Binding."""
        self._ask = self._say(1, asked(self._row, Asks.WANTS_MASK, (token_id,)))

    def close(self) -> None:
        """See Binding."""
        if self._process.verdict is Verdict.WAIT:
            self._say(0, asked(self._row, Asks.ENDS))
        self._process.forget(self._row)

    def _say(self, num_tokens: int, *messages: bytes) -> _Ask:
        self._is_asked, ask = True, _Ask(time.monotonic(), self._process.cpu_s(), num_tokens)
        try:
            for message in messages:
                self._process.say(message)
        except OSError:
            if self._process.verdict is Verdict.WAIT:
                self._process.verdict = Verdict.LOST
        return ask

    def _read(self) -> NDArray[np.bool_] | None:
        told = self._process.answer(self._row, self._ask)
        self._owner.heard(self._process)
        if told is None or told.outcome is Outcome.NOTHING:
            return np.zeros(self._process.vocab_size, np.bool_)
        return None if told.outcome is Outcome.ANYTHING else allowed_of(told.mask, self._process.vocab_size)


class GrammarProcesses:
    """Of one model's vocabulary. Any thread may call any method; one thread at a time has rows."""

    def __init__(self, directory: Path, vocab_size: int) -> None:
        """`directory`: the model's; nothing is started before the first grammar. `vocab_size`: of the logits."""
        self._directory = directory
        self._vocab_size = vocab_size
        self._book: GrammarBook[_Process] = GrammarBook()
        self._lock = threading.Lock()  # of the book
        self._opening = threading.Lock()
        self._control: socket.socket | None = None
        self._forker: subprocess.Popen[bytes] | None = None
        self._numbers = count()
        self._rows = count()

    # ---------------------------------------------------------------- the process that forks

    @property
    def pid(self) -> int | None:
        """Of the process that forks; None: there is none."""
        return None if self._forker is None else self._forker.pid

    def open(self) -> None:
        """Have xgrammar loaded, which takes seconds the first time; raises GrammarError if it, or the vocabulary, is missing."""
        if importlib.util.find_spec("xgrammar") is None:
            raise GrammarError("this node has no xgrammar (pip install 'baton[structured]')")
        with self._opening:
            if self._forker is not None and self._forker.poll() is None:
                return
            self._end()
            own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            environment = child_environment(1)
            environment["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *filter(None, [environment.get("PYTHONPATH")])])
            with theirs:
                forker = subprocess.Popen(
                    [sys.executable, "-P", "-m", "node.grammar_process", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=sys.stderr.fileno(),
                    pass_fds=(theirs.fileno(),),
                    env=environment,
                )
            self._forker, self._control = forker, own
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

    def close(self) -> None:
        """End all processes."""
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

    def check(self, grammar: Grammar, generated_token_ids: Iterable[int] = ()) -> None:
        """Compile it, try it, and follow it along a completion; raises GrammarError if nothing can follow, or too slowly.

        GrammarsBusyError: too many others are followed.
        """
        process = self._find(grammar)
        cpu_then_s = process.cpu_s()
        try:
            problem = process.check(generated_token_ids)
        except TimeoutError:
            cpu_s = process.cpu_s() - cpu_then_s
            self._drop(process)
            if not process.has_compiled:
                raise GrammarError(f"it takes longer than {COMPILE_S:g} s to compile") from None
            if cpu_s < STALL_CPU_S:
                raise GrammarsBusyError("the process of its grammar does not answer") from None
            raise GrammarError(TOO_SLOW) from None
        except OSError:
            raise self._reason(process) from None
        if problem:
            if not process.has_compiled:
                self._drop(process)  # it has ended
            raise GrammarError(problem)

    def _reason(self, process: _Process) -> GrammarError | GrammarsBusyError:
        """Why a process has ended that was asked."""
        was, forker = process.verdict, self._forker
        self._drop(process)
        if was is Verdict.STALLED:
            return GrammarError(TOO_SLOW)
        if was is Verdict.LOST or process.has_compiled or forker is None or forker.poll() is not None:
            return GrammarsBusyError("the process of its grammar was ended meanwhile")
        return GrammarError("it ended the process that compiled it")

    def constraint(self, grammar: Grammar, generated_token_ids: Iterable[int] = ()) -> _Row | Nothing:
        """See Binder. Its process is there, unless it was forgotten; then it is begun, and the row's first step waits for it."""
        try:
            process = self._find(grammar)
        except (GrammarError, GrammarsBusyError) as error:
            return Nothing(isinstance(error, GrammarError), self._vocab_size)
        return _Row(self, process, next(self._rows) % (1 << 32), [*generated_token_ids])

    def heard(self, process: _Process) -> None:
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

    def _find(self, grammar: Grammar) -> _Process:
        with self._lock:
            if self._book.is_refused(grammar):
                raise GrammarError(TOO_SLOW)
            now = time.monotonic()
            found = self._book.find(grammar, now)
            if found is not None:
                return found
            process = _Process(grammar, next(self._numbers), self._vocab_size)
            gone = self._book.add(grammar, process, now)
        if gone is not None:
            self._drop(gone)
        self._tell({"fork": process.number}, process.descriptors_there())
        try:
            process.begin()
        except OSError:
            raise self._reason(process) from None
        return process

    def _drop(self, process: _Process) -> None:
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
