"""The small real models that the end-to-end tests run, each made once a run."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.make_model import main as make_model


@pytest.fixture(scope="session")
def made_model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """Give the directory of a random fp32 model by what it is like. Read only: all rooms and all processes of a run share it."""
    folder = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):  # one of several processes of a run
        folder = folder.parent
    folder = folder / "made_models"
    folder.mkdir(exist_ok=True)

    def make(like: str) -> Path:
        path, part = folder / like, folder / f"{like}.part"
        with (folder / f"{like}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                assert make_model(["--like", like, "--dtype", "fp32", "--seed", "0", "--out", str(part)]) == 0
                part.rename(path)
        return path

    return make


@pytest.fixture(scope="session")
def tiny_model(made_model: Callable[[str], Path]) -> Path:
    """llama-tiny with random fp32 weights in Hugging Face layout."""
    return made_model("llama-tiny")
