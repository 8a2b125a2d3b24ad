"""Rows of a grammar's process, which the test plays: what is said when, what is kept, and that neither end waits for the other."""

from __future__ import annotations

import json
import os
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from engine.plan import Grammar
from node import grammar_asked
from node.grammar_asked import AskedProcess, Row
from node.grammar_book import Verdict
from node.grammar_lines import MAX_BYTES, Asked, Asks, read_asked, ready, told

VOCAB_SIZE = 128_000
END = 7
EVERYTHING = np.full(VOCAB_SIZE // 8, 0xFF, np.uint8)


@pytest.fixture
def process() -> AskedProcess:
    return AskedProcess(Grammar("regex", "a*", False, (END,)), 0, VOCAB_SIZE)


@contextmanager
def other_end(process: AskedProcess) -> Iterator[socket.socket]:
    """Of its rows, as the process has it once it has compiled."""
    checks, rows = (socket.socket(fileno=os.dup(each)) for each in process.descriptors_there())
    with checks, rows:
        process.begin()
        rows.send(ready(os.getpid(), 0.0))
        yield rows


def row_of(process: AskedProcess, number: int) -> Row:
    return Row(process, number, [], lambda process: None)


def next_asked(rows: socket.socket) -> Asked:
    return read_asked(rows.recv(MAX_BYTES))


@pytest.mark.covers("A14")
def test_a_row_ends_with_its_last_token_and_is_not_asked_about_again(process: AskedProcess) -> None:
    with other_end(process) as rows:
        row = row_of(process, 3)
        assert next_asked(rows) == (3, Asks.BEGINS | Asks.WANTS_MASK, [])
        rows.send(told(3, EVERYTHING, 0.0, 0))
        assert row.allowed() is not None
        row.add(5)
        assert next_asked(rows) == (3, Asks.WANTS_MASK, [5])
        row.add(END)
        assert next_asked(rows) == (3, Asks.ENDS, [])
        assert row.allowed() is None, "a step that was planned already draws anything, which is dropped"
        row.add(5)
        row.close()
        rows.setblocking(False)
        with pytest.raises(BlockingIOError):
            next_asked(rows)


@pytest.mark.covers("A14")
def test_what_is_told_of_a_row_that_has_ended_is_not_kept(process: AskedProcess) -> None:
    """A row that ends with its max_tokens, or its client's leaving, ends with a question that nobody reads the answer of."""
    with other_end(process) as rows:
        left, on = row_of(process, 1), row_of(process, 2)
        left.close()
        for number in (1, 2):
            rows.send(told(number, EVERYTHING, 0.0, 0))
        assert on.allowed() is not None
        assert process.open_rows == {2}


@pytest.mark.covers("A14")
def test_many_rows_are_begun_though_the_process_can_send_no_answer_before_some_are_read(process: AskedProcess) -> None:
    num_rows = 600  # what a socket holds of either is less

    def answer() -> None:
        for _ in range(num_rows):
            rows.send(told(next_asked(rows).row, EVERYTHING, 0.0, 0))

    with other_end(process) as rows:
        answering = threading.Thread(target=answer, daemon=True)
        answering.start()
        bound = [row_of(process, number) for number in range(num_rows)]
        for row in bound:
            assert (allowed := row.allowed()) is not None and allowed.all()
        answering.join()
    assert process.verdict is Verdict.WAIT


@pytest.mark.covers("A14")
def test_it_is_asked_also_when_the_node_has_more_descriptors_than_select_takes() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard > 2048
    with ExitStack() as opened:
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
        for _ in range(1030):
            opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        process = AskedProcess(Grammar("regex", "a*", False, (END,)), 0, VOCAB_SIZE)
        with other_end(process) as rows:
            row = row_of(process, 3)
            answer = threading.Timer(0.1, rows.send, [told(3, EVERYTHING, 0.0, 0)])
            answer.start()
            assert row.allowed() is not None
            answer.join()


@pytest.mark.covers("A14")
@pytest.mark.parametrize(("has_computed", "is_to_blame"), [(True, True), (False, False)])
def test_what_has_not_compiled_in_time_is_to_blame_if_it_has_computed(
    process: AskedProcess, monkeypatch: pytest.MonkeyPatch, has_computed: bool, is_to_blame: bool
) -> None:
    """The test has computed for longer than that; of nobody's process there is nothing that it has."""
    monkeypatch.setattr(grammar_asked, "COMPILE_S", 1e-3)
    monkeypatch.setattr(grammar_asked, "COMPILE_WAIT_S", 60.0 if has_computed else 0.2)
    with socket.socket(fileno=os.dup(process.descriptors_there()[0])) as checks:
        process.begin()
        checks.sendall(json.dumps(["", os.getpid() if has_computed else 0]).encode() + b"\n")
        with pytest.raises(TimeoutError):
            process.check(())
    assert process.compiles_too_long == is_to_blame and not process.has_compiled
