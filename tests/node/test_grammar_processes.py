"""Grammars in processes of their own: they allow what they allow here, and none of them can hold up whoever asks."""

from __future__ import annotations

import errno
import os
import random
import resource
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from engine.binding import Nothing
from engine.grammars import GrammarError, Grammars
from engine.plan import Grammar
from node import grammar_asked, grammar_book, grammar_processes
from node.grammar_book import STALL_S, GrammarsBusyError
from node.grammar_process import MAX_GROWTH_BYTES, most_memory
from node.grammar_processes import GrammarProcesses
from tests.architecture.source_tree import DEMO_MODEL
from tests.e2e.role_by_role import wait_until
from tests.stopping import stop

VOCAB_SIZE = 1536
END = 257
JSON = Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "string"}}}', True, (END,))
WORDS = Grammar("regex", "([a-z]{1,20} ){1,30}", False, (END,))
# Read in one way for four hundred letters, and in very many behind: nothing that is tried before it begins can tell.
SLOW_LATER = Grammar("regex", "[a-z]{400}([a-z]{1,99}){1,99}", False, (END,))

PATIENCE_S = 100.0


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a process stands still, nobody gives it up; what it has computed counts as ever."""
    for module in (grammar_asked, grammar_book, grammar_processes):
        monkeypatch.setattr(module, "STALL_S", PATIENCE_S)
    for name in ("COMPILE_S", "COMPILE_WAIT_S", "CHECK_S"):
        monkeypatch.setattr(grammar_asked, name, PATIENCE_S)


@pytest.fixture(scope="module")
def processes() -> Iterator[GrammarProcesses]:
    found = GrammarProcesses(DEMO_MODEL, VOCAB_SIZE)
    found.open()
    yield found
    found.close()


def checked(processes: GrammarProcesses, grammar: Grammar) -> grammar_asked.Row | Nothing:
    """A row of it, begun."""
    processes.check(grammar)
    return processes.constraint(grammar)


def pids_of(parent_pid: int) -> set[int]:
    return {int(pid) for pid in Path(f"/proc/{parent_pid}/task/{parent_pid}/children").read_text().split()}


@pytest.mark.covers("A14")
def test_rows_are_allowed_what_they_are_allowed_here_from_any_token_on(
    processes: GrammarProcesses, fresh_seed: int
) -> None:
    draw, here = random.Random(fresh_seed), Grammars(DEMO_MODEL, VOCAB_SIZE)
    for grammar in (JSON, WORDS):
        processes.check(grammar)
        own, far = here.constraint(grammar), processes.constraint(grammar)
        token_ids: list[int] = []
        while (allowed := own.allowed()) is not None and len(token_ids) < 60:
            told = far.allowed()
            assert told is not None and np.array_equal(told, allowed)
            assert np.array_equal(far.allowed(), allowed), "asked twice"  # type: ignore[arg-type]
            token_ids.append(int(draw.choice(np.flatnonzero(allowed))))
            own.add(token_ids[-1])
            far.add(token_ids[-1])
            if draw.random() < 0.1:
                processes.check(grammar, token_ids)
                far.close()
                far = processes.constraint(grammar, token_ids)
        ended = far.allowed()
        assert (ended is None) == (allowed is None)
        with pytest.raises(GrammarError, match="not the beginning"):
            processes.check(grammar, (END,))
        broken = processes.constraint(grammar, (END,))
        assert not broken.is_stalled
        assert (nothing := broken.allowed()) is not None and not nothing.any()


def stalled_at(processes: GrammarProcesses, letters: Sequence[int]) -> tuple[int, float]:
    """How many tokens a row took until it was refused, and the longest that one step waited."""
    row, longest_s = processes.constraint(SLOW_LATER), 0.0
    for num_tokens, token_id in enumerate(letters):
        began_s = time.monotonic()
        row.allowed()
        longest_s = max(longest_s, time.monotonic() - began_s)
        if row.is_stalled:
            row.add(token_id)  # the answer that was one too many may have come whole: nothing comes behind it
            assert (nothing := row.allowed()) is not None and not nothing.any()
            return num_tokens, longest_s
        row.add(token_id)
    raise AssertionError("it was followed to the end")


@pytest.mark.covers("A14")
def test_a_grammar_that_is_slow_only_later_costs_a_bounded_time_and_is_refused_from_then_on(
    processes: GrammarProcesses,
) -> None:
    processes.check(WORDS)
    before_pids = pids_of(processes.pid or 0)
    processes.check(SLOW_LATER)
    beside = processes.constraint(WORDS)
    before = beside.allowed()
    spelled = Grammars(DEMO_MODEL, VOCAB_SIZE)
    spelled.open()
    ids = np.flatnonzero(spelled.constraint(SLOW_LATER).allowed())  # type: ignore[arg-type]
    letters = [int(token_id) for token_id in random.Random(5).choices(ids.tolist(), k=400)]
    # By what it computed, as nobody is given up for anything else.
    num_tokens, longest_s = stalled_at(processes, letters)
    assert num_tokens > 100, "it was tried on more than it should be"
    wait_until("it is gone, and reaped", lambda: pids_of(processes.pid or 0) == before_pids)
    assert longest_s < PATIENCE_S / 2, "and of that the machine's own delays"
    with pytest.raises(GrammarError, match="too many ways"):
        processes.check(SLOW_LATER)
    again = processes.constraint(SLOW_LATER)
    assert again.is_stalled
    assert (nothing := again.allowed()) is not None and not nothing.any()
    assert np.array_equal(beside.allowed(), before)  # type: ignore[arg-type]
    beside.add(letters[0])
    assert (after := beside.allowed()) is not None and after.any()


@pytest.mark.covers("A14")
def test_a_process_that_does_not_answer_breaks_its_rows_which_go_on_in_another(
    processes: GrammarProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has computed nothing: that is no grammar's doing."""
    forker = processes.pid
    assert forker is not None
    others, letters = pids_of(forker), Grammar("regex", "[a-c]{9}", False, (END,))
    processes.check(letters)
    row = processes.constraint(letters)
    expected = row.allowed()
    for pid in pids_of(forker) - others:
        stop(pid)
    assert expected is not None
    row.add(int(expected.argmax()))
    began_s = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(grammar_book, "STALL_S", STALL_S)
        assert (nothing := row.allowed()) is not None and not nothing.any()
    assert time.monotonic() - began_s < PATIENCE_S / 2
    assert not row.is_stalled
    other = processes.constraint(letters)
    assert np.array_equal(other.allowed(), expected)  # type: ignore[arg-type]


