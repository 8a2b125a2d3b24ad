"""The small real models that the end-to-end tests run, each made once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def made_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Give the directory of a random fp32 model by what it is like. Read only."""

    @cache
    def make(like: str) -> Path:
        path = tmp_path_factory.mktemp("models") / like
        command = ["engine.make_model", "--like", like, "--dtype", "fp32", "--seed", "0", "--out", str(path)]
        subprocess.run([sys.executable, "-m", *command], check=True, timeout=120)
        return path

    return make


@pytest.fixture(scope="session")
def tiny_model(made_model: Callable[[str], Path]) -> Path:
    """llama-tiny with random fp32 weights in Hugging Face layout."""
    return made_model("llama-tiny")
