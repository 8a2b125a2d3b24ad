"""What a node makes of the times that it sees: how long fetching takes, how long computing, and which is shorter."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.load import tell_speed
from prefill_node.fetch_cost import COLD_WAIT_S, FetchCost
from proto import baton_pb2 as pb
from proto.prefill_speed import LOOK_SHARE

BLOCK_SIZE = 16
SECONDS = st.floats(1e-4, 2.0)


def computing(seconds_per_token: float, cost: FetchCost | None = None) -> FetchCost:
    """A node that computed steps of 100 prompt positions at this speed."""
    cost = cost or FetchCost(BLOCK_SIZE)
    now = 1.0
    for number in range(1, 40):
        cost.turned(True, now)
        now += 100 * seconds_per_token
        cost.read(100 * number, now)
    return cost


@given(SECONDS, SECONDS, st.lists(st.integers(1, 64), min_size=6, max_size=12, unique=True))
def test_latency_and_bandwidth_are_told_apart_by_fetches_of_different_sizes(
    latency: float, per_block: float, sizes: list[int]
) -> None:
    cost = FetchCost(BLOCK_SIZE)
    for number in sizes:
        cost.fetched(number, number, latency + number * per_block)
    assert cost.line() == pytest.approx((latency, per_block), rel=1e-3, abs=1e-5)


@given(st.lists(st.tuples(st.integers(0, 64), st.floats(0, 3.0)), min_size=1, max_size=12))
def test_no_line_ever_goes_below_nothing(fetches: list[tuple[int, float]]) -> None:
    cost = FetchCost(BLOCK_SIZE)
    for number, seconds in fetches:
        cost.fetched(64, number, seconds)
    latency, per_block = cost.line()
    assert latency >= 0 and per_block >= 0


def test_the_last_fetches_count_most() -> None:
    cost = FetchCost(BLOCK_SIZE)
    for _ in range(20):
        cost.fetched(8, 8, 4.0)
    for number in (4, 8, 12, 16, 4, 8, 12, 16, 4, 8, 12, 16):
        cost.fetched(number, number, 0.01 + number * 0.001)
    latency, per_block = cost.line()
    assert latency + 8 * per_block < 0.1


def test_the_speed_of_computing_is_that_of_steps_with_prompts_while_they_run() -> None:
    cost = FetchCost(BLOCK_SIZE)
    assert cost.compute_s(1000) == COLD_WAIT_S
    cost.turned(True, 5.0)
    cost.read(100, 5.5)  # two were launched together: the second begins when the first has ended
    cost.turned(True, 5.5)
    cost.read(200, 6.0)
    cost.turned(False, 6.0)
    cost.turned(True, 900.0)  # idle meanwhile
    cost.read(300, 900.5)
    cost.turned(True, 900.5)
    cost.read(300, 909.0)  # a step of decodes only
    cost.turned(True, 909.0)
    cost.read(400, 909.5)
    assert cost.compute_s(200) == pytest.approx(1.0)


@pytest.mark.covers("W08")
@given(SECONDS, SECONDS, SECONDS, st.integers(0, 2000), st.integers(1, 40), st.floats(0, 1))
def test_so_many_blocks_are_worth_it_that_no_more_would_be_sooner_there(
    latency: float, per_block: float, per_token: float, in_front: int, num_blocks: int, share: float
) -> None:
    cost = computing(per_token)
    for number in (1, 64) * 20:
        cost.fetched(round(number / max(share, 1e-3)), number, latency + number * per_block)

    speed = cost.speed()
    assert speed is not None and speed.fetch is not None
    asked = speed.fetch.share  # of whole blocks: near `share`, and as near as their numbers allow
    assert 0.6 * max(share, 1e-3) < asked < 1.6 * max(share, 1e-3)

    def gain(number: int) -> float:
        fetch_s = latency + number * per_block
        return in_front * per_token + asked * number * BLOCK_SIZE * per_token - fetch_s

    worth = cost.num_worth(num_blocks, in_front)
    slack = 0.02 * (abs(gain(0)) + latency + num_blocks * (per_block + BLOCK_SIZE * per_token))
    assert 0 <= worth <= num_blocks
    if worth:
        assert gain(worth) > -slack, "slower than computing it"
    if worth < num_blocks:
        assert gain(num_blocks) < slack, "all of them would be faster"
        assert worth == 0 or gain(worth + 1) < slack


@pytest.mark.covers("W08")
def test_a_pool_that_says_yes_and_brings_nothing_is_soon_not_worth_a_look() -> None:
    cost = computing(1e-3)
    cost.fetched(8, 8, 0.01)
    assert cost.is_worth_a_look(8, 0)
    for _ in range(12):
        cost.fetched(8, 0, 0.02)
    assert not cost.is_worth_a_look(8, 0)


@pytest.mark.covers("W08")
def test_looks_may_take_a_share_of_what_there_is_to_win() -> None:
    cost = computing(1e-3)
    cost.fetched(8, 8, 1e-3)
    for _ in range(30):
        cost.looked(0.05)
    just_enough = int(0.05 / LOOK_SHARE / 1e-3 / BLOCK_SIZE) + 1
    assert cost.is_worth_a_look(just_enough + 1, 0) and not cost.is_worth_a_look(just_enough - 2, 0)
    assert cost.is_worth_a_look(1, 60), "who waits in the queue anyway may look meanwhile"


@pytest.mark.covers("R02")
def test_what_is_known_of_both_speeds_is_what_routers_are_told() -> None:
    cost = FetchCost(BLOCK_SIZE)
    report = pb.LoadReport()
    tell_speed(report, cost.speed(), 0)
    assert report == pb.LoadReport(), "nothing is measured"
    computing(1e-3, cost)
    tell_speed(report, cost.speed(), 3900)
    assert report.prefill_tokens_per_s == pytest.approx(1000) and report.prefill_tokens == 3900
    assert not report.HasField("fetch"), "it has fetched nothing"
    for number in (2, 60) * 4:
        cost.fetched(number, number, 0.01 + number * 0.002)
    cost.looked(0.1)
    tell_speed(report, cost.speed(), 3900)
    told = report.fetch
    assert (told.latency_s, told.block_s, told.share) == pytest.approx((0.01, 0.002, 1.0), rel=1e-3)
    assert 0 < told.look_s < 0.1


def test_patience_is_the_time_that_computing_takes_and_short_while_a_speed_is_unknown() -> None:
    cost = computing(1e-3)
    assert cost.patience_s(2, 0) == pytest.approx(0.032) and cost.patience_s(100, 900) == COLD_WAIT_S
    cost.fetched(8, 8, 1.0)
    assert cost.patience_s(100, 900) == pytest.approx(2.5)
    unknown = FetchCost(BLOCK_SIZE)
    assert unknown.patience_s(1, 0) == COLD_WAIT_S and unknown.num_worth(7, 0) == 7 and unknown.is_worth_a_look(7, 0)


def test_a_few_short_prompts_make_no_node_look_slow_for_long_ones() -> None:
    """10 ms a step and 15 us a token: what was computed last weighs by its tokens, not by its steps."""
    cost, num_tokens, now = FetchCost(16), 0, 0.0
    for length in [3000] * 5 + [30] * 30:
        cost.turned(True, now)
        now += 0.01 + 15e-6 * length
        num_tokens += length
        cost.read(num_tokens, now)
        cost.turned(False, now)
    speed = cost.speed()
    assert speed is not None and speed.token_s < 3 * (15e-6 + 0.01 / 3000)
