"""One grammar's process, as the node has it: what may follow is asked by row, what is wrong with a beginning by check.

A row's question is sent as soon as its token is drawn, and its answer read when the next one is to be drawn: it is found out beside
the step. A step waits no longer than the book says (grammar_book.py); then there is a verdict, and the process is somebody
else's to kill (grammar_processes.py). Not here: what the process does (grammar_process.py).
"""

from __future__ import annotations

import json
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.plan import Grammar
from node.grammar_book import STALL_S, TOKEN_S, Patience, Verdict
from node.grammar_lines import MAX_BYTES, Asks, Outcome, Ready, Told, allowed_of, asked, opening, read_ready, read_told
from runtime.process import computed_s

COMPILE_S: Final = 5.0  # that it may compute until it has compiled; some a second, nearly all milliseconds
COMPILE_WAIT_S: Final = 9.0  # by the clock, and less than others wait for the thread: it is the node that is slow
CHECK_S: Final = 5.0  # for the beginning of a completion, by the clock


class _Ask(NamedTuple):
    at: float
    cpu_s: float  # what the process had computed then
    num_tokens: int  # that it was given


class AskedProcess:
    """One grammar's. Rows are the runner's thread's alone, checks whoever's holds the lock."""

    def __init__(self, grammar: Grammar, number: int, vocab_size: int) -> None:
        self.grammar = grammar
        self.number = number
        self.vocab_size = vocab_size
        self._checks, self._checks_there = socket.socketpair()
        self._rows, self._rows_there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._rows.setblocking(False)
        self._lock = threading.Lock()  # of the checks
        self._unread = b""  # of its answers to checks, what nobody has read yet
        weakref.finalize(self, _close, self._checks, self._rows)  # nobody waits at them any more
        self._told: dict[int, Told | None] = {}  # by open row, what nobody has asked for yet
        self._ready: Ready | None = None  # it is compiling yet, as the rows know
        self._pid = 0  # the same, as either knows
        self.has_compiled = False  # as whoever checks knows
        self.why_not_begun = ""  # the same, of a process that could not be started
        self.compiles_too_long = False  # it has computed for all that it may, and has not
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
        self._checks.settimeout(CHECK_S)  # to be told what to do: it reads at once
        try:
            self._checks.sendall(json.dumps(asdict(self.grammar)).encode() + b"\n")
        except OSError:
            with self._lock, suppress(OSError):
                self.why_not_begun = self.why_not_begun or self._next_answer(lambda: CHECK_S)[0]
            raise

    def hang_up(self) -> None:
        """Let whoever waits at either end know."""
        for each in (self._checks, self._rows):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # it has been

    def check(self, generated_token_ids: Sequence[int]) -> str:
        """What is wrong; "" if nothing is. Raises TimeoutError, and OSError: it has ended."""
        with self._lock:
            if not self.has_compiled:
                if problem := self._compiled():
                    return problem
                self.has_compiled = True
            self._checks.sendall(json.dumps([*generated_token_ids]).encode() + b"\n")
            until = time.monotonic() + CHECK_S + TOKEN_S * len(generated_token_ids)
            problem, self._pid = self._next_answer(lambda: until - time.monotonic())
            return problem

    def _compiled(self) -> str:
        """What is wrong with the grammar, once it has compiled. Raises as check; of the time, what it has computed decides."""
        until = time.monotonic() + COMPILE_WAIT_S
        self.why_not_begun, pid = self._next_answer(lambda: until - time.monotonic())
        if self.why_not_begun:
            raise ConnectionRefusedError
        try:
            problem, self._pid = self._next_answer(lambda: min(COMPILE_S - computed_s(pid), until - time.monotonic()))
        except TimeoutError:
            self.compiles_too_long = computed_s(pid) >= COMPILE_S
            raise
        return problem

    def _next_answer(self, left_s: Callable[[], float]) -> tuple[str, int]:
        """Its next answer, and who it is. Raises TimeoutError once nothing is left of the time, and OSError: it has ended."""
        while b"\n" not in self._unread:
            if (wait_s := left_s()) <= 0:
                raise TimeoutError
            if _ready(self._checks, select.POLLIN, max(wait_s, 0.001)):
                data = self._checks.recv(MAX_BYTES)
                if not data:
                    raise ConnectionResetError
                self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        problem, pid = json.loads(line)
        return problem, pid

    def say(self, row: int, *messages: bytes) -> None:
        """Send messages of a row, the first of which opens it. OSError: it has ended, or takes nothing."""
        self._told.setdefault(row, None)
        ends_at = time.monotonic() + STALL_S
        for data in messages:
            while True:
                try:
                    self._rows.send(data)
                    break
                except BlockingIOError:
                    left_s = ends_at - time.monotonic()
                    ready = _ready(self._rows, select.POLLIN | select.POLLOUT, left_s)
                    if not ready or left_s <= 0:
                        raise TimeoutError from None
                    if ready & ~select.POLLOUT:  # it may wait for somebody who takes its answers
                        self._hear()

    @property
    def open_rows(self) -> set[int]:
        """Those that may be asked about."""
        return {*self._told}

    def forget(self, row: int) -> None:
        """Nobody asks for it any more: what was told of it, or is to be, is of no use."""
        self._told.pop(row, None)

    def answer(self, row: int, ask: _Ask) -> Told | None:
        """What may follow in a row that was asked about; None: it has ended, or is to be killed (`verdict`)."""
        while self._told[row] is None and self.verdict is Verdict.WAIT:
            if not self._hear():
                self._wait(ask)
        told, self._told[row] = self._told[row], None
        return told

    def _hear(self) -> bool:
        """Take an answer, if there is one, or that there will be none."""
        try:
            data = self._rows.recv(MAX_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.verdict = Verdict.LOST
        elif self._ready is None:
            self._ready = read_ready(data)
            self._pid = self._ready.pid
        else:
            told = read_told(data)
            if told.row in self._told:
                self._told[told.row] = told
            self.verdict = self._patience.answered(told.cost_s, told.num_tokens)
        return True

    def _wait(self, ask: _Ask) -> None:
        """Until there is something to read, or a verdict."""

        def spent() -> tuple[float, float, int]:
            since_s = ask.cpu_s if self._ready is None else max(ask.cpu_s, self._ready.cpu_s)
            return self.cpu_s() - since_s, time.monotonic() - ask.at, ask.num_tokens

        if not _ready(self._rows, select.POLLIN, self._patience.left_s(*spent())):
            self.verdict = self._patience.waiting(*spent())

    def cpu_s(self) -> float:
        """What it has computed; 0 as long as it compiles, which no step has asked for, and when it has ended."""
        return computed_s(self._pid)


def _ready(end: socket.socket, events: int, timeout_s: float) -> int:
    """Which of them have come; 0: none in time. Whatever the descriptor's number, unlike select."""
    poll = select.poll()
    poll.register(end, events)
    found = poll.poll(max(0.0, timeout_s) * 1000)
    return found[0][1] if found else 0


def _close(*ends: socket.socket) -> None:
    for end in ends:
        end.close()


class Row:
    """See engine.binding.Binding. Of the runner's thread."""

    def __init__(
        self, process: AskedProcess, row: int, generated_token_ids: list[int], heard: Callable[[AskedProcess], None]
    ) -> None:
        """`heard` is called when the process has been asked, and was answered, or has a verdict."""
        self._process = process
        self._row = row
        self._heard = heard
        self._is_asked = False
        self._is_over = False
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
        if token_id in self._process.grammar.end_token_ids:
            self.close()
        elif not self._is_over:
            self._ask = self._say(1, asked(self._row, Asks.WANTS_MASK, (token_id,)))

    def close(self) -> None:
        """See Binding. Whatever is drawn behind it is dropped."""
        if self._is_over:
            return
        if self._process.verdict is Verdict.WAIT:
            self._say(0, asked(self._row, Asks.ENDS))
        self._process.forget(self._row)
        self._mask, self._is_asked, self._is_over = None, False, True

    def _say(self, num_tokens: int, *messages: bytes) -> _Ask:
        self._is_asked, ask = True, _Ask(time.monotonic(), self._process.cpu_s(), num_tokens)
        try:
            self._process.say(self._row, *messages)
        except OSError:
            if self._process.verdict is Verdict.WAIT:
                self._process.verdict = Verdict.LOST
        return ask

    def _read(self) -> NDArray[np.bool_] | None:
        told = self._process.answer(self._row, self._ask)
        self._heard(self._process)
        if told is None or told.outcome is Outcome.NOTHING:
            return np.zeros(self._process.vocab_size, np.bool_)
        return None if told.outcome is Outcome.ANYTHING else allowed_of(told.mask, self._process.vocab_size)
