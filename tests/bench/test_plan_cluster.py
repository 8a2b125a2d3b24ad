"""The planner's cluster: the fast way against the product's scheduler, what must hold in any of them, and queueing theory."""

from __future__ import annotations

import random
from typing import Final

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bench.plan_cluster import Cluster
from bench.plan_engine import Sizes
from bench.plan_load import Load
from bench.plan_outcome import Counts, Outcome, Setup, Slo
from bench.plan_rates import Rates, Terms
from bench.trace import Entry, read_trace
from engine.reserve import ReserveConfig
from router.placement import CACHE_AWARE
from tests.thorough import examples

RATES: Final = Rates(
    decode=(Terms(0.005, 0.0003, 3.1e-6),),
    chunk=(Terms(0.004, 0.0003, 3.1e-6, 1.1e-4, 1.3e-8),),
    token_bytes=1000,
    link_bytes_per_s=1e6,
    link_latency_s=0.0017,
    route_s=0.0011,
    reply_s=0.0007,
)
LOOSE: Final = Slo(1e9, 1e9, 1.0)


def _lines(rng: random.Random, number: int, rate: float, longest: int) -> list[Entry]:
    """A drawn trace: some prompts begin with the same blocks."""
    at_s, lines = 0.0, []
    for index in range(number):
        at_s += rng.expovariate(rate)
        ids = (*range(rng.randint(0, 2)), *(100 * index + place for place in range(10, 14)))
        lines.append(Entry(at_s, rng.randint(1, longest), rng.randint(1, 40), ids))
    return lines


def _run(setup: Setup, counts: Counts, load: Load, slo: Slo = LOOSE) -> tuple[Cluster, Outcome]:
    cluster = Cluster(setup, counts, load, slo)
    return cluster, cluster.run()


def _check_ends(cluster: Cluster, outcome: Outcome) -> None:
    """Every request ended once, and nothing is held."""
    assert outcome.is_whole
    assert not np.isnan(outcome.end_s).any()
    assert np.isnan(outcome.ttft_s).sum() == outcome.num_refused
    assert (outcome.ttft_s[~np.isnan(outcome.ttft_s)] > 0).all()
    assert (outcome.tpot_s[~np.isnan(outcome.tpot_s)] > 0).all()
    for counts in cluster.block_counts():
        assert (counts.used, counts.leased, counts.quarantined) == (0, 0, 0)


@given(seed=st.integers(0, 1 << 32), placement=st.sampled_from([CACHE_AWARE, "least_loaded"]))
@settings(max_examples=examples(15, 3), deadline=None)
@example(seed=582821146, placement=CACHE_AWARE)  # a node evicts blocks in the middle of steps that tell nothing else
@example(seed=599676693, placement=CACHE_AWARE)
@example(seed=1415877709, placement=CACHE_AWARE)
def test_the_fast_way_ends_every_request_when_the_scheduler_does(seed: int, placement: str) -> None:
    """Same instants, up to how sums round, with nodes of all roles, short of blocks and not."""
    rng = random.Random(seed)
    load = Load(_lines(rng, 40, rng.choice((5.0, 40.0)), 120), 40, 1.0)
    policy = rng.choice(("ratio", "none", "full"))
    sizes = Sizes(rng.choice((45, 80, 400)), 4, rng.randint(2, 8), rng.choice((16, 64)), ReserveConfig(policy))  # type: ignore[arg-type]
    counts = rng.choice((Counts(1, 1), Counts(2, 1), Counts(1, 2), Counts(0, 0, 2)))
    ended = []
    for is_exact in (True, False):
        setup = Setup(sizes, RATES, placement, is_exact=is_exact, spells=True)
        cluster, outcome = _run(setup, counts, load)
        _check_ends(cluster, outcome)
        ended.append(outcome)
    exact, fast = ended
    np.testing.assert_allclose(fast.ttft_s, exact.ttft_s, rtol=1e-9)
    np.testing.assert_allclose(fast.end_s, exact.end_s, rtol=1e-9)
    assert (fast.num_preempted, fast.num_steps) == (exact.num_preempted, exact.num_steps)
    assert fast.num_computed == exact.num_computed


def test_a_full_queue_refuses_and_a_refused_request_is_missed() -> None:
    """It ends once, like every other, and counts against the objective."""
    load = Load(_lines(random.Random(1), 60, 1e6, 120), 60, 1.0)
    setup = Setup(Sizes(100, 4, 1, 16), RATES, "least_loaded", max_queue=5)
    cluster, outcome = _run(setup, Counts(1, 1), load)
    _check_ends(cluster, outcome)
    assert outcome.num_refused > 5
    assert outcome.num_kept == 60 - outcome.num_refused


