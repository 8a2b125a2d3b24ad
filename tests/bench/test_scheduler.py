"""`python -m bench.scheduler` as a user runs it, for a few steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.architecture.source_tree import ROOT


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    """The command's end and output, which is no terminal."""
    command = [sys.executable, "-m", "bench.scheduler", *flags]
    return forked.run(command, cwd=ROOT, timeout=250)


def test_a_run_gives_each_cases_times_ratios_and_what_happened(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    sizes = ("--slots", "1,16", "--sequences", "40", "--sequences-at", "16", "--more-sequences", "80")
    result = run(*sizes, "--steps", "200", "--output", str(path))
    assert result.returncode == 0, result.stderr
    cases = json.loads(path.read_text())["cases"]
    assert [(case["num_slots"], case["num_sequences"]) for case in cases] == [(1, 40), (16, 40), (16, 80)]
    assert all(case["best_step_s"] <= case["step_s"] and case["plan_s"] > 0 and case["ratio"] > 0 for case in cases)
    assert all(0.8 * case["num_slots"] < case["rows_a_step"] <= case["num_slots"] for case in cases)
    assert cases[1]["ended_per_1000_steps"] > 0
    assert "60 of 60 rounds done" in result.stdout and "quiet" in result.stdout


def test_in_a_pool_that_is_too_small_the_youngest_give_way(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    flags = ("--slots", "32", "--more-sequences", "", "--policy", "none", "--pool-percent", "50", "--steps", "1000")
    assert run(*flags, "--output", str(path)).returncode == 0
    assert json.loads(path.read_text())["cases"][0]["preempted_per_1000_steps"] > 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--slots", "1,x"), "--slots 1,x: must be positive whole numbers with commas between"),
        (("--more-sequences", "0"), "--more-sequences 0: must be positive whole numbers with commas between"),
        (("--output", "/no/where.json"), "--output /no/where.json: its folder does not exist"),
    ],
)
def test_what_cannot_be_measured_is_one_line(flags: tuple[str, ...], said: str) -> None:
    result = run(*flags)
    assert result.returncode == 2
    assert result.stderr.startswith("python -m bench.scheduler: ")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