@pytest.mark.covers("A14")
def test_the_process_that_forks_is_started_anew_and_all_end_with_the_node(processes: GrammarProcesses) -> None:
    processes.check(JSON)
    forker = processes.pid
    assert forker is not None
    descriptors = [os.pidfd_open(pid) for pid in (forker, *pids_of(forker))]
    assert len(descriptors) > 1
    row = processes.constraint(JSON)
    os.kill(forker, signal.SIGKILL)
    for descriptor in descriptors:
        assert select.select([descriptor], [], [], 60)[0], "it is still there"
        os.close(descriptor)
    assert row.allowed() is None or not row.is_stalled
    row.add(0)
    assert (nothing := row.allowed()) is not None and not nothing.any()
    with pytest.raises(GrammarsBusyError):
        processes.check(JSON)
    processes.open()
    processes.check(JSON)
    assert processes.pid != forker


def test_a_process_whose_node_has_gone_with_answers_unread_ends_without_a_word(
    capfd: pytest.CaptureFixture[str],
) -> None:
    own = GrammarProcesses(DEMO_MODEL, VOCAB_SIZE)
    own.open()
    own.check(JSON)
    assert own.pid is not None
    (pid,) = pids_of(own.pid)
    row = own.constraint(JSON)
    assert isinstance(row, grammar_asked.Row)
    end = row._process._rows
    assert select.select([end], [], [], 60)[0], "it has answered"
    descriptor = os.pidfd_open(pid)
    end.close()
    assert select.select([descriptor], [], [], 60)[0], "it is still there"
    os.close(descriptor)
    own.close()
    assert capfd.readouterr().err == ""


