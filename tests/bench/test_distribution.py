"""Statistics against numpy, over random lists of every small length."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.distribution import histogram, percentile, summarize, time_per_output_token

VALUES = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=200)


@given(VALUES, st.floats(0, 100))
def test_a_percentile_is_numpys(values: list[float], percent: float) -> None:
    expected = float(np.percentile(values, percent))
    assert math.isclose(percentile(sorted(values), percent), expected, rel_tol=1e-12, abs_tol=1e-6)


def test_percentiles_of_hand_made_lists_are_exact() -> None:
    assert [percentile([1.0, 2.0, 3.0, 4.0, 5.0], each) for each in (0, 25, 50, 90, 100)] == [1, 2, 3, 4.6, 5]
    assert percentile([7.0], 99) == 7
    assert percentile([0.0, 10.0], 50) == 5


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], -1), ([1.0], 100.5), ([1.0], math.nan)])
def test_a_percentile_of_nothing_or_beyond_the_ends_is_refused(values: list[float], percent: float) -> None:
    with pytest.raises(ValueError, match="percentile"):
        percentile(values, percent)


def test_a_summary_is_numpys_whatever_the_order_of_the_values(fresh_seed: int) -> None:
    rng = random.Random(fresh_seed)
    for number in (*range(1, 30), 1000):
        values = [rng.lognormvariate(0, 2) for _ in range(number)]
        summary = summarize(values)
        assert summary is not None
        found = [summary.count, summary.mean, summary.p50, summary.p90, summary.p99, summary.max]
        expected = [number, np.mean(values), *np.percentile(values, [50, 90, 99]), max(values)]
        assert found == pytest.approx(expected, rel=1e-12)
    assert summarize([]) is None


@given(st.lists(st.floats(-1e6, 1e6), max_size=100), st.integers(1, 20))
def test_a_histogram_puts_every_value_into_one_bin_and_its_bins_touch(values: list[float], num_bins: int) -> None:
    bins = histogram(values, num_bins)
    assert sum(each.count for each in bins) == len(values)
    assert [each.high for each in bins[:-1]] == [each.low for each in bins[1:]]
    for each in bins[:-1]:
        assert each.count == sum(each.low <= value < each.high for value in values)
    if bins:
        assert (bins[0].low, bins[-1].high) == (min(values), max(values))


def test_bins_are_of_equal_width_and_of_equal_ratio_where_values_differ_tenfold() -> None:
    assert [(each.low, each.high) for each in histogram([1.0, 2.0, 5.0], 2)] == [(1, 3), (3, 5)]
    assert [(each.low, each.count) for each in histogram([1.0, 5.0, 100.0], 2)] == [(1, 2), (10, 1)]


def test_the_first_token_is_not_in_the_time_per_output_token() -> None:
    assert time_per_output_token(2.0, 5.0, 4) == 1.0
    assert time_per_output_token(2.0, 2.0, 1) is None
    assert time_per_output_token(2.0, 2.0, 0) is None
