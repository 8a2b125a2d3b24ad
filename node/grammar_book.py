"""Which grammars have a process, which are refused, and for how long a step waits for one. Pure.

A grammar has one process at most, and a node so many at most: for another one the process goes that nobody has used for longest,
if nobody has for a while; a completion that is still bound by it starts it anew. One that nobody has used for long goes by itself.
A grammar that held up a step is remembered.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from enum import Enum, auto
from typing import Final, Generic, TypeVar

from engine.plan import Grammar

MAX_PROCESSES: Final = 64  # a few megabytes each, and what xgrammar compiles
QUIET_S: Final = 10.0  # who was asked within it has a row in a step, or will have
IDLE_S: Final = (
    600.0  # a row that was asked no later is left by all, most likely, and most grammars compile in milliseconds
)
MAX_REFUSED: Final = 1024
# What follows a token is known within a millisecond, and mostly microseconds. A grammar may compute so much longer than that, at
# once or little by little, and is lost in itself then.
STALL_CPU_S: Final = 0.5
ANSWER_S: Final = 0.005  # that are nobody's business, for each answer
TOKEN_S: Final = (
    0.001  # and for each token taken: a row that goes on here begins with many, of which none takes half of that
)
STALL_S: Final = 2.0  # for a step to wait, whatever the reason: the machine may be busy with others

W = TypeVar("W")


class Verdict(Enum):
    """Of a process that has not answered yet."""

    WAIT = auto()
    STALLED = auto()  # its grammar takes too long: nobody is to try it again
    LOST = auto()  # it is not the grammar's doing, or nobody knows: elsewhere, or later, it may do


class Patience:
    """With one process: what it has computed beyond what an answer may cost, and how much more it may."""

    def __init__(self) -> None:
        self._spent_s = 0.0

    def answered(self, cost_s: float, num_tokens: int) -> Verdict:
        """It has told what may follow, having computed for so long, and taken so many tokens."""
        self._spent_s = max(0.0, self._spent_s + cost_s - ANSWER_S - TOKEN_S * num_tokens)
        return _too_long(num_tokens) if self._spent_s >= STALL_CPU_S else Verdict.WAIT

    def waiting(self, cpu_s: float, waited_s: float, num_tokens: int) -> Verdict:
        """It has not; `cpu_s`: what it has computed, and `waited_s`: what has gone by since it was asked, with so many tokens."""
        if self._left_s(cpu_s, num_tokens) <= 0:
            return _too_long(num_tokens)
        return Verdict.LOST if waited_s >= STALL_S else Verdict.WAIT

    def left_s(self, cpu_s: float, waited_s: float, num_tokens: int) -> float:
        """Until that can change; at least a millisecond."""
        return max(0.001, min(self._left_s(cpu_s, num_tokens), STALL_S - waited_s))

    def _left_s(self, cpu_s: float, num_tokens: int) -> float:
        return check_cpu_s(num_tokens) - self._spent_s - cpu_s


def check_cpu_s(num_tokens: int) -> float:
    """What the check of a beginning of so many tokens may compute: all that following them may."""
    return STALL_CPU_S + ANSWER_S + TOKEN_S * num_tokens


def _too_long(num_tokens: int) -> Verdict:
    """Of who took so many tokens at once. Of those that came one by one nobody had reason to complain: others go by them."""
    return Verdict.STALLED if num_tokens <= 1 else Verdict.LOST


class GrammarsBusyError(Exception):
    """Not now: one sentence."""


class GrammarBook(Generic[W]):
    """The processes of one node, by grammar. `now`: seconds, of any clock that never goes back."""

    def __init__(self, max_processes: int = MAX_PROCESSES, max_refused: int = MAX_REFUSED) -> None:
        self._max_processes = max_processes
        self._max_refused = max_refused
        self._used: OrderedDict[Grammar, tuple[W, float]] = OrderedDict()  # the longest unused first
        self._refused: OrderedDict[bytes, None] = OrderedDict()  # digests: a client's text may be long, and is to go

    def __len__(self) -> int:
        return len(self._used)

    def find(self, grammar: Grammar, now: float) -> W | None:
        """Its process, used now."""
        if grammar not in self._used:
            return None
        process, _ = self._used[grammar]
        self.used(grammar, process, now)
        return process

    def used(self, grammar: Grammar, process: W, now: float) -> None:
        """It was asked now; one that is not in the book any more is not put back."""
        if grammar in self._used and self._used[grammar][0] is process:
            self._used[grammar] = (process, now)
            self._used.move_to_end(grammar)

    def add(self, grammar: Grammar, process: W, now: float) -> W | None:
        """One more, of a grammar that has none; returns the one that goes for it. Raises GrammarsBusyError."""
        gone: W | None = None
        if len(self._used) >= self._max_processes:
            oldest, (gone, used_at) = next(iter(self._used.items()))
            if now - used_at < QUIET_S:
                raise GrammarsBusyError("too many other grammars are followed")
            del self._used[oldest]
        self._used[grammar] = (process, now)
        return gone

    def forget(self, grammar: Grammar, process: W) -> None:
        """It has ended, or is to; another of the same grammar stays."""
        if grammar in self._used and self._used[grammar][0] is process:
            del self._used[grammar]

    def take_idle(self, now: float) -> list[W]:
        """Those that nobody has used for long, of which none is in the book from now on."""
        gone: list[W] = []
        while self._used:
            oldest, (process, used_at) = next(iter(self._used.items()))
            if now - used_at < IDLE_S:
                break
            gone.append(process)
            del self._used[oldest]
        return gone

    def refuse(self, grammar: Grammar) -> None:
        """Nobody is to follow it again; the first of too many is forgotten."""
        digest = _digest(grammar)
        self._refused[digest] = None
        self._refused.move_to_end(digest)
        if len(self._refused) > self._max_refused:
            self._refused.popitem(last=False)

    def is_refused(self, grammar: Grammar) -> bool:
        """Whether it held up a step."""
        return bool(self._refused) and _digest(grammar) in self._refused

    def take_all(self) -> list[W]:
        """All processes, of which none is in the book from now on."""
        processes = [process for process, _ in self._used.values()]
        self._used.clear()
        return processes


def _digest(grammar: Grammar) -> bytes:
    """Of all that it is equal to another by."""
    form = f"{grammar.kind} {grammar.is_compact} {grammar.end_token_ids}\n"
    return hashlib.sha256((form + grammar.text).encode("utf-8", "surrogatepass")).digest()