def test_a_grammar_that_cannot_be_compiled_is_told_in_one_sentence_each_time(processes: GrammarProcesses) -> None:
    for _ in range(2):
        with pytest.raises(GrammarError, match="Unclosed"):
            processes.check(Grammar("regex", "[a-z", False, (END,)))


def test_a_directory_without_tokenizer_says_so(tmp_path: Path) -> None:
    found = GrammarProcesses(tmp_path, VOCAB_SIZE)
    with pytest.raises(GrammarError, match=r"no tokenizer\.json"):
        found.open()
    found.close()


@pytest.mark.covers("A14")
@pytest.mark.parametrize("what", ["process", "socket"])
def test_what_cannot_be_started_now_is_a_sentence_and_is_tried_again(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = GrammarProcesses(DEMO_MODEL, VOCAB_SIZE)

    def lacks(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        if what == "process":
            patch.setattr(subprocess, "Popen", lacks)
            with pytest.raises(GrammarsBusyError, match="cannot be started: Too many open files"):
                found.open()
        else:
            found.open()
            patch.setattr(socket, "socketpair", lacks)
            with pytest.raises(GrammarsBusyError, match="cannot be asked for: Too many open files"):
                found.check(JSON)
            assert isinstance(found.constraint(JSON), Nothing)
    found.open()
    found.check(JSON)
    found.close()


_LIMITED: Final = """# Python runs it before anything else: a process that can be told to find the limit of processes reached.
import os, threading
def limited(begin, fault):
    return lambda *given: begin(*given) if not os.path.exists(os.environ["NO_MORE"]) else (_ for _ in ()).throw(fault)
if os.environ["LIMITED"] == "process":
    os.fork = limited(os.fork, BlockingIOError(11, ""))
else:
    threading._start_new_thread = limited(threading._start_new_thread, RuntimeError("no more"))
"""


@pytest.mark.covers("A14")
@pytest.mark.parametrize("late_s", [0.0, 0.3])  # the grammar is told when nobody is there any more
@pytest.mark.parametrize("what", ["process", "thread"])
def test_a_grammar_that_finds_the_limit_of_processes_reached_is_busy_and_costs_no_other_one_anything(
    what: str, late_s: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The process that forks ended of it, and all others with it; or a good grammar was answered 400."""
    (tmp_path / "sitecustomize.py").write_text(_LIMITED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("LIMITED", what)
    monkeypatch.setenv("NO_MORE", str(no_more := tmp_path / "no_more"))
    found = GrammarProcesses(DEMO_MODEL, VOCAB_SIZE)
    found.open()
    beside, forker = checked(found, WORDS), found.pid
    no_more.touch()
    begin = grammar_asked.AskedProcess.begin
    monkeypatch.setattr(grammar_asked.AskedProcess, "begin", lambda self: (threading.Event().wait(late_s), begin(self)))
    with pytest.raises(GrammarsBusyError, match=r"of its grammar cannot be started: \w"):
        found.check(JSON)
    lost = found.constraint(JSON)
    assert (nothing := lost.allowed()) is not None and not nothing.any() and not lost.is_stalled
    for _ in range(2):
        allowed = beside.allowed()
        assert allowed is not None and allowed.any()
        beside.add(int(allowed.argmax()))
    no_more.unlink()
    found.check(JSON)
    assert found.pid == forker
    found.close()
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.covers("A14")
def test_a_process_that_nobody_has_used_for_long_ends_by_itself_and_is_begun_anew_when_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A grammar that was asked for once had its memory for as long as the node lived."""
    monkeypatch.setattr(grammar_processes, "IDLE_LOOK_S", 0.01)
    monkeypatch.setattr(grammar_book, "IDLE_S", PATIENCE_S)
    found = GrammarProcesses(DEMO_MODEL, VOCAB_SIZE)
    found.open()
    forker = found.pid
    assert forker is not None
    allowed = (row := checked(found, JSON)).allowed()
    monkeypatch.setattr(grammar_book, "IDLE_S", 0.0)
    wait_until("it is gone, and reaped", lambda: not pids_of(forker))
    monkeypatch.setattr(grammar_book, "IDLE_S", PATIENCE_S)
    row.add(0)
    assert (nothing := row.allowed()) is not None and not nothing.any() and not row.is_stalled, "it goes on elsewhere"
    assert np.array_equal(checked(found, JSON).allowed(), allowed)  # type: ignore[arg-type]
    found.close()


@pytest.mark.covers("A14")
def test_what_compiles_too_slowly_is_nobodys_fault_where_its_completion_has_begun(
    processes: GrammarProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes.open()
    monkeypatch.setattr(grammar_asked, "COMPILE_S", 1e-4)
    with pytest.raises(GrammarError, match="to compile"):
        # A second, or its answer might be there first.
        processes.check(Grammar("regex", "[a-z ]{1,5000}", False, (END,)))
    with pytest.raises(GrammarsBusyError, match="to compile here"):
        processes.check(Grammar("regex", "[a-z ]{1,4999}", False, (END,)), (97,))


@pytest.mark.covers("A14")
def test_a_grammar_whose_process_is_given_no_time_to_compile_is_not_called_slow(
    processes: GrammarProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine is busy with others: another node, or this one a moment later, compiles it in time."""
    processes.open()
    assert processes.pid is not None
    grammar = Grammar("regex", "([a-z]{1,20} ){1,27}", False, (END,))
    with monkeypatch.context() as patch:
        patch.setattr(grammar_asked, "COMPILE_WAIT_S", 0.2)
        stop(processes.pid)
        try:
            with pytest.raises(GrammarsBusyError, match="to compile here"):
                processes.check(grammar)
        finally:
            os.kill(processes.pid, signal.SIGCONT)
    processes.check(grammar)


@pytest.mark.covers("A14")
def test_a_process_that_is_killed_as_it_compiles_is_not_taken_for_its_grammars_victim(
    processes: GrammarProcesses,
) -> None:
    """The kernel may kill it for want of memory; who does it twice is the grammar."""
    processes.open()
    forker = processes.pid
    assert forker is not None
    others = pids_of(forker)
    killed: list[int] = []

    def kill_the_next(number: int) -> None:
        while len(killed) < number:
            for pid in pids_of(forker) - others - {*killed}:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    for number, letters in ((1, 2000), (2, 9000)):
        killed.clear()
        killing = threading.Thread(target=kill_the_next, args=(number,))
        killing.start()
        slow = Grammar("regex", f"[a-z ]{{1,{letters}}}", False, (END,))  # to compile: a fifth of a second at least
        if number == 1:
            processes.check(slow)
        else:
            with pytest.raises(GrammarError, match="ended the process that compiled it"):
                processes.check(slow)
        killing.join()
        others = pids_of(forker)


def test_closing_waits_for_nothing_that_loads() -> None:
    loading = GrammarProcesses(DEMO_MODEL, VOCAB_SIZE)
    faults: list[Exception] = []

    def load() -> None:
        try:
            loading.open()
        except GrammarsBusyError as fault:
            faults.append(fault)

    thread = threading.Thread(target=load)
    thread.start()
    wait_until("it loads", lambda: loading.pid is not None)
    forker = os.pidfd_open(loading.pid or 0)
    loading.close()
    thread.join(60)
    assert [str(fault) for fault in faults] == ["the process that follows grammars did not start"]
    assert select.select([forker], [], [], 60)[0], "it is still there"
    os.close(forker)


def test_under_ulimit_v_a_grammar_has_the_memory_that_is_left() -> None:
    """Nobody but root may raise that limit: who tried ended, and a good grammar was refused."""
    assert most_memory(1 << 30, resource.RLIM_INFINITY) == (1 << 30) + MAX_GROWTH_BYTES
    assert most_memory(1 << 30, 1 << 40) == (1 << 30) + MAX_GROWTH_BYTES
    assert most_memory(1 << 30, 3 << 29) == 3 << 29
