"""The small real model of the end-to-end tests."""

from __future__ import annotations

from tests.e2e.conftest import tiny_model

__all__ = ["tiny_model"]
