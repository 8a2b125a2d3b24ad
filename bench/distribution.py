"""Statistics of a list of numbers: percentiles, means, histograms. Pure, and exact: every value counts, none is binned before."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_SKEWED: Final = 10.0  # from this ratio of largest to smallest on, bins grow geometrically


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of ascending values: linear between the two nearest ranks, numpy's default. ValueError: no values, or not 0 to 100."""
    if not ordered or not 0 <= percent <= 100:
        raise ValueError(f"percentile {percent} of {len(ordered)} values")
    rank = (len(ordered) - 1) * percent / 100
    below = math.floor(rank)
    low, high = ordered[below], ordered[min(below + 1, len(ordered) - 1)]
    return low + (high - low) * (rank - below)


@dataclass(frozen=True, slots=True)
class Summary:
    """What is said of a distribution; the fields are the keys of the JSON result."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


def summarize(values: Sequence[float]) -> Summary | None:
    """None if there is nothing to say anything of."""
    if not values:
        return None
    ordered = sorted(values)
    p50, p90, p99 = (percentile(ordered, percent) for percent in (50, 90, 99))
    return Summary(len(ordered), math.fsum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


@dataclass(frozen=True, slots=True)
class Bin:
    """Values from `low` (included) to `high` (not, but for the last bin)."""

    low: float
    high: float
    count: int


def histogram(values: Sequence[float], num_bins: int) -> list[Bin]:
    """Bins from the least to the greatest value, of equal width, or of equal ratio where values differ tenfold and more."""
    if not values:
        return []
    low, high = min(values), max(values)
    if low == high:
        return [Bin(low, high, len(values))]
    if low > 0 and high / low >= _SKEWED:
        edges = [low * (high / low) ** (index / num_bins) for index in range(num_bins)]
    else:
        edges = [low + (high - low) * index / num_bins for index in range(num_bins)]
    counts = [0] * num_bins
    for value in values:
        counts[bisect_right(edges, value) - 1] += 1
    return [Bin(a, b, count) for a, b, count in zip(edges, [*edges[1:], high], counts, strict=True)]


def time_per_output_token(first_at: float, last_at: float, num_tokens: int) -> float | None:
    """Seconds per token behind the first; None if there is only that one."""
    return (last_at - first_at) / (num_tokens - 1) if num_tokens > 1 else None
