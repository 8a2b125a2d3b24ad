"""Greedy and Gumbel-max draws: the right distribution, from seed, index and token id alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.draw import Draw
from engine.gumbel import gumbel_noise
from engine.plan import BROKEN_ROW, SamplingParams
from engine.sampler import sample
from kernels.choice import choose_kernels
from tests.kernels_choice import KERNELS
from tests.thorough import examples

GREEDY = Draw(SamplingParams(0.0, 0), 0)
seeds = st.integers(-(1 << 63), (1 << 64) - 1)


def draw_at(temperature: float, seed: int, index: int) -> Draw:
    return Draw(SamplingParams(temperature, seed), index)


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    return float(((observed - expected) ** 2 / expected).sum())


def chi_square_bound(degrees: int) -> float:
    """Wilson-Hilferty: exceeded once in ten million runs (z = 5.2) by a right sampler."""
    return degrees * (1 - 2 / (9 * degrees) + 5.2 * math.sqrt(2 / (9 * degrees))) ** 3


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("along", ["seed", "index"])
def test_draws_are_distributed_as_softmax(temperature: float, along: str) -> None:
    base = int(np.random.default_rng().integers(1 << 62))
    print(f"base {base}")  # noqa: T201 - pytest shows it with a failure
    logits = torch.randn(40, generator=torch.Generator().manual_seed(1)) * 1.5
    num_draws = examples(20_000, 3)
    counters = range(base, base + num_draws)
    where = [(c, 0) if along == "seed" else (base, c - base) for c in counters]
    draws = [draw_at(temperature, seed, index) for seed, index in where]
    token_ids = sample(logits.expand(num_draws, -1), draws)
    expected = num_draws * torch.softmax(logits.double() / temperature, 0).numpy()
    common = expected >= 5  # the approximation's usual condition; the rest is one class
    observed = np.bincount(token_ids, minlength=40)
    classes = [np.append(x[common], max(x[~common].sum(), 1e-9)) for x in (observed, expected)]
    degrees = int(common.sum()) - (1 if common.all() else 0)
    assert chi_square(*classes) < chi_square_bound(degrees)


def test_noise_of_neighbouring_counters_is_uncorrelated() -> None:
    ids = np.arange(20_000)
    noise = gumbel_noise(7, 3, ids)
    for other in (gumbel_noise(8, 3, ids), gumbel_noise(7, 4, ids), np.roll(noise, 1)):
        assert abs(np.corrcoef(noise, other)[0, 1]) < 5 / math.sqrt(len(ids))
    assert abs(noise.mean() - np.euler_gamma) < 5 * math.pi / math.sqrt(6 * len(ids))


@settings(max_examples=examples(50, 3), deadline=None)
@given(seed=seeds, index=st.integers(0, 1 << 32), others=st.integers(0, 6), rows=st.integers(0, 1 << 30))
def test_a_draw_does_not_depend_on_its_neighbours(seed: int, index: int, others: int, rows: int) -> None:
    logits = torch.randn(others + 1, 3000, generator=torch.Generator().manual_seed(rows)) * 4
    mine = draw_at(0.8, seed, index)
    alone = sample(logits[others:], [mine])
    neighbours = [draw_at(0.3 * (row % 3), row, row) for row in range(others)]
    assert sample(logits, [*neighbours, mine])[others] == alone[0]


@settings(max_examples=examples(50, 3), deadline=None)
@given(seed=seeds, index=st.integers(0, 1 << 20), row=st.integers(0, 1 << 30), scale=st.sampled_from([0.1, 3.0, 30.0]))
def test_leaving_hopeless_tokens_out_changes_no_draw(seed: int, index: int, row: int, scale: float) -> None:
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(row)) * scale
    scores = (logits - logits.max()).double().numpy() / 0.9 + gumbel_noise(seed, index, np.arange(5000))
    assert sample(logits[None], [draw_at(0.9, seed, index)]) == [int(scores.argmax())]


def test_greedy_takes_the_first_of_equal_logits() -> None:
    logits = torch.zeros(2, 1000)
    logits[0, [3, 500, 999]] = 1.0
    assert sample(logits, [GREEDY, GREEDY]) == [3, 0]


def test_a_temperature_next_to_zero_is_greedy() -> None:
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(0))
    assert sample(logits, [draw_at(5e-324, 1, 2)]) == sample(logits, [GREEDY])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("draw", [GREEDY, draw_at(1.0, 0, 0)])
def test_logits_that_are_not_numbers_break_their_row_only(bad: float, draw: Draw) -> None:
    logits = torch.zeros(3, 100)
    logits[1, 42] = bad
    first, broken, last = sample(logits, [draw] * 3)
    assert broken == BROKEN_ROW and [first, last] == sample(torch.zeros(2, 100), [draw] * 2)


def test_a_row_with_nothing_to_choose_is_broken() -> None:
    assert sample(torch.full((1, 10), -math.inf), [GREEDY]) == [BROKEN_ROW]


@pytest.mark.covers("A14")
@settings(max_examples=examples(60, 3), deadline=None)
@given(seeds, st.sampled_from([0.0, 1.0, 5.0]), st.sampled_from([0, 3]), st.sampled_from([1.0, 0.8]), st.data())
def test_what_a_grammar_bans_is_drawn_as_if_the_model_had_ruled_it_out_and_other_rows_as_without(
    seed: int, temperature: float, top_k: int, top_p: float, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed % (1 << 32))
    logits = torch.from_numpy(rng.normal(0, 3, (4, 300)).astype(np.float32))
    masks = rng.random((4, 300)) < data.draw(st.sampled_from([0.01, 0.5, 1.0]))
    masks[:, 7] = True
    draws = [Draw(SamplingParams(temperature, seed + row, top_k=top_k, top_p=top_p), row) for row in range(4)]
    bound = [draw._replace(allowed=masks[row]) if row % 2 else draw for row, draw in enumerate(draws)]
    before, ruled_out = logits.clone(), logits.clone()
    for row in (1, 3):
        ruled_out[row, torch.from_numpy(~masks[row])] = -math.inf
    kernels = data.draw(st.sampled_from([None, choose_kernels(KERNELS).kernels]))
    assert sample(logits, bound, kernels) == sample(ruled_out, draws, kernels)
    assert torch.equal(logits, before), "logprobs are of what the model said"


@pytest.mark.covers("A14")
def test_a_bound_row_to_which_nothing_is_allowed_or_whose_logits_are_no_numbers_is_broken() -> None:
    logits, nothing, one = torch.zeros(2, 100), np.zeros(100, np.bool_), np.zeros(100, np.bool_)
    one[5] = True
    for draw in (GREEDY, draw_at(1.0, 0, 0)):
        assert sample(logits, [draw._replace(allowed=nothing), draw._replace(allowed=one)]) == [BROKEN_ROW, 5]
        assert sample(logits * math.nan, [draw._replace(allowed=one)] * 2) == [BROKEN_ROW] * 2
    logits[0, 9] = math.nan  # banned, and yet a sign of broken KV
    assert sample(logits, [GREEDY._replace(allowed=one)] * 2) == [BROKEN_ROW, 5]


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.empty(0, 100), []) == []
