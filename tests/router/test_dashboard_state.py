"""What the dashboard shows each second: counts that are true whatever lives, times of the last minute, nothing without bound."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.dashboard_state import LISTED, RECENT_S, SAMPLED, part, spread, whole
from router.timeline import Record

NOW = 1000.0
seconds = st.floats(0.001, 50, allow_nan=False)


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
    told = part({}, records, {"live": 10}, 99, NOW)
    assert told["generated_tokens"] == 109
    assert told["first_token_s"] == pytest.approx([0.5, 1.0, 3.0])
    assert told["token_s"] == pytest.approx([4.5 / 9, 10.0 / 5])
    assert [each["completion_tokens"] for each in told["requests"]] == [10, 0, 6, 6, 1]


@given(st.integers(0, 3 * SAMPLED))
def test_a_look_costs_a_bounded_number_of_records(number: int) -> None:
    taken = 0

    def newest() -> object:
        nonlocal taken
        for index in range(number):
            taken += 1
            yield record(str(index), NOW - RECENT_S / 2, 0.1, 1.0, tokens=3)

    told = part({}, newest(), {}, 0, NOW)  # type: ignore[arg-type]
    assert taken <= SAMPLED + 1 and len(told["requests"]) == min(number, LISTED)
    assert len(told["first_token_s"]) == len(told["token_s"]) == min(number, SAMPLED)


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
