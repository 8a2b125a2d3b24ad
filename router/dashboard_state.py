"""What the dashboard shows each second: nodes, newest requests, and numbers to make rates of, from what the router holds. Pure.

One worker tells its `part`; `whole` makes one picture of all parts. Nothing is kept for it: a counter is read when somebody looks,
and who looks makes rates of two looks; times are of those that began to answer last, however many wait behind them.
So nobody pays while nobody looks, and a look costs a bounded number of records. Not here: how parts reach each other
(worker_pages.py), HTTP (dashboard.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from statistics import fmean
from typing import Any, Final

from router.timeline import Record
from router.timeline_json import summary
from router.timelines import Timelines

LISTED: Final = 25  # requests that are shown
RECENT_S: Final = 60.0  # "now": what has happened since


def part(
    state: Mapping[str, Any], timelines: Timelines, live_tokens: Mapping[str, int], num_generated: int, now: float
) -> dict[str, Any]:
    """One worker's: `state` as /state has it, completion tokens of live requests, and of all that there were."""
    begun = timelines.begun
    return {
        "at": now,
        "state": dict(state),
        "requests": [_listed(record, live_tokens, now) for record in islice(timelines.newest(), LISTED)],
        "generated_tokens": num_generated,
        "first_token_s": [seconds for record in begun if (seconds := _first_token_s(record, now)) is not None],
        "token_s": [seconds for record in begun if (seconds := _token_s(record, live_tokens, now)) is not None],
    }


def whole(parts: Sequence[Mapping[str, Any]], state: Mapping[str, Any], requests: Sequence[Any]) -> dict[str, Any]:
    """The parts of those that have answered as one; `state` and `requests` are joined already (worker_pages.py).

    Each part is of another instant, up to a second apart: `at` is the middle, so that rates are of the time that was counted.
    """
    return {
        "at": round(fmean(each["at"] for each in parts), 6),
        "state": dict(state),
        "requests": list(requests[:LISTED]),
        "generated_tokens": sum(each["generated_tokens"] for each in parts),
        "first_token_s": spread([seconds for each in parts for seconds in each["first_token_s"]]),
        "token_s": spread([seconds for each in parts for seconds in each["token_s"]]),
    }


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Median and 95th percentile by nearest rank, and of how many; None of nothing."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    ranks = {name: ordered[math.ceil(share * len(ordered)) - 1] for name, share in (("p50", 0.5), ("p95", 0.95))}
    return {"num": len(ordered)} | {name: round(value, 6) for name, value in ranks.items()}


def _listed(record: Record, live_tokens: Mapping[str, int], now: float) -> dict[str, Any]:
    """A line of the list; of a live request the tokens so far."""
    line = summary(record, now)
    if record.outcome is None:
        line["completion_tokens"] = live_tokens.get(record.request_id, 0)
    return line


def _first_token_s(record: Record, now: float) -> float | None:
    """From arrival to the first token, if that came lately."""
    ends_at = record.first.to_first.ends_at
    return None if ends_at is None or now - ends_at > RECENT_S else ends_at - record.arrived_at


def _token_s(record: Record, live_tokens: Mapping[str, int], now: float) -> float | None:
    """Between a choice's tokens, on average, of who lives or has ended lately; a retry's pause is in it, as its client saw it."""
    begins_at = record.first.to_first.ends_at
    ends_at = now if record.ended_at is None else record.ended_at
    num_tokens = live_tokens.get(record.request_id, record.num_completion_tokens)
    num_gaps = num_tokens - len(record.tracks)
    if begins_at is None or now - ends_at > RECENT_S or num_gaps <= 0:
        return None
    return max(ends_at - begins_at, 0.0) * len(record.tracks) / num_gaps
