"""Whose clock is taken for wrong: not that of a node whose answer came late."""

from __future__ import annotations

import time
from datetime import timedelta
from email.utils import formatdate

import httpx
import pytest

from deploy import doctor


@pytest.mark.parametrize(
    ("told_s", "elapsed_s", "is_wrong"),
    [
        (0.0, 0.01, False),
        (-4.0, 5.0, False),  # it was written as the request came
        (-4.0, 0.01, True),
        (3.0, 5.0, True),
        (-60.0, 5.0, True),
    ],
)
def test_a_clock_is_wrong_where_no_instant_of_the_call_explains_it(
    told_s: float, elapsed_s: float, is_wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_800_000_000.5
    monkeypatch.setattr(time, "time", lambda: now)
    answer = httpx.Response(200, headers={"date": formatdate(now + told_s, usegmt=True)})
    answer.elapsed = timedelta(seconds=elapsed_s)
    found = list(doctor._compare_clocks("decode-0", answer))
    assert bool(found) is is_wrong
