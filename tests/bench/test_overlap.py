"""`python -m bench.overlap` as a user runs it, on a small model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source_tree import ROOT
from tests.kernels_choice import KERNELS


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.overlap", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)


def test_both_depths_are_measured_and_compared(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    sizes = ("--batches", "1,3", "--steps", "10", "--rounds", "2", "--kernels", KERNELS)
    result = run("--model", str(tiny_model), *sizes, "--output", str(path))
    assert result.returncode == 0, result.stderr
    assert "one ahead" in result.stdout
    batches = json.loads(path.read_text())["batches"]
    assert [each["batch"] for each in batches] == [1, 3]
    assert all(each["ratio"] > 0 and each["alone_s"] > 0 < each["overlapped_s"] for each in batches)


@pytest.mark.parametrize("batches", ["", "0", "a", "1,,x", "5000"])
def test_a_wrong_number_is_one_line_and_exit_code_2(tiny_model: Path, batches: str) -> None:
    result = run("--model", str(tiny_model), "--batches", batches)
    assert result.returncode == 2 and "--batches" in result.stderr and "Traceback" not in result.stderr
