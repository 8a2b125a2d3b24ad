"""`python -m bench.token_path`: whose time is whose, and the command as a user runs it, on a small model."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

from bench.token_path import PARTS, Spent, parts_of, since, threads_of
from tests import forked
from tests.architecture.source_tree import ROOT


def test_every_thread_is_counted_once_and_the_busiest_of_the_node_compute() -> None:
    node = {10: Spent(0.5, 9.0), 11: Spent(4.0, 0.25), 12: Spent(0.25, 7.0), 13: Spent(3.0, 0.5), 14: Spent(0.125, 0.0)}
    router = {20: Spent(0.75, 1.0), 21: Spent(0.0625, 1.0)}
    parts = dict(zip(PARTS, parts_of((10, node), (20, router), 2.0, 2), strict=True))
    assert parts == {
        "node, computing threads": 7.0,
        "node, loop": 0.5,
        "node, other threads": 0.375,
        "router, loop": 0.75,
        "router, other threads": 0.0625,
        "client": 2.0,
        "computing threads waited for a core": 0.75,
    }


def test_what_a_thread_has_spent_is_the_kernels_count_and_a_new_one_began_at_nothing() -> None:
    before = threads_of(os.getpid())
    numbers: list[float] = []

    def work() -> None:
        while time.thread_time() < 0.02:
            pass
        spent = since(before, threads_of(os.getpid()))[threading.get_native_id()]
        numbers.extend((spent.ran_s, time.thread_time()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    ran_s, counted_s = numbers
    assert 0.005 < ran_s <= counted_s  # the kernel's count is as of the thread's last tick
    new, ended = {2: Spent(3.0, 1.0)}, {1: Spent(1.0, 1.0)}
    assert since(ended, new) == new


def test_the_engine_alone_and_the_whole_path_are_measured(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    sizes = ("--threads", "1", "--tokens", "16", "--context", "16", "--rounds", "2")
    command = [sys.executable, "-m", "bench.token_path", "--model", str(tiny_model), *sizes, "--output", str(path)]
    result = forked.run(command, cwd=ROOT, timeout=250)
    assert result.returncode == 0, result.stderr
    assert "node, loop" in result.stdout
    figures = json.loads(path.read_text())
    assert figures["served_s"] > 0 < figures["alone_s"], "a busy machine decides which of them is longer"
    assert 0 < figures["best_ratio"] <= figures["ratio"]
    assert all(seconds > 0 for part, seconds in figures["parts_s"].items() if part.endswith("loop"))
