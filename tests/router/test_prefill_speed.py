"""How soon a prompt is computed: the same reckoning on a node and in the router, and never worse than computing all of it."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proto.prefill_speed import (
    Expected,
    FetchSpeed,
    PrefillSpeed,
    expected,
    is_worth_a_look,
    num_worth,
    read_fetch_speed,
    read_rate,
)

SECONDS = st.floats(0, 10)
fetches = st.builds(FetchSpeed, SECONDS, st.floats(0, 0.1), st.floats(0, 1), st.floats(0, 0.5))
speeds = st.builds(PrefillSpeed, st.floats(1e-6, 1e-2), st.sampled_from((1, 16, 64)), st.none() | fetches)
told = st.floats(allow_nan=True, allow_infinity=True, width=32)


@pytest.mark.covers("R02")
@given(speeds, st.integers(0, 20_000), st.integers(1, 20_000), st.integers(0, 20_000))
@example(PrefillSpeed(1.0, 1, FetchSpeed(1.0, 5e-324, 0.0, 0.0)), 0, 2, 1)  # a quotient that no float holds
def test_by_its_own_reckoning_no_prompt_is_later_than_if_all_of_it_were_computed(
    speed: PrefillSpeed, in_front: int, uncached: int, in_pool: int
) -> None:
    in_pool = min(in_pool, uncached - 1)
    soon = expected(speed, in_front, uncached, in_pool)
    assert 0 <= soon.num_fetched <= in_pool
    assert soon.seconds <= speed.token_s * (in_front + uncached)
    assert soon.seconds >= speed.token_s * (in_front + uncached - soon.num_fetched) * (1 - 1e-9), (
        "what is left is computed"
    )
    if soon.num_fetched:
        assert soon.seconds < speed.token_s * (in_front + uncached)
        assert num_worth(speed, in_pool // speed.block_size, in_front), "the node would not fetch it"
        assert speed.fetch is not None
    else:
        assert soon.seconds == speed.token_s * (in_front + uncached), "equal loads must stay equal"


@pytest.mark.covers("R02")
@given(speeds, st.integers(0, 20_000), st.integers(1, 2_000))
def test_a_node_that_reads_no_pool_has_no_fetch_term(speed: PrefillSpeed, in_front: int, uncached: int) -> None:
    alone = PrefillSpeed(speed.token_s, speed.block_size)
    assert expected(alone, in_front, uncached, uncached - 1) == Expected(speed.token_s * (in_front + uncached), 0)
    assert num_worth(alone, 100, in_front) == 0 and not is_worth_a_look(alone, 100, in_front)


@pytest.mark.covers("R02", "W08")
def test_a_fetch_is_reckoned_beside_the_queue_and_what_does_not_come_is_computed() -> None:
    speed = PrefillSpeed(1e-3, 16, FetchSpeed(0.02, 0.001, 0.75, 0.0))
    assert expected(speed, 0, 161, 160) == pytest.approx((0.02 + 0.01 + 1e-3 * (161 - 120), 120))
    assert expected(speed, 1000, 161, 160) == pytest.approx((1.0 + 1e-3 * 41, 120)), (
        "it is there before the queue is empty"
    )
    assert expected(speed, 0, 161, 15) == Expected(0.161, 0), "no whole block"
    slow = PrefillSpeed(1e-3, 16, FetchSpeed(0.02, 0.02, 1.0, 0.0))
    assert expected(slow, 0, 161, 160) == Expected(0.161, 0), "slower than computing"
    assert expected(slow, 500, 161, 160).num_fetched == 160, "but not behind a queue"
    deaf = PrefillSpeed(1e-3, 16, FetchSpeed(0.0, 0.0, 1.0, 1.0))
    assert expected(deaf, 0, 161, 160) == Expected(0.161, 0), "the node would not even ask"


@pytest.mark.covers("R02")
@given(told, told, told, told)
def test_what_cannot_be_right_is_not_taken(latency: float, block: float, share: float, look: float) -> None:
    rate = read_rate(latency)
    assert rate is None or (rate > 0 and math.isfinite(1 / rate))
    fetch = read_fetch_speed(latency, block, share, look)
    if fetch is not None:
        soon = expected(PrefillSpeed(1e-4, 16, fetch), 100, 1000, 999)
        assert math.isfinite(soon.seconds) and soon.seconds <= 1e-4 * 1100
