"""`python -m bench.engine` as a user runs it, on a small model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.engine_steps import Case, work_of
from engine.model_config import read_model_config
from tests import forked
from tests.architecture.source_tree import ROOT
from tests.kernels_choice import KERNELS


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    """The command's end and output, which is no terminal."""
    command = [sys.executable, "-m", "bench.engine", *flags]
    return forked.run(command, cwd=ROOT, timeout=250)


def test_a_run_gives_ratios_and_where_the_time_goes(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    sizes = ("--batches", "3", "--contexts", "20", "--chunks", "300:5", "--rounds", "1")
    result = run("--model", str(tiny_model), "--kernels", KERNELS, *sizes, "--output", str(path))
    assert result.returncode == 0, result.stderr
    written = json.loads(path.read_text())
    cases = written["cases"]
    assert [case["case"] for case in cases] == ["decode 3 x 20", "chunk of 300 behind 5"]
    assert all(case["best_ratio"] <= case["ratio"] and case["step_s"] > 0 for case in cases)
    assert all({"head", "sampler", "rest"} <= case["parts_s"].keys() for case in cases)
    assert written["kernels"].startswith(KERNELS)
    assert written["machine"]["cores"] >= 1
    assert written["device"] == written["machine"]["cpu_model"]
    assert all(case["alone_s"] == case["step_s"] for case in cases)
    assert "2 of 2 rounds done" in result.stdout
    assert all(case["case"] in result.stdout for case in cases)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--batches", "1,x"), "--batches 1,x: must be positive whole numbers with commas between"),
        (("--chunks", "5"), "--chunks 5: must be TOKENS:CONTEXT pairs with commas between"),
        (("--output", "/no/where.json"), "--output /no/where.json: its folder does not exist"),
        ((), "config.json does not exist: a model directory has one"),
        (("--shape", "llama-tiny"), "--model DIR or --shape NAME: one of the two says what is measured"),
    ],
)
def test_what_cannot_be_measured_is_one_line(tmp_path: Path, flags: tuple[str, ...], said: str) -> None:
    result = run("--model", str(tmp_path), *flags)
    assert result.returncode == 2
    assert result.stderr.startswith("python -m bench.engine: ")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_shape_that_nobody_knows_is_one_line() -> None:
    result = run("--shape", "llama-9t")
    assert result.returncode == 2
    assert result.stderr.startswith("python -m bench.engine: --shape llama-9t: must be one of llama-tiny, ")
    assert result.stderr.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what the test misses")
def test_without_a_gpu_a_device_is_refused_in_one_line() -> None:
    result = run("--shape", "llama-tiny", "--device", "cuda")
    assert result.returncode == 2
    assert result.stderr == "python -m bench.engine: --device cuda: torch sees no CUDA device on this machine\n"


def test_the_work_of_a_step_is_counted_once(tiny_model: Path) -> None:
    """By hand: 4 layers, hidden 128, 8 and 2 heads of 16, MLP 256, 260 tokens."""
    config = read_model_config(tiny_model)
    layer = 128 * (128 + 2 * 32 + 128 + 3 * 256)
    decode = work_of(Case(2, 10), config, itemsize=4)
    assert decode.num_bytes == 4 * (4 * layer + 260 * 128 + 4 * 2 * 10 * 2 * 32)
    in_8_bits = work_of(Case(2, 10), config, itemsize=4, weight_itemsize=1)
    assert decode.num_bytes - in_8_bits.num_bytes == 3 * (4 * layer + 260 * 128)
    assert decode.num_operations == 2 * 2 * (4 * layer + 260 * 128) + 4 * 4 * 2 * 10 * 128
    chunk = work_of(Case(0, 10, 3), config, itemsize=4)
    assert chunk.num_bytes == 4 * (4 * layer + 260 * 128 + 4 * 2 * 13 * 32)
    assert chunk.num_operations == 2 * (3 * 4 * layer + 260 * 128) + 4 * 4 * (11 + 12 + 13) * 128
