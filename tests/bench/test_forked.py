"""Work among forked processes: everything is done once, and what dies or takes too long keeps nobody waiting."""

from __future__ import annotations

import os
import signal
import time

import pytest

from bench.forked import forked


def test_each_item_is_done_once_by_several_processes_that_are_gone_afterwards() -> None:
    told = dict(forked(lambda index: f"{index * index} by {os.getpid()}", 300, 3, 60))
    assert [told[index].split()[0] for index in range(300)] == [str(index * index) for index in range(300)]
    processes = {int(said.split()[-1]) for said in told.values()}
    assert os.getpid() not in processes
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_a_process_that_dies_or_fails_takes_only_its_own_item_with_it(capfd: pytest.CaptureFixture[str]) -> None:
    def work(index: int) -> str:
        if index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 2:
            raise LookupError("no such thing")
        return "x" * 5000 if index == 3 else "done"

    told = dict(forked(work, 20, 4, 60))
    assert told.keys() == set(range(20)) - {1, 2}
    assert len(told[3]) == 300
    assert "no such thing" in capfd.readouterr().err


def test_what_takes_too_long_is_ended() -> None:
    def work(index: int) -> str:
        if index == 0:
            signal.pause()
        return "quick"

    begin = time.monotonic()
    told = list(forked(work, 3, 2, 1.0))
    assert told == [(1, "quick"), (2, "quick")]
    assert time.monotonic() - begin < 30


def test_more_items_than_a_pipe_takes_are_refused() -> None:
    with pytest.raises(ValueError, match="more than a pipe takes"):
        next(forked(str, 1 << 20, 2, 1.0))
