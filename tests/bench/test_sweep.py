"""The search for the rate that a server stands, and what counts as standing it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.completions import Record
from bench.goodput import Slo, goodput_of
from bench.report import report_of
from bench.serve_result import Run
from bench.sweep import Search, Try, Verdict, ceiling, knee

MOST_TRIES = 40


def searched(search: Search, passes: list[bool] | None, true_knee: float) -> list[Try]:
    """The tries of a search against a server that stands `true_knee`; `passes` says otherwise for as many tries."""
    tries: list[Try] = []
    while (rate := search.next_rate(tries)) is not None:
        assert search.lowest <= rate <= search.highest and len(tries) < MOST_TRIES
        is_passed = passes[len(tries)] if passes and len(tries) < len(passes) else rate <= true_knee
        tries.append(Try(rate, Verdict.PASSED if is_passed else Verdict.FAILED))
    return tries


@given(st.floats(0.02, 900), st.floats(0.05, 500), st.sampled_from([0.01, 0.05, 0.1, 0.5]))
def test_a_sweep_finds_the_true_knee_within_its_step(true_knee: float, start: float, step: float) -> None:
    tries = searched(Search(start, step, 0.01, 1000), None, true_knee)
    low, high = knee(tries), ceiling(tries)
    if low is None:
        assert true_knee < 0.01, "a server that stands the lowest rate has a knee"
    elif high is None:
        assert low == 1000
    else:
        assert low <= true_knee < high
        assert high <= low * (1 + step) * (1 + 1e-9) or high - low <= 2e-3 * high, "as near as rates of four digits are"


@given(st.lists(st.booleans(), max_size=MOST_TRIES - 15), st.floats(0.02, 900))
def test_a_noisy_server_makes_the_sweep_end_all_the_same_and_never_above_a_rate_that_failed(
    passes: list[bool], true_knee: float
) -> None:
    tries = searched(Search(1.0, 0.1, 0.01, 1000), passes, true_knee)
    low, high = knee(tries), ceiling(tries)
    assert low is None or high is None or low < high
    assert all(each.verdict is Verdict.PASSED for each in tries if low is not None and each.rate <= low)


def test_a_rate_that_passed_above_one_that_failed_is_not_believed() -> None:
    verdicts = {2.0: Verdict.PASSED, 16.0: Verdict.PASSED, 8.0: Verdict.FAILED, 4.0: Verdict.PASSED}
    tries = [Try(rate, verdict) for rate, verdict in verdicts.items()]
    assert (knee(tries), ceiling(tries)) == (4.0, 8.0)
    assert knee([Try(1.0, Verdict.LATE)]) is None and ceiling([Try(1.0, Verdict.LATE)]) == 1.0


def test_a_server_that_stands_everything_or_nothing_ends_the_sweep_at_its_bounds() -> None:
    assert [each.rate for each in searched(Search(300, 0.1, 0.01, 1000), None, 1e9)] == [300, 600, 1000]
    assert [each.rate for each in searched(Search(0.03, 0.1, 0.01, 1000), None, 0)] == [0.03, 0.015, 0.01]


def record(index: int, ttft_s: float, tpot_s: float, lag_s: float = 0.0) -> Record:
    """An answer of three tokens."""
    chunks = [ttft_s, ttft_s + tpot_s, ttft_s + 2 * tpot_s]
    return Record(index, 4, 3, float(index), lag_s, "200", "", 0.001, chunks[-1], chunks, 4, 3)


@given(st.lists(st.tuples(st.booleans(), st.floats(0.01, 2), st.floats(0.01, 2)), min_size=1, max_size=30))
def test_goodput_counts_who_met_both_limits_and_nobody_who_failed(drawn: list[tuple[bool, float, float]]) -> None:
    records = [record(index, ttft, tpot) for index, (_, ttft, tpot) in enumerate(drawn)]
    for each, (is_ok, _, _) in zip(records, drawn, strict=True):
        each.status = "200" if is_ok else "503"
    slo = Slo(0.5, 0.25)
    # TPOT is computed from instants, so a hair of rounding stands between it and what was drawn.
    met = [
        ok and r.chunk_at_s[0] <= 0.5 and (r.tpot_s or 0) <= 0.25 for r, (ok, _, _) in zip(records, drawn, strict=True)
    ]
    found = goodput_of(records, slo, 10.0)
    assert (found.num_met, found.attainment, found.requests_per_s) == (
        sum(met),
        sum(met) / len(met),
        sum(met) / 10,
    )


@pytest.mark.parametrize("slo", [Slo(), Slo(ttft_s=9.0), Slo(tpot_s=9.0)])
def test_a_failed_request_meets_no_limit_at_all(slo: Slo) -> None:
    failed = record(0, 0.1, 0.1)
    assert slo.is_met(failed)
    failed.status = "503"
    assert not slo.is_met(failed)


def test_one_token_meets_any_limit_on_tpot_and_a_whole_answer_none_on_ttft() -> None:
    single = Record(0, 4, 1, 0.0, 0.0, "200", "", 0.001, 0.2, [0.2], 4, 1)
    whole = Record(0, 4, 3, 0.0, 0.0, "200", "", 0.001, 0.2, [], 4, 3)
    assert Slo(0.3, 0.001).is_met(single) and not Slo(0.1, None).is_met(single)
    assert not Slo(0.3, None).is_met(whole) and Slo(None, None).is_met(whole)
    assert goodput_of([], Slo(), 0.0).attainment == 0


def test_an_answer_whose_tokens_nobody_counted_is_not_known_to_meet_a_limit_on_tpot() -> None:
    uncounted = replace(record(0, 0.1, 9.0), output_tokens=None)
    assert uncounted.tpot_s is None and not Slo(0.5, 0.25).is_met(uncounted) and Slo(0.5, None).is_met(uncounted)


@pytest.mark.parametrize(
    ("num_slow", "lag_s", "verdict"),
    [(0, 0.0, Verdict.PASSED), (1, 0.0, Verdict.PASSED), (2, 0.0, Verdict.FAILED), (0, 1.0, Verdict.LATE)],
)
def test_a_rate_passes_if_so_many_met_the_limits_and_the_generator_kept_up(
    num_slow: int, lag_s: float, verdict: Verdict
) -> None:
    records = [record(index, 9.0 if index < num_slow else 0.1, 0.1, lag_s) for index in range(10)]
    assert Run(1.0, "", records, report_of(records, Slo(0.5, None))).verdict(0.9) is verdict
