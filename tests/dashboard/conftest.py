"""The models of the end-to-end tests, for these too."""

from __future__ import annotations

from tests.e2e.conftest import made_model, tiny_model

__all__ = ["made_model", "tiny_model"]
