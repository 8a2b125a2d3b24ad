"""One tiny model for the tests that run whole nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.make_model import make_model
from engine.model_sizes import SIZES


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama, fp32."""
    out = tmp_path_factory.mktemp("model") / "tiny"
    make_model(SIZES["llama-tiny"], "fp32", 0, out)
    return out
