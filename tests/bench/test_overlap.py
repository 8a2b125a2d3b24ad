"""`python -m bench.overlap` as a user runs it, on a small model."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bench.overlap import Load, plain, step_s
from engine.model import load_model
from tests import forked
from tests.architecture.source_tree import ROOT
from tests.kernels_choice import KERNELS


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.overlap", *flags]
    return forked.run(command, cwd=ROOT, timeout=250)


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


def test_who_is_interrupted_leaves_no_thread_that_computes(tiny_model: Path) -> None:
    """At the interpreter's end it would have nobody to tell, and abort the process."""

    def num_runners() -> int:
        return sum(thread.name == "runner" for thread in threading.enumerate())

    async def scenario() -> None:
        model = load_model(tiny_model, "auto", KERNELS)
        measuring = asyncio.create_task(step_s(model, Load(1, 16, 200_000), 2, plain))
        await asyncio.sleep(0)
        assert num_runners() == 1
        measuring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await measuring

    before = num_runners()
    asyncio.run(scenario())
    assert num_runners() == before == 0
