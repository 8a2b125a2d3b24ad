"""Arrivals and lengths: what was asked for, from the seed alone."""

from __future__ import annotations

import math
import random
from itertools import islice, pairwise

import pytest

from bench.arrivals import LONGEST, Arrivals, Lengths, arrivals_of, parse_rate, parse_rates


def gaps_of(rng: random.Random, kind: Arrivals, rate: float, number: int, burstiness: float = 1.0) -> list[float]:
    """Between the first so many arrivals, the run's start included."""
    return [b - a for a, b in pairwise([0.0, *islice(arrivals_of(rng, kind, rate, burstiness), number)])]


def test_gaps_of_arrivals_are_exponential_with_the_rate_that_was_asked_for(fresh_seed: int) -> None:
    number, rate = 20_000, 40.0
    gaps = gaps_of(random.Random(fresh_seed), "poisson", rate, number)
    assert min(gaps) >= 0
    # Mean and the shares above 1, 2, 3 means, each within five standard errors.
    assert abs(math.fsum(gaps) / number * rate - 1) < 5 / math.sqrt(number)
    for multiple in (1, 2, 3):
        share = sum(gap > multiple / rate for gap in gaps) / number
        expected = math.exp(-multiple)
        assert abs(share - expected) < 5 * math.sqrt(expected * (1 - expected) / number)


def test_an_infinite_rate_is_all_at_once_and_the_same_seed_draws_the_same() -> None:
    assert gaps_of(random.Random(1), "poisson", math.inf, 3) == [0.0, 0.0, 0.0]
    assert gaps_of(random.Random(1), "gamma", 2.0, 9) == gaps_of(random.Random(1), "gamma", 2.0, 9)
    assert gaps_of(random.Random(1), "constant", 4.0, 3) == [0.25, 0.25, 0.25]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_is_the_inverse_of_the_gaps_variance_and_leaves_their_mean(
    fresh_seed: int, burstiness: float
) -> None:
    number, rate = 40_000, 10.0
    gaps = [gap * rate for gap in gaps_of(random.Random(fresh_seed), "gamma", rate, number, burstiness)]
    mean = math.fsum(gaps) / number
    variance = math.fsum((gap - mean) ** 2 for gap in gaps) / number
    assert abs(mean - 1) < 5 / math.sqrt(burstiness * number)
    assert variance * burstiness == pytest.approx(1, rel=0.2)


def test_lengths_are_uniform_over_mean_and_spread_ends_included(fresh_seed: int) -> None:
    rng = random.Random(fresh_seed)
    assert {Lengths.parse("5:2").draw(rng) for _ in range(500)} == {3, 4, 5, 6, 7}
    assert {Lengths.parse("5").draw(rng) for _ in range(50)} == {5}


@pytest.mark.parametrize("text", ["exp:200", "lognormal:200:0.5"])
def test_skewed_lengths_have_the_mean_that_was_asked_for_and_a_bound(fresh_seed: int, text: str) -> None:
    rng, number = random.Random(fresh_seed), 20_000
    drawn = [Lengths.parse(text).draw(rng) for _ in range(number)]
    assert math.fsum(drawn) / number == pytest.approx(200, rel=0.06)
    assert 1 <= min(drawn) < 100 and 300 < max(drawn) <= LONGEST * 200
    assert {min(max(Lengths(1, 0, "lognormal", 4.0).draw(rng), 0), 99) for _ in range(2000)} <= set(
        range(1, LONGEST + 1)
    )


BAD_LENGTHS = [*"0 -3 4: 4:4 4:5 4.5 x 4:2:1 exp:0 exp:4:2 lognormal:4 lognormal:4:9".split(), ""]


@pytest.mark.parametrize("text", BAD_LENGTHS)
def test_lengths_that_make_no_sense_are_refused_with_what_was_given(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text}: "):
        Lengths.parse(text)


def test_a_rate_is_positive_or_infinite() -> None:
    assert (parse_rate("2.5"), parse_rate("inf")) == (2.5, math.inf)
    assert parse_rates("1, 2.5,4") == [1, 2.5, 4]
    for text in ("0", "-1", "nan", "fast", ""):
        with pytest.raises(ValueError, match=f"^{text}: "):
            parse_rate(text)
    for text in ("1,inf", "1,", "0", ""):
        with pytest.raises(ValueError, match="must be"):
            parse_rates(text)
