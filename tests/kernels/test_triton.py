"""Runs the tests of the Triton kernels in a process that interprets them, where no CUDA device computes.

Triton decides when it is imported whether it compiles or interprets, and with it everything that is made of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.choice import has_triton
from tests.thorough import IS_THOROUGH

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 3500 if IS_THOROUGH else 880  # up to 60 s of computing, however busy the machine is
# One process for all: to begin it takes 8 s of computing, beside others twice as long.
INTERPRETED = [
    "tests/kernels/test_primitives.py",
    "tests/kernels/test_triton_kernels.py",
    "tests/kernels/test_triton_draws.py",
    "tests/engine_torch/test_attention.py",
    "tests/engine_torch/test_triton_engine.py",
    "-k",
    "triton",
]

pytestmark = pytest.mark.skipif(not has_triton(), reason="Triton is not installed; make setup does that")


@pytest.mark.covers("M04", "M05", "M06")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the same tests have run on the device")
@pytest.mark.timeout(LIMIT_S + 20)
def test_in_the_interpreter() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "--no-shrink",  # interpreted, that takes minutes
        "-p",
        "no:cacheprovider",
        f"--timeout={LIMIT_S}",
        "-W",
        "ignore::RuntimeWarning",
        *INTERPRETED,
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert result.returncode == 0, result.stdout[-20_000:] + result.stderr[-2_000:]
    assert " passed" in result.stdout, result.stdout
