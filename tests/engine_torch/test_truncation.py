"""Truncation over large vocabularies: what sorting all of it would leave, and seldom by sorting it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import engine.sampler
from engine.plan import SamplingParams
from engine.sampler import Draw, gumbel_noise, sample
from engine.token_counts import TokenCounts
from engine.truncation import Kept, Row, is_surely_kept, kept, largest_ids
from kernels.choice import choose_kernels
from tests.kernels_choice import KERNELS
from tests.thorough import examples

PLAIN = SamplingParams(temperature=1.0, seed=0)
VOCAB_SIZE = 20_000
NUM_DRAWS = 60


def random_logits(seed: int, scale: float = 1.5) -> Tensor:
    return torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * scale


def sorted_nucleus(scores: np.ndarray, top_p: float) -> np.ndarray:
    order = np.argsort(-scores, kind="stable")
    weights = np.exp(scores[order] - scores[order[0]])
    return order[: int((weights.cumsum() < top_p * weights.sum()).sum()) + 1]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SamplingParams]]:
    """What was truncated by looking at all of a row."""
    calls: list[SamplingParams] = []

    def counting(below: Row, sampling: SamplingParams) -> Kept:
        calls.append(sampling)
        return kept(below, sampling)

    monkeypatch.setattr(engine.sampler, "kept", counting)
    yield calls


@pytest.mark.covers("A02")
@pytest.mark.parametrize("scale", [0.015, 1.5, 12.0])
@pytest.mark.parametrize("top_p", [0.2, 0.95, 0.9999])
@pytest.mark.parametrize("is_coarse", [False, True], ids=["fine", "coarse"])
@pytest.mark.parametrize("kernels", ["torch", KERNELS])
def test_top_p_over_a_large_vocabulary_keeps_what_sorting_all_of_it_would(
    scale: float, top_p: float, is_coarse: bool, kernels: str
) -> None:
    logits = random_logits(5, scale)
    if is_coarse:  # many are equal, and the last that are kept are some of those
        logits = (logits / scale).round() * scale
    scores = logits[0].double().numpy()
    left = sorted_nucleus(scores, top_p)
    for seed in range(20):
        noisy = scores[left] + gumbel_noise(seed, 0, left)
        draw = Draw(replace(PLAIN, top_p=top_p, seed=seed), 0)
        assert sample(logits, [draw], choose_kernels(kernels).kernels) == [int(left[noisy.argmax()])]


@pytest.mark.covers("A02")
@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 0.4},
        {"repetition_penalty": 3.0},
        {"presence_penalty": -2.0},
        {"frequency_penalty": -2.0, "temperature": 0.5},
        {"logit_bias": ((7, 9.0), (11, -100.0), (500, 8.0))},
        {"min_tokens": 50, "stop_token_ids": frozenset(range(100, 4000))},
    ],
    ids=str,
)
def test_what_was_changed_is_drawn_beside_what_was_not_and_beside_rows_of_all_kinds(
    changes: dict[str, Any], fresh_seed: int
) -> None:
    """The said tokens are nobody's favourites as they are, so that a back end would not tell of them."""
    truncations: list[dict[str, Any]] = [{}, {"top_p": 0.8}, {"top_k": 40}, {"min_p": 0.2}, {"temperature": 1e-31}]
    logits = random_logits(fresh_seed % 2**31)
    said = logits[0].argsort(descending=True)[30:330].tolist()
    draws = [
        Draw(
            replace(
                PLAIN, **{"seed": (fresh_seed + number) % 2**64, **changes, **truncations[number % len(truncations)]}
            ),
            20,
            TokenCounts([], said) if any("penalty" in name for name in changes) else None,
        )
        for number in range(NUM_DRAWS)
    ]
    rows = logits.expand(NUM_DRAWS, -1)
    assert sample(rows, draws, choose_kernels(KERNELS).kernels) == sample(rows, draws)


@pytest.mark.covers("A02")
@pytest.mark.parametrize("is_changed", [False, True], ids=["as they are", "changed"])
def test_who_wins_among_all_and_is_left_by_top_p_is_drawn_without_sorting(
    is_changed: bool, counted: list[SamplingParams], fresh_seed: int
) -> None:
    kernels = choose_kernels(KERNELS).kernels
    if kernels.contenders(torch.zeros(1, 8), np.ones(1, np.float32), np.zeros(1, np.uint64)) is None:
        pytest.skip(f"{KERNELS} does not tell who can win")
    logits = random_logits(fresh_seed % 2**31)
    sampling = replace(PLAIN, top_p=0.9)
    if is_changed:
        sampling = replace(sampling, repetition_penalty=1.3, logit_bias=((7, 6.0), (11, -100.0)))
    counts = TokenCounts([1, 2, 3], range(20)) if is_changed else None
    draws = [Draw(replace(sampling, seed=(fresh_seed + number) % 2**64), 20, counts) for number in range(NUM_DRAWS)]
    quick = sample(logits.expand(NUM_DRAWS, -1), draws, kernels)
    num_sorted = len(counted)
    assert quick == sample(logits.expand(NUM_DRAWS, -1), draws)
    assert len(counted) - num_sorted == NUM_DRAWS, "without a back end all of a row is looked at"
    assert num_sorted < NUM_DRAWS / 2, "a tenth are expected: those whose winner top_p leaves out"


@settings(max_examples=examples(100, 3), deadline=None)
@given(
    values=st.lists(st.integers(-9, 0), min_size=2, max_size=80),
    top_p=st.sampled_from([0.01, 0.3, 0.5, 0.9, 0.999]),
    temperature=st.sampled_from([0.3, 1.0, 5.0]),
    dtype=st.sampled_from([np.float32, np.float64]),
    data=st.data(),
)
def test_what_is_surely_kept_is_kept(
    values: list[int], top_p: float, temperature: float, dtype: type, data: st.DataObject
) -> None:
    below: Row = np.array(values, dtype) - max(values)
    sampling = replace(PLAIN, top_p=top_p, temperature=temperature, min_p=data.draw(st.sampled_from([0.0, 0.1])))
    token_id = data.draw(st.integers(0, len(values) - 1))
    if is_surely_kept(below, token_id, sampling):
        assert token_id in kept(below, sampling).token_ids
    likeliest = int(below.argmax())
    if (below == 0).sum() == 1 and top_p > 0.001:
        assert is_surely_kept(below, likeliest, sampling), "nothing is before it"


@settings(max_examples=examples(100, 3))
@given(
    values=st.lists(st.integers(0, 5), min_size=1, max_size=400),
    count=st.integers(1, 45),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_the_largest_come_first_and_of_equals_the_lowest_index(values: list[int], count: int, dtype: type) -> None:
    right = sorted(range(len(values)), key=lambda index: (-values[index], index))[:count]
    assert largest_ids(np.array(values, dtype), count).tolist() == right
