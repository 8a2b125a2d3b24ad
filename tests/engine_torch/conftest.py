"""Small random model directories, made once a session, and a way to leave torch's thread count as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.make_model import make_model
from engine.model_sizes import SIZES, ModelSize

TINY = SIZES["llama-tiny"]
VOCAB_SIZE = 260
# By query heads per KV head: each has its own matrix shapes in attention. One has a head size that no vector width divides.
SHAPES = {
    "group4": TINY,
    "group1": replace(TINY, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=32),
    "group7": replace(
        TINY, num_layers=2, num_heads=7, num_kv_heads=1, head_dim=24, hidden_size=112, intermediate_size=200
    ),
    "tied": replace(TINY, num_layers=2, ties_embeddings=True),
}

ModelDirs = Callable[..., Path]


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> ModelDirs:
    """Give the directory of (shape name, dtype), made at first use. Read only."""
    made: dict[tuple[str, str], Path] = {}

    def find(shape: str = "group4", dtype: str = "fp32") -> Path:
        if (shape, dtype) not in made:
            path = tmp_path_factory.mktemp("models") / f"{shape}-{dtype}"
            make_model(SHAPES[shape], dtype, 0, path)
            made[shape, dtype] = path
        return made[shape, dtype]

    return find


@pytest.fixture
def own_model_dir(tmp_path: Path) -> Path:
    """Give a directory that the test may spoil."""
    size = ModelSize(32, 1, 2, 1, 16, 48, 256)
    make_model(size, "fp32", 0, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    """Run each test from one thread and undo what it sets."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
