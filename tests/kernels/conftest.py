"""A way to leave torch's thread count as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    """Run each test from one thread and undo what it sets."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
