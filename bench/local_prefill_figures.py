"""Figures of the local prefill benchmark: what a probe and the streams beside it saw, medians over rounds, local to handoff."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.two_ways import WAYS


@dataclass(frozen=True, slots=True)
class Probe:
    """One request, and what those that decoded beside it saw. Seconds."""

    ttft_s: float
    second_token_s: float  # from the request's beginning
    gaps_s: tuple[float, ...]  # between tokens of each stream, that touch the time until the probe's second token


@dataclass(frozen=True, slots=True)
class Figures:
    """One length and chunk: medians over rounds, and ratios of local to handoff, medians over rounds too."""

    chunk: int
    prompt_tokens: int
    ttft_s: dict[str, float]  # by way, as the next two
    second_token_s: dict[str, float]
    longest_gap_s: dict[str, float]
    quiet_gap_s: float  # the streams' median gap when no probe was there
    ttft_ratio: float
    second_token_ratio: float
    longest_gap_ratio: float
    stall_ratio: float  # of what the streams waited beyond their quiet gaps, in sum


def seen(probe: Sequence[float], streams: Sequence[Sequence[float]]) -> Probe:
    """From the instants of a probe, its beginning first, and of the tokens of each stream."""
    began_at, first_at, second_at = probe[:3]
    gaps = tuple(b - a for each in streams for a, b in pairwise(each) if b > began_at and a < second_at)
    return Probe(first_at - began_at, second_at - began_at, gaps)


def figures_of(chunk: int, length: int, rounds: Sequence[Mapping[str, Probe]], quiet: Sequence[float]) -> Figures:
    """From the rounds of one length, by way, and the gaps of the streams while no probe was there."""
    quiet_gap_s = statistics.median(quiet) if quiet else 0.0

    def median(value: Callable[[Probe], float], way: str) -> float:
        return statistics.median(value(each[way]) for each in rounds)

    def ratio(value: Callable[[Probe], float]) -> float:
        pairs = [(value(each["local"]), value(each["handoff"])) for each in rounds]
        return statistics.median(local / handoff for local, handoff in pairs) if all(b for _, b in pairs) else 0.0

    def longest(probe: Probe) -> float:
        return max(probe.gaps_s, default=0.0)

    def stalled(probe: Probe) -> float:
        return sum(max(gap - quiet_gap_s, 0.0) for gap in probe.gaps_s)

    return Figures(
        chunk=chunk,
        prompt_tokens=length,
        ttft_s={way: median(lambda probe: probe.ttft_s, way) for way in WAYS},
        second_token_s={way: median(lambda probe: probe.second_token_s, way) for way in WAYS},
        longest_gap_s={way: median(longest, way) for way in WAYS},
        quiet_gap_s=quiet_gap_s,
        ttft_ratio=ratio(lambda probe: probe.ttft_s),
        second_token_ratio=ratio(lambda probe: probe.second_token_s),
        longest_gap_ratio=ratio(longest),
        stall_ratio=ratio(stalled),
    )
