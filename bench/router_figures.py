"""From windows of load to what is said of a router: costs of a token and of a request, throughput, delays. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bench.distribution import percentile
from bench.router_load import Window

NEAR: Final = 0.05  # of a core


@dataclass(frozen=True, slots=True)
class Round:
    """The windows of one side in one round."""

    short: Window  # requests of two tokens
    steady: Window  # long streams, the same number for every side
    full: Window  # as fast as can be
    streams: int  # of the last one
    loaded: Window | None  # so many streams that the process is busy for the share asked for; None: not measured


@dataclass(frozen=True, slots=True)
class SideFigures:
    """One side, with so many branches a message; medians over rounds."""

    side: str
    branches: int | None  # a message; None: there are no messages
    token_us: float  # CPU of the measured process per token of a long stream, what requests cost apart
    request_us: float  # per request, what tokens cost apart
    tokens_per_s: float  # at saturation
    busy_at_saturation: float  # of a core; a router of several processes may be busy for more than one
    streams: int  # under way where delays were measured
    load: float | None  # of a core, as reached there
    wait: (
        float | None
    )  # the share of that time for which the measured process was ready and had no core: a busy machine's
    client_wait: float | None  # the same of the client, whose delays are in all of them
    delay_p50_s: float | None
    delay_p99_s: float | None
    first_delay_p50_s: float | None
    first_delay_p99_s: float | None
    speaker_us: float  # CPU of who said a token, per token
    client_us: float  # CPU of the client, per token


def split_cost(short: Window, steady: Window, whose: str = "router") -> tuple[float, float]:
    """CPU of a token and of a request, in microseconds: the two numbers that explain both windows."""
    a1, b1, c1 = short.num_requests, short.num_tokens, short.cpu_s[whose] * 1e6
    a2, b2, c2 = steady.num_requests, steady.num_tokens, steady.cpu_s[whose] * 1e6
    determinant = a1 * b2 - a2 * b1
    if not determinant:
        raise ValueError(
            f"{b1} tokens of {a1} short requests, {b2} of {a2} long ones: what a token costs cannot be told"
        )
    return (a1 * c2 - a2 * c1) / determinant, (c1 * b2 - c2 * b1) / determinant


def load_of(window: Window) -> float:
    """Of a core: how busy the measured process was."""
    return window.cpu_s["router"] / window.seconds


def is_near(load: float, asked: float) -> bool:
    """Whether delays at this load say what they are at the one that was asked for: they grow steeply with it."""
    return abs(load - asked) <= NEAR


def streams_for(window: Window, num_streams: int, share: float) -> int:
    """How many streams make the process busy for this share of a core, by what so many took."""
    busy = load_of(window)
    return max(1, round(num_streams * share / busy)) if busy > 0 else num_streams


def figures_of(side: str, branches: int | None, rounds: Sequence[Round]) -> SideFigures:
    """Reduce the rounds of one side."""
    splits = [split_cost(each.short, each.steady) for each in rounds]
    loaded = [each.loaded for each in rounds if each.loaded is not None]

    def median(values: Sequence[float]) -> float | None:
        return statistics.median(values) if values else None

    def of_delays(percent: float, *, is_first: bool) -> float | None:
        pools = [each.first_delays_s if is_first else each.delays_s for each in loaded]
        return median([percentile(sorted(pool), percent) for pool in pools if pool])

    def share_of(name: str) -> float | None:
        return median([each.cpu_s[name] / each.seconds for each in loaded])

    return SideFigures(
        side=side,
        branches=branches,
        token_us=statistics.median(token_us for token_us, _ in splits),
        request_us=statistics.median(request_us for _, request_us in splits),
        tokens_per_s=statistics.median(each.full.tokens_per_s for each in rounds),
        busy_at_saturation=statistics.median(each.full.cpu_s["router"] / each.full.seconds for each in rounds),
        streams=round(statistics.median(each.streams for each in rounds)),
        load=share_of("router"),
        wait=share_of("router waits"),
        client_wait=share_of("client waits"),
        delay_p50_s=of_delays(50, is_first=False),
        delay_p99_s=of_delays(99, is_first=False),
        first_delay_p50_s=of_delays(50, is_first=True),
        first_delay_p99_s=of_delays(99, is_first=True),
        speaker_us=statistics.median(split_cost(each.short, each.steady, "speaker")[0] for each in rounds),
        client_us=statistics.median(split_cost(each.short, each.steady, "client")[0] for each in rounds),
    )
