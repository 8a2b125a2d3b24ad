"""Arrivals and lengths: what was asked for, from the seed alone."""

from __future__ import annotations

import math
import random

import pytest

from bench.arrivals import Lengths, parse_rate, poisson_offsets


def test_gaps_of_arrivals_are_exponential_with_the_rate_that_was_asked_for(fresh_seed: int) -> None:
    number, rate = 20_000, 40.0
    offsets = poisson_offsets(random.Random(fresh_seed), rate, number)
    gaps = [b - a for a, b in zip([0.0, *offsets], offsets, strict=False)]
    assert min(gaps) >= 0
    # Mean and the shares above 1, 2, 3 means, each within five standard errors.
    assert abs(math.fsum(gaps) / number * rate - 1) < 5 / math.sqrt(number)
    for multiple in (1, 2, 3):
        share = sum(gap > multiple / rate for gap in gaps) / number
        expected = math.exp(-multiple)
        assert abs(share - expected) < 5 * math.sqrt(expected * (1 - expected) / number)


def test_an_infinite_rate_is_all_at_once_and_the_same_seed_draws_the_same() -> None:
    assert poisson_offsets(random.Random(1), math.inf, 3) == [0.0, 0.0, 0.0]
    assert poisson_offsets(random.Random(1), 2.0, 9) == poisson_offsets(random.Random(1), 2.0, 9)


def test_lengths_are_uniform_over_mean_and_spread_ends_included(fresh_seed: int) -> None:
    rng = random.Random(fresh_seed)
    assert {Lengths.parse("5:2").draw(rng) for _ in range(500)} == {3, 4, 5, 6, 7}
    assert {Lengths.parse("5").draw(rng) for _ in range(50)} == {5}


@pytest.mark.parametrize("text", ["", "0", "-3", "4:", "4:4", "4:5", "4.5", "x", "4:2:1"])
def test_lengths_that_make_no_sense_are_refused_with_what_was_given(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text}: "):
        Lengths.parse(text)


def test_a_rate_is_positive_or_infinite() -> None:
    assert (parse_rate("2.5"), parse_rate("inf")) == (2.5, math.inf)
    for text in ("0", "-1", "nan", "fast", ""):
        with pytest.raises(ValueError, match=f"^{text}: "):
            parse_rate(text)
