"""The small real model of the end-to-end tests, and two clusters' certificates."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import made_model, tiny_model
from tests.security.strangers import make_certificates

__all__ = ["made_model", "tiny_model"]


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The --tls-dir of a cluster's host."""
    return make_certificates(tmp_path_factory.mktemp("ours") / "certs")


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That of another cluster's."""
    return make_certificates(tmp_path_factory.mktemp("others") / "certs")
