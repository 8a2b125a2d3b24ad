"""The small real model that the end-to-end tests run, made once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """llama-tiny with random fp32 weights in Hugging Face layout."""
    path = tmp_path_factory.mktemp("models") / "llama-tiny"
    command = ["engine.make_model", "--like", "llama-tiny", "--dtype", "fp32", "--seed", "0", "--out", str(path)]
    subprocess.run([sys.executable, "-m", *command], check=True, timeout=120)
    return path
