"""Which rate to try next, so that the highest one that a server stands is found in few tries. Pure.

    start --passed: doubled, failed: halved--> one passed below one that failed --their geometric mean--> close: the knee

Tries need not agree with each other (a machine has other things to do): what counts is the lowest rate that failed, and the highest
below it that passed. So noise can make the answer too low, never endless.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

ROUNDING: Final = 4  # digits of a rate that count: people type them again


class Verdict(Enum):
    """What one rate was."""

    PASSED = "passed"
    FAILED = "failed"
    LATE = "late"  # the generator itself could not keep up, so nothing is known of the server


@dataclass(frozen=True, slots=True)
class Try:
    """A rate, in requests per second, and how it went."""

    rate: float
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Search:
    """Where it begins and ends; rates in requests per second."""

    start: float
    step: float  # > 0: it ends when the failing rate is at most 1 + step times the passing one
    lowest: float
    highest: float

    def next_rate(self, tries: Sequence[Try]) -> float | None:
        """The rate to try next; None: enough is known."""
        if not tries:
            return _rounded(self.start)
        low, high = knee(tries), ceiling(tries)
        if low is None:
            assert high is not None
            return _rounded(max(high / 2, self.lowest)) if high > self.lowest else None
        if high is None:
            return _rounded(min(low * 2, self.highest)) if low < self.highest else None
        if high <= low * (1 + self.step):
            return None
        middle = _rounded(math.sqrt(low * high))
        return middle if low < middle < high else None


def ceiling(tries: Sequence[Try]) -> float | None:
    """The lowest rate that did not pass."""
    return min((each.rate for each in tries if each.verdict is not Verdict.PASSED), default=None)


def knee(tries: Sequence[Try]) -> float | None:
    """The highest rate that passed with none below it that did not: what the server stands. None: no rate that was tried."""
    high = ceiling(tries)
    passed = [each.rate for each in tries if each.verdict is Verdict.PASSED]
    return max((rate for rate in passed if high is None or rate < high), default=None)


def _rounded(rate: float) -> float:
    return float(f"{rate:.{ROUNDING}g}")
