"""What the dashboard shows each second: counts that are true whatever lives, times of the last minute, nothing without bound."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.dashboard_state import LISTED, RECENT_S, part, spread, whole
from router.timeline import Record
from router.timelines import BEGUN, Timelines

NOW = 1000.0
seconds = st.floats(0.001, 50, allow_nan=False)


def timelines_of(records: Iterable[Record]) -> Timelines:
    """Of which those that have a token got it in this order."""
    timelines = Timelines(10_000)
    for each in records:
        timelines.begin(each)
        if each.first.num_tokens:
            each.tracks[0].num_tokens = 0
            timelines.emitted(each.request_id, 0, 0, NOW)
            each.tracks[0].num_tokens = 1
    return timelines


def record(name: str, arrived_at: float, first_s: float | None, ended_s: float | None, tokens: int = 0) -> Record:
    """A request of one choice; its first token and its end so long after its arrival."""
    made = Record(name, None, 8, 1, arrived_at, arrived_at)
    if first_s is not None:
        made.tracks[0].emitted(1, arrived_at + first_s)
    if ended_s is not None:
        made.outcome, made.ended_at, made.num_completion_tokens = "stop", arrived_at + ended_s, tokens
    return made


@given(st.lists(seconds, min_size=1))
def test_a_spread_names_values_that_so_many_do_not_exceed(values: list[float]) -> None:
    told = spread(values)
    assert told is not None and told["num"] == len(values)
    for name, share in (("p50", 0.5), ("p95", 0.95)):
        below = sum(value <= told[name] + 1e-6 for value in values)
        assert below >= math.ceil(share * len(values)), name
        assert any(abs(value - told[name]) < 1e-6 for value in values), "it is one of them"
    assert spread([]) is None


@pytest.mark.covers("O03")
def test_times_are_of_what_happened_in_the_last_minute_and_of_what_lives() -> None:
    records = [
        record("live", NOW - 5, 0.5, None),
        record("waits", NOW - 5, None, None),
        record("ended", NOW - 20, 1.0, 11.0, tokens=6),
        record("long ago", NOW - 500, 2.0, 12.0, tokens=6),
        record("one token", NOW - 30, 3.0, 3.0, tokens=1),
    ]
    told = part({}, timelines_of(records), {"live": 10}, 109, NOW)
    assert told["generated_tokens"] == 109
    assert told["first_token_s"] == pytest.approx([0.5, 1.0, 3.0])
    assert told["token_s"] == pytest.approx([4.5 / 9, 10.0 / 5])
    assert [each["completion_tokens"] for each in told["requests"]] == [1, 6, 6, 0, 10]


@pytest.mark.parametrize("number", [0, 1, LISTED, BEGUN - 1, BEGUN, BEGUN + 1, 3 * BEGUN])
def test_a_look_costs_a_bounded_number_of_records_and_who_waits_hides_nobody(number: int) -> None:
    begun = (record(str(index), NOW - RECENT_S / 2, 0.1, 1.0, tokens=3) for index in range(number))
    waiting = (record(f"w{index}", NOW, None, None) for index in range(2 * BEGUN))
    told = part({}, timelines_of(chain(begun, waiting)), {}, 0, NOW)
    assert len(told["requests"]) == LISTED
    assert len(told["first_token_s"]) == len(told["token_s"]) == min(number, BEGUN)


@given(st.lists(st.tuples(st.integers(0, 50), st.lists(seconds, max_size=5)), min_size=1, max_size=4))
def test_of_several_workers_nothing_is_left_out_or_counted_twice(told: list[tuple[int, list[float]]]) -> None:
    parts = [
        {"at": NOW + index, "generated_tokens": tokens, "first_token_s": times, "token_s": []}
        for index, (tokens, times) in enumerate(told)
    ]
    joined = whole(parts, {"ready": True}, [{}] * (LISTED + 5))
    assert joined["generated_tokens"] == sum(tokens for tokens, _ in told)
    assert joined["first_token_s"] == spread([each for _, times in told for each in times])
    assert joined["at"] == NOW + (len(told) - 1) / 2, "a rate is of the time between counts, whoever was late"
    assert joined["token_s"] is None and len(joined["requests"]) == LISTED