@pytest.mark.parametrize("is_exact", [False, True])
def test_what_a_preempted_sequence_computes_again_was_not_cached(is_exact: bool) -> None:
    """A mixed node that is short of blocks, whose sequences go on there: what they had said is part of their prompts then."""
    load = Load([Entry(0.01 * index, 20, 300, (index,)) for index in range(8)], 8)
    setup = Setup(Sizes(32, reserve=ReserveConfig("none")), RATES, is_exact=is_exact)
    _, outcome = _run(setup, Counts(0, 0, 1), load)
    assert outcome.num_preempted > 8
    assert outcome.num_prompt >= outcome.num_computed > 8 * 20


def test_a_run_ends_early_once_too_many_missed() -> None:
    """What a search gives up does not cost a whole run."""
    load = Load(_lines(random.Random(2), 200, 100.0, 120), 200, 1.0)
    setup = Setup(Sizes(400, 4, 8, 64), RATES, "least_loaded")
    outcome = Cluster(setup, Counts(1, 1), load, Slo(1e-6, 1.0, 0.9), most_missed=20).run()
    assert not outcome.is_whole
    assert np.isnan(outcome.end_s).sum() > 100


def test_one_prefill_node_is_the_queue_that_theory_knows() -> None:
    """M/D/1 (Pollaczek and Khinchine): prompts of one length, drawn arrivals: the mean wait is use / (2 (1 - use)) services."""
    rng, number, use = random.Random(7), 8_000, 0.5
    service_s = 0.01
    rates = Rates((Terms(1.0),), (Terms(service_s),), 1, 1.0, 0.0)
    at_s, lines = 0.0, []
    for index in range(number):
        at_s += rng.expovariate(use / service_s)
        lines.append(Entry(at_s, 64, 1, (index,)))
    setup = Setup(Sizes(1000, 64, 32, 64), rates, "least_loaded", max_queue=1 << 20)
    _, outcome = _run(setup, Counts(1, 1), Load(lines, number))
    wait_s = float(outcome.ttft_s.mean()) - service_s
    assert wait_s == pytest.approx(use / (2 * (1 - use)) * service_s, rel=0.08)
    assert outcome.use["prefill"] == pytest.approx(use, rel=0.03)


def test_more_nodes_keep_no_less() -> None:
    """Without caches, whose contents depend on who is there, and beyond a hundredth of the requests."""
    load = Load(_lines(random.Random(3), 150, 60.0, 200), 150, 1.0)
    setup = Setup(Sizes(400, 4, 8, 64), RATES, "least_loaded")
    slo = Slo(0.15, 0.02, 0.9)
    kept = {
        (prefill, decode): _run(setup, Counts(prefill, decode), load, slo)[1].attainment
        for prefill in (1, 2, 4)
        for decode in (1, 2, 4)
    }
    for (prefill, decode), share in kept.items():
        if prefill < 4:
            assert kept[2 * prefill, decode] >= share - 0.01
        if decode < 4:
            assert kept[prefill, 2 * decode] >= share - 0.01
    assert kept[1, 1] < 0.5 < kept[4, 4]


def test_a_request_that_fits_no_node_is_named() -> None:
    """Before anything runs."""
    load = Load([Entry(0.0, 1000, 10, (1,))], 1)
    with pytest.raises(ValueError, match="a request of 1010 tokens fits no node of 10 blocks of 16"):
        Cluster(Setup(Sizes(10), RATES), Counts(1, 1), load, LOOSE)


def test_a_longer_load_repeats_the_trace_with_new_prompts() -> None:
    """Times go on, keys of one round are none of another's, and equal ids within a round are equal keys."""
    text = '{"timestamp": 1000, "input_length": 1500, "output_length": 8, "hash_ids": [0, 1, 2]}'
    other = '{"timestamp": 3000, "input_length": 1100, "output_length": 8, "hash_ids": [0, 1, 5]}'
    load = Load(read_trace([text, other]), 4, 16.0, 2.0)
    first, second, third, _ = map(load.__getitem__, range(4))
    assert [first.at_s, second.at_s, third.at_s] == [0.0, 1.0, 2.0]
    assert (first.prompt_tokens, first.output_tokens) == (94, 1)
    keys = [load.keys(each, 16) for each in (first, second, third)]
    assert [len(each) for each in keys] == [5, 4, 5]
    assert keys[0][:4] == keys[1][:4]
    assert not set(keys[0]) & set(keys[2])


def test_a_trace_without_requests_is_refused() -> None:
    """In one sentence."""
    with pytest.raises(ValueError, match="the trace is empty"):
        Load(read_trace([]), 1)


def test_ids_that_are_hashes_are_kept_apart_however_often_the_trace_is_repeated() -> None:
    entries = [Entry(0.0, 512, 1, (1,)), Entry(1.0, 512, 1, (1 + (1 << 40),)), Entry(2.0, 512, 1, ((1 << 53) - 1,))]
    load = Load(entries, 30_000)
    keys = [key for index in (0, 1, 2, 3, 29_999) for key in load.keys(load[index], 512)]
    assert len(set(keys)) == 5
