"""The buckets of clients' limits against what they promise: never more than a minute's worth ahead, never a wait in vain."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api_keys import Client
from router.rate_limit import MINUTE_S, Over, RateLimits, Taken

LIMITS = st.integers(1, 500)
STEPS = st.lists(st.tuples(st.floats(0, 40), st.integers(0, 700), st.integers(0, 300)), max_size=60)


@pytest.mark.covers("X02")
@given(LIMITS, st.lists(st.floats(0, 30), max_size=200))
def test_in_any_time_no_more_requests_pass_than_the_limit_allows(limit: int, pauses: list[float]) -> None:
    limits, client, now = RateLimits(), Client("a", requests_per_minute=limit), 100.0
    passed: list[float] = []
    for pause in pauses:
        now += pause
        if limits.admit(client, now) is None:
            passed.append(now)
    for first, began in enumerate(passed):
        for last in range(first, len(passed)):
            assert last - first + 1 <= limit * (1 + (passed[last] - began) / MINUTE_S) + 1e-3


@pytest.mark.covers("X02")
@given(LIMITS, STEPS)
def test_who_waits_as_long_as_told_is_let_in_and_not_before(limit: int, steps: list[tuple[float, int, int]]) -> None:
    limits, client, now = RateLimits(), Client("a", tokens_per_minute=limit), 0.0
    for pause, prompt, generated in steps:
        now += pause
        over = limits.take(client, prompt, now)
        if over is not None:
            assert (over.what, over.limit) == ("tokens", limit)
            assert over.retry_after_s > 0
            assert limits.take(client, prompt, now + over.retry_after_s * 0.9) is not None
            now += over.retry_after_s + 1e-3
            assert limits.take(client, prompt, now) is None
        limits.owe(client, generated, now)


@pytest.mark.covers("X02")
@given(LIMITS, STEPS)
def test_tokens_that_pass_are_paid_for(limit: int, steps: list[tuple[float, int, int]]) -> None:
    """By what a minute's worth and the time since give, but for the last prompt and what ran beside it."""
    limits, client, now = RateLimits(), Client("a", tokens_per_minute=limit), 0.0
    taken = 0
    for pause, prompt, generated in steps:
        now += pause
        if limits.take(client, prompt, now) is None:
            assert taken + min(prompt, limit) <= limit * (1 + now / MINUTE_S) + 1e-3
            taken += prompt
        limits.owe(client, generated, now)
        taken += generated


@pytest.mark.covers("X02")
def test_what_was_generated_is_waited_for_afterwards() -> None:
    limits, client = RateLimits(), Client("a", tokens_per_minute=60)
    assert limits.take(client, 60, 0.0) is None
    limits.owe(client, 60, 0.0)
    over = limits.take(client, 30, 0.0)
    assert isinstance(over, Over)
    assert math.isclose(over.retry_after_s, 90.0)


@pytest.mark.covers("X02")
def test_a_prompt_larger_than_the_bucket_needs_a_full_one() -> None:
    limits, client = RateLimits(), Client("a", tokens_per_minute=60)
    assert limits.take(client, 1000, 0.0) is None
    assert limits.take(client, 1000, 999.0) is not None
    assert limits.take(client, 1000, 1001.0) is None


@pytest.mark.covers("X02")
def test_nobody_pays_for_anybody_else_and_who_has_no_limits_leaves_nothing_behind() -> None:
    limits = RateLimits()
    one, other, free = Client("one", 1, 10), Client("other", 1, 10), Client("free")
    assert limits.admit(one, 0.0) is None
    assert limits.admit(one, 0.0) is not None
    assert limits.admit(other, 0.0) is None
    for _ in range(100):
        assert limits.admit(free, 0.0) is None
        assert limits.take(free, 10**9, 0.0) is None
        limits.owe(free, 10**9, 0.0)
    assert len(limits) == 2


@pytest.mark.covers("X02")
def test_new_keys_forget_who_has_gone_once_nothing_is_owed_and_keep_what_the_others_have_used() -> None:
    limits = RateLimits()
    stays, goes, owes = Client("stays", 1), Client("goes", 1), Client("owes", tokens_per_minute=60)
    assert limits.admit(stays, 0.0) is limits.admit(goes, 0.0) is None
    limits.owe(owes, 180, 0.0)
    limits.keep({"stays"}, 1.0)
    assert len(limits) == 3
    assert limits.admit(stays, 1.0) is not None
    limits.keep({"stays", "goes", "comes"}, 2.0)
    assert limits.admit(goes, 2.0) is not None, "a file that missed it for a moment empties no debt"
    limits.keep({"stays"}, 59.0)
    assert len(limits) == 3
    limits.keep({"stays"}, 61.0)
    assert len(limits) == 2
    assert limits.take(owes, 1, 61.0) is not None
    limits.keep({"stays"}, 181.0)
    assert len(limits) == 1
    assert limits.admit(goes, 181.0) is None


@pytest.mark.covers("X02")
def test_a_limit_that_shrinks_counts_at_once() -> None:
    limits = RateLimits()
    assert limits.admit(Client("a", 600), 0.0) is None
    assert limits.admit(Client("a", 1), 0.0) is None
    assert limits.admit(Client("a", 1), 0.0) is not None


@pytest.mark.covers("X02")
@given(
    LIMITS,
    st.lists(st.tuples(st.floats(0, 40), st.integers(0, 2), st.integers(0, 700), st.integers(0, 300)), max_size=60),
)
def test_processes_that_tell_each_other_at_once_are_one_bucket(
    limit: int, steps: list[tuple[float, int, int, int]]
) -> None:
    one, three, client, now = RateLimits(), [RateLimits() for _ in range(3)], Client("a", tokens_per_minute=limit), 0.0
    for pause, index, prompt, generated in steps:
        now += pause
        expected, over = one.take(client, prompt, now), three[index].take(client, prompt, now)
        assert (over is None) == (expected is None)
        one.owe(client, generated, now)
        three[index].owe(client, generated, now)
        for other in (each for number, each in enumerate(three) if number != index):
            other.hear(Taken("a", "tokens", generated + (prompt if over is None else 0), limit), now)


@pytest.mark.covers("X02")
@given(LIMITS, st.integers(2, 8), st.integers(1, 2000))
def test_what_was_let_in_before_the_others_heard_of_it_is_waited_for_by_all(
    limit: int, number: int, asked: int
) -> None:
    """All ask at one instant: no more than each a bucket, and what is too much is paid back before anybody gets another."""
    processes, client = [RateLimits() for _ in range(number)], Client("a", requests_per_minute=limit)
    admitted = [sum(each.admit(client, 0.0) is None for _ in range(asked)) for each in processes]
    assert all(count == min(asked, limit) for count in admitted)
    for index, each in enumerate(processes):
        each.hear(Taken("a", "requests", sum(admitted) - admitted[index], limit), 0.0)
    paid_at = max(0.0, (sum(admitted) - limit + 1) * MINUTE_S / limit)
    for each in processes:
        assert paid_at == 0.0 or each.admit(client, paid_at - 1e-3) is not None
        assert each.admit(client, paid_at + 1e-3) is None
