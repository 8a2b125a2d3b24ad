"""How much a run tries: `make test` a share of what can be drawn, `make soak` (THOROUGH=1) all of it.

Every behaviour is tested in both; what a quick run leaves to the thorough one is more of the same: further examples, further
combinations, larger worlds. Not here: seeds of the simulation and random faults, which have commands of their own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final, TypeVar

import pytest

Case = TypeVar("Case")

IS_THOROUGH: Final = os.environ.get("THOROUGH") == "1"
only_thorough: Final = pytest.mark.skipif(not IS_THOROUGH, reason="more of the same: make soak runs it")


def examples(in_all: int, share: int = 4) -> int:
    """How many examples of a test are drawn: one in `share`, three at least."""
    return in_all if IS_THOROUGH else max(3, in_all // share)


def a_share(cases: Sequence[Case], one_in: int) -> Sequence[Case]:
    """Of cases that show the same in many places: all of them, or one in so many."""
    return cases if IS_THOROUGH else cases[::one_in]
