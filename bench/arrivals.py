"""When requests arrive and how long they are, drawn from a seed. Knows no clock: offsets in seconds from the run's start."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

_LENGTHS: Final = re.compile(r"(\d{1,9})(?::(\d{1,9}))?")


@dataclass(frozen=True, slots=True)
class Lengths:
    """Uniform over mean - spread .. mean + spread, ends included."""

    mean: int
    spread: int

    @staticmethod
    def parse(text: str) -> Lengths:
        """From `MEAN` or `MEAN:SPREAD`; ValueError says in one sentence what is wrong."""
        found = _LENGTHS.fullmatch(text)
        if not found:
            raise ValueError(f"{text}: must be MEAN or MEAN:SPREAD, whole numbers of tokens")
        lengths = Lengths(int(found[1]), int(found[2] or 0))
        if lengths.mean == 0:
            raise ValueError(f"{text}: must be at least one token")
        if lengths.spread >= lengths.mean:
            raise ValueError(f"{text}: the spread must be below the mean, or a request could have no token")
        return lengths

    def draw(self, rng: random.Random) -> int:
        """One length."""
        return rng.randint(self.mean - self.spread, self.mean + self.spread)


def parse_rate(text: str) -> float:
    """Requests per second from a positive number or `inf`; ValueError says in one sentence what is wrong."""
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not rate > 0:
        raise ValueError(f"{text}: must be requests per second above 0, or inf for all at once")
    return rate


def poisson_offsets(rng: random.Random, rate: float, number: int) -> list[float]:
    """Instants of a Poisson process: gaps are exponential with mean 1 / rate; all 0 if the rate is infinite."""
    if math.isinf(rate):
        return [0.0] * number
    return list(accumulate(rng.expovariate(rate) for _ in range(number)))
