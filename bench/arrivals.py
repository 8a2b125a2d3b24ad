"""When requests arrive and how long they are, drawn from a seed. Knows no clock: offsets in seconds from the run's start."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, count, repeat
from typing import Final, Literal

Arrivals = Literal["poisson", "constant", "gamma"]
Shape = Literal["uniform", "exp", "lognormal"]

_LENGTHS: Final = re.compile(r"(?:exp:)?(\d{1,9})|(\d{1,9}):(\d{1,9})|lognormal:(\d{1,9}):(\d{1,3}(?:\.\d{1,6})?)")
_FORMS: Final = "MEAN, MEAN:SPREAD, exp:MEAN or lognormal:MEAN:SIGMA, whole numbers of tokens"
MAX_TOKENS: Final = 1 << 24  # of a mean: what is sent is made in memory, and as long
LONGEST: Final = 16  # means: where a distribution's tail is cut


@dataclass(frozen=True, slots=True)
class Lengths:
    """Uniform over mean - spread .. mean + spread, ends included; or exponential, or lognormal, cut at 1 and 16 means."""

    mean: int
    spread: int
    shape: Shape = "uniform"
    sigma: float = 0.0  # of the logarithm, of a lognormal one

    @staticmethod
    def parse(text: str) -> Lengths:
        """From `MEAN`, `MEAN:SPREAD`, `exp:MEAN`, `lognormal:MEAN:SIGMA`; ValueError says in one sentence what is wrong."""
        found = _LENGTHS.fullmatch(text)
        if not found:
            raise ValueError(f"{text}: must be {_FORMS}")
        alone, mean, spread, of_log, sigma = found.groups()
        if of_log:
            lengths = Lengths(int(of_log), 0, "lognormal", float(sigma))
        else:
            lengths = Lengths(int(alone or mean), int(spread or 0), "exp" if text.startswith("exp") else "uniform")
        if lengths.mean > MAX_TOKENS:
            raise ValueError(f"{text}: must be at most {MAX_TOKENS} tokens")
        if lengths.mean == 0:
            raise ValueError(f"{text}: must be at least one token")
        if lengths.spread >= lengths.mean:
            raise ValueError(f"{text}: the spread must be below the mean, or a request could have no token")
        if lengths.sigma > 4:
            raise ValueError(f"{text}: the sigma of the logarithm must be at most 4")
        return lengths

    def draw(self, rng: random.Random) -> int:
        """One length."""
        match self.shape:
            case "uniform":
                return rng.randint(self.mean - self.spread, self.mean + self.spread)
            case "exp":
                drawn = rng.expovariate(1 / self.mean)
            case "lognormal":
                drawn = rng.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)
        return min(max(round(drawn), 1), LONGEST * self.mean)


def parse_rate(text: str) -> float:
    """Requests per second from a positive number or `inf`; ValueError says in one sentence what is wrong."""
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not rate > 0:
        raise ValueError(f"{text}: must be requests per second above 0, or inf for all at once")
    return rate


def parse_rates(text: str) -> list[float]:
    """Finite rates with commas between; ValueError says in one sentence what is wrong."""
    rates = []
    for number, part in enumerate(map(str.strip, text.split(",")), 1):
        try:
            rates.append(parse_rate(part))
        except ValueError:
            rates.append(math.inf)
        if math.isinf(rates[-1]):
            what = f"number {number}, {part}," if part else f"number {number} is empty and"
            raise ValueError(f"{text}: {what} must be requests per second above 0; give numbers with commas between")
    return rates


def arrivals_of(rng: random.Random, kind: Arrivals, rate: float, burstiness: float = 1.0) -> Iterator[float]:
    """Instants without end, their mean gap 1 / rate; all 0 if the rate is infinite.

    `poisson`: gaps are exponential. `constant`: all equal. `gamma`: of the shape `burstiness`, so that the gaps' variance is
    1 / burstiness of a Poisson process's: below 1 arrivals come in bursts, above 1 evenly (vLLM's word and meaning).
    """
    if math.isinf(rate):
        return repeat(0.0)
    match kind:
        case "constant":
            return (index / rate for index in count(1))
        case "poisson":
            gaps = (rng.expovariate(rate) for _ in repeat(None))
        case "gamma":
            gaps = (rng.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in repeat(None))
    return accumulate(gaps)
