"""`python -m bench.local_prefill` as a user runs it, on a small model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.architecture.source_tree import ROOT


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.local_prefill", *flags]
    return forked.run(command, cwd=ROOT, timeout=250)


def test_both_ways_are_taken_and_compared(tiny_model: Path, tmp_path: Path) -> None:
    """It fails by itself where the decode node has not computed exactly the prompts that were meant for it."""
    path, picture = tmp_path / "result.json", tmp_path / "result.svg"
    sizes = ("--lengths", "16,80", "--chunks", "32", "--streams", "2", "--rounds", "2")
    result = run("--model", str(tiny_model), *sizes, "--output", str(path), "--plot", str(picture))
    assert result.returncode == 0, result.stderr
    assert "local ÷ handoff" in result.stdout
    assert picture.read_text().count("chunks of 32") == 1, "one line a chunk, named once"
    figures = json.loads(path.read_text())["figures"]
    assert [(each["chunk"], each["prompt_tokens"]) for each in figures] == [(32, 16), (32, 80)]
    for each in figures:
        assert each["second_token_ratio"] > 0 and each["longest_gap_ratio"] > 0
        assert all(each["second_token_s"][way] >= each["ttft_s"][way] > 0 for way in ("handoff", "local"))


@pytest.mark.parametrize(("flag", "value"), [("--lengths", ""), ("--chunks", "0"), ("--lengths", "16,x")])
def test_a_wrong_number_is_one_line_and_exit_code_2(tiny_model: Path, flag: str, value: str) -> None:
    result = run("--model", str(tiny_model), flag, value)
    assert result.returncode == 2 and flag in result.stderr and "Traceback" not in result.stderr
