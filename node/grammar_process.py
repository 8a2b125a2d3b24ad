"""`python -m node.grammar_process FD`: loads xgrammar once, and is forked for each grammar, which the copy compiles and follows.

    node ──fork, kill──► this ──fork──► a process for each grammar
      '◄─────── what is wrong with a grammar; what may follow ──────┘

xgrammar can take for ever over a grammar that can be read in many ways, in C++ that nobody can interrupt, or as much memory: in a
process of its own that costs nobody else anything, and the process can be killed. It ends with the node's end of its sockets; one
that is computing then is killed by the kernel when the process that forked it ends, which computes nothing and so ends at once.
This one has no threads, so that a fork has all there is. Not here: which grammars, and for how long (node/grammar_book.py).
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NoReturn

from engine.grammars import Constraint, GrammarError, Grammars
from engine.plan import Grammar
from node.grammar_lines import MAX_BYTES, Asks, read_asked, ready, told
from runtime.collecting import loading
from runtime.process import die_with_parent

MAX_GROWTH_BYTES: Final = 1 << 30  # of a grammar's process, beyond what is there when it begins
_MAX_CONTROL_BYTES: Final = 1 << 16
_PAGE: Final = resource.getpagesize()
# What the node's end of a socket says when it has gone; the latter, also to who reads, where it had not read all of what came.
_GONE: Final = (BrokenPipeError, ConnectionResetError)


def main() -> NoReturn:
    """Serve until the socket ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # of a terminal or a service manager, who mean the node
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    job: dict[str, Any] = json.loads(control.recv(_MAX_CONTROL_BYTES))
    grammars = Grammars(Path(job["directory"]), job["vocab_size"])
    problem = ""
    _silence_libraries()
    _leave_out_transformers()
    try:
        with loading():
            grammars.open()
    except GrammarError as error:
        problem = str(error)
    with suppress(*_GONE):
        control.send(json.dumps(problem).encode())
        if not problem:
            gc.collect()
            gc.freeze()  # the pages of what is there stay shared
            _fork_and_kill(control, grammars)
    os._exit(0)  # there is nothing to undo, and torch takes a second for it


def _silence_libraries() -> None:
    """Let only Python be heard: xgrammar's warnings have all of a grammar, for each place in it: gigabytes of a client's text."""
    sys.stderr = os.fdopen(os.dup(sys.stderr.fileno()), "w", buffering=1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)
    os.close(nowhere)


def _leave_out_transformers() -> None:
    """xgrammar takes a few type names of it and no more, and it takes longer to load than all else here."""
    sys.modules["transformers"] = _TypeNames("transformers")


class _TypeNames(ModuleType):
    """Has a type of any name."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _fork_and_kill(control: socket.socket, grammars: Grammars) -> None:
    pids: dict[int, int] = {}  # by the node's number for it; nobody else has the pid until it is reaped here
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, _MAX_CONTROL_BYTES, 2)
        while pids and (ended := os.waitpid(-1, os.WNOHANG)[0]):
            pids = {number: pid for number, pid in pids.items() if pid != ended}
        if not data:
            return
        asked = json.loads(data)
        if "kill" in asked:
            if (pid := pids.pop(asked["kill"], 0)) != 0:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)  # at once: nothing of it is left then
            continue
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:  # a limit of processes, or of memory
            _cannot_begin(descriptors[0], os.strerror(error.errno or 0))
            pid = -1
        if not pid:
            control.close()
            _be_forked(parent, grammars, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        if pid > 0:
            pids[asked["fork"]] = pid


def _cannot_begin(checks_fd: int, why: str) -> None:
    """Tell the node that nobody follows this grammar, which is not to blame."""
    with suppress(*_GONE):
        os.write(checks_fd, json.dumps([why, 0]).encode() + b"\n")


def most_memory(num_bytes: int, hard_limit: int) -> int:
    """Bytes of addresses that a grammar's process may have, which begins with so many; `ulimit -v` may be the stricter one."""
    most = num_bytes + MAX_GROWTH_BYTES
    return most if hard_limit == resource.RLIM_INFINITY else min(most, hard_limit)


def _be_forked(parent_pid: int, grammars: Grammars, checks_fd: int, rows_fd: int) -> NoReturn:
    """Be a grammar's process, to the end: nothing of what forked it is undone."""
    code = 1
    try:
        die_with_parent(parent_pid)
        num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        most = most_memory(num_pages * _PAGE, resource.getrlimit(resource.RLIMIT_AS)[1])
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        sys.setswitchinterval(0.0005)  # a step waits for one of the two threads
        GrammarProcess(grammars, socket.socket(fileno=checks_fd), socket.socket(fileno=rows_fd)).run()
        code = 0
    finally:
        if code:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(code)


class GrammarProcess:
    """One grammar's: compiles it and checks beginnings of completions in one thread, follows rows in the other."""

    def __init__(self, grammars: Grammars, checks: socket.socket, rows: socket.socket) -> None:
        self._grammars = grammars
        self._checks = checks
        self._rows = rows
        self._grammar: Grammar | None = None
        self._has_compiled = threading.Event()

    def run(self) -> None:
        """Until the node has closed its ends, or the grammar cannot be followed."""
        try:
            threading.Thread(target=self._check, daemon=True).start()
        except RuntimeError as error:  # a limit of processes, which threads count for
            return _cannot_begin(self._checks.fileno(), str(error))
        self._has_compiled.wait()
        with suppress(*_GONE):
            self._follow()

    def _check(self) -> None:
        code = 1
        try:
            lines = self._checks.makefile("rb")
            if (first := lines.readline()) and self._compile(Grammar(**json.loads(first))):
                for line in lines:
                    self._answer(json.loads(line))
            code = 0
        except _GONE:
            code = 0
        finally:
            if code:
                traceback.print_exc()
                sys.stderr.flush()
            os._exit(code)

    def _compile(self, grammar: Grammar) -> bool:
        """Say what is wrong with it; whether it can be followed."""
        self._grammar = grammar
        self._tell("")  # that it has begun
        is_followed = self._answer([])
        if is_followed:
            self._has_compiled.set()
        return is_followed

    def _answer(self, generated_token_ids: list[int]) -> bool:
        """Say what is wrong with a completion that begins like this; whether nothing is."""
        assert self._grammar is not None
        problem = ""
        try:
            self._grammars.check(self._grammar, generated_token_ids)
        except GrammarError as error:
            problem = str(error)
        self._tell(problem)
        return not problem

    def _tell(self, problem: str) -> None:
        self._checks.sendall(json.dumps([problem, os.getpid()]).encode() + b"\n")

    def _follow(self) -> None:
        assert self._grammar is not None
        rows: dict[int, Constraint] = {}
        num_tokens = 0  # since the last answer
        self._rows.send(ready(os.getpid(), time.process_time()))
        began_s = time.thread_time()
        while data := self._rows.recv(MAX_BYTES):
            row, asks, token_ids = read_asked(data)
            if asks & Asks.ENDS:
                rows.pop(row, None)
                continue
            if asks & Asks.BEGINS:
                rows[row] = self._grammars.constraint(self._grammar)
            for token_id in token_ids:
                rows[row].add(token_id)
            num_tokens += len(token_ids)
            if asks & Asks.WANTS_MASK:
                allowed, ended_s = rows[row].allowed_bits(), time.thread_time()
                self._rows.send(told(row, allowed, ended_s - began_s, num_tokens))
                began_s, num_tokens = ended_s, 0


if __name__ == "__main__":
    main()
