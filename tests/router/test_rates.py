"""Nodes' rates, as placement takes them: noise counts for nothing, other hardware does, and nothing told can break a division."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.events import NodeRef
from router.rates import KEEPS, NUM_TOKENS, SAME, Rates

A, B, C, D = (NodeRef(name, 1) for name in "abcd")
rates = st.floats(allow_nan=True, allow_infinity=True, width=32)
tokens = st.sampled_from((0, NUM_TOKENS - 1, NUM_TOKENS, 1 << 40))


def heard(**told: float) -> Rates:
    made = Rates()
    for name, rate in told.items():
        made.hear(NodeRef(name, 1), rate, NUM_TOKENS)
    return made


@pytest.mark.covers("R02")
def test_rates_within_a_factor_of_two_are_one_and_other_hardware_has_its_own() -> None:
    made = heard(a=1000, b=1900, c=300, d=160)
    assert [made.of(node) for node in (A, B, C, D)] == [1900, 1900, 300, 300]
    made.hear(A, 700, NUM_TOKENS)
    assert made.of(A) == 700
    made.hear(A, 600, NUM_TOKENS)
    assert made.of(A) == 700, "a change of a few parts in a hundred is none"
    made.forget(B)
    assert (made.of(A), made.of(B), made.of(C)) == (700, 700, 300)


@pytest.mark.covers("R02")
def test_a_rate_counts_once_it_rests_on_many_tokens_and_who_has_none_is_taken_for_the_fastest() -> None:
    made = Rates()
    assert made.of(A) is None
    made.hear(A, 100, NUM_TOKENS - 1)
    made.hear(B, 5000, 7)
    assert made.of(A) == made.of(B) == made.of(C) == 5000, "one rate for all"
    made.hear(A, 100, NUM_TOKENS)
    assert made.of(A) == made.of(B) == made.of(C) == 100
    made.hear(B, 5000, NUM_TOKENS)
    assert (made.of(A), made.of(B), made.of(C)) == (100, 5000, 5000)
    made.forget(A)
    made.forget(B)
    assert made.of(A) is None


@pytest.mark.covers("R02")
@given(st.lists(st.tuples(st.sampled_from((A, B, C)), rates, tokens), max_size=12))
def test_whatever_is_told_a_rate_can_be_divided_by_and_is_one_that_somebody_told(
    told: list[tuple[NodeRef, float, int]],
) -> None:
    made = Rates()
    for each in told:
        made.hear(*each)
        for node in (A, B, C, D):
            rate = made.of(node)
            assert rate is None or (math.isfinite(1 / rate) and rate > 0 and any(rate == said for _, said, _ in told))


@pytest.mark.covers("R02")
@given(st.lists(st.floats(900, 1100), min_size=1, max_size=6))
def test_equal_nodes_have_equal_rates_however_their_measurements_differ(told: list[float]) -> None:
    made = Rates()
    for number, rate in enumerate(told):
        made.hear(NodeRef(f"n{number}", 1), rate, NUM_TOKENS)
    assert len({made.of(NodeRef(f"n{number}", 1)) for number in range(len(told))}) == 1
    assert KEEPS < SAME
