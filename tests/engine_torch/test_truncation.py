"""Truncation: what is left is what sorting all of a row would leave, and what is told of a token by its share is true."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.draw import Draw
from engine.gumbel import gumbel_noise
from engine.plan import SamplingParams
from engine.sampler import sample
from engine.truncation import Row, is_left, kept, largest_ids
from tests.thorough import examples

PLAIN = SamplingParams(temperature=1.0, seed=0)
VOCAB_SIZE = 20_000


def random_logits(seed: int, scale: float = 1.5) -> Tensor:
    return torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * scale


def sorted_nucleus(scores: np.ndarray, top_p: float) -> np.ndarray:
    order = np.argsort(-scores, kind="stable")
    weights = np.exp(scores[order] - scores[order[0]])
    return order[: int((weights.cumsum() < top_p * weights.sum()).sum()) + 1]


@pytest.mark.covers("A02")
@pytest.mark.parametrize("scale", [0.015, 1.5, 12.0])
@pytest.mark.parametrize("top_p", [0.2, 0.95, 0.9999])
@pytest.mark.parametrize("is_coarse", [False, True], ids=["fine", "coarse"])
def test_top_p_over_a_large_vocabulary_keeps_what_sorting_all_of_it_would(
    scale: float, top_p: float, is_coarse: bool
) -> None:
    logits = random_logits(5, scale)
    if is_coarse:  # many are equal, and the last that are kept are some of those
        logits = (logits / scale).round() * scale
    scores = logits[0].double().numpy()
    left = sorted_nucleus(scores, top_p)
    for seed in range(20):
        noisy = scores[left] + gumbel_noise(seed, 0, left)
        draw = Draw(replace(PLAIN, top_p=top_p, seed=seed), 0)
        assert sample(logits, [draw]) == [int(left[noisy.argmax()])]


@settings(max_examples=examples(150, 3), deadline=None)
@given(
    values=st.lists(st.integers(-9, 0), min_size=2, max_size=80),
    top_p=st.sampled_from([0.01, 0.3, 0.5, 0.9, 0.999, 1.0]),
    temperature=st.sampled_from([0.3, 1.0, 5.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    dtype=st.sampled_from([np.float32, np.float64]),
    data=st.data(),
)
def test_what_is_told_to_be_left_is_kept_and_of_what_is_out_nothing_that_is_no_likelier(
    values: list[int], top_p: float, temperature: float, min_p: float, dtype: type, data: st.DataObject
) -> None:
    below: Row = np.array(values, dtype) - max(values)
    sampling = replace(PLAIN, top_p=top_p, temperature=temperature, min_p=min_p)
    token_id = data.draw(st.integers(0, len(values) - 1))
    scores = below.astype(np.float64) / temperature
    shares = np.exp(scores) / np.exp(scores).sum()
    above, beside = shares[below > below[token_id]].sum(), shares[below == below[token_id]].sum() - shares[token_id]
    left = is_left(above, beside, scores[token_id], sampling)
    token_ids = kept(below, sampling).token_ids
    if left:
        assert token_id in token_ids
    elif left is not None:
        assert (below[token_ids] > below[token_id]).all()
    else:
        assert above - 1e-3 < top_p < above + beside + 1e-3, "it is not close"


@settings(max_examples=examples(100, 3))
@given(
    values=st.lists(st.integers(0, 5), min_size=1, max_size=400),
    count=st.integers(1, 45),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_the_largest_come_first_and_of_equals_the_lowest_index(values: list[int], count: int, dtype: type) -> None:
    right = sorted(range(len(values)), key=lambda index: (-values[index], index))[:count]
    assert largest_ids(np.array(values, dtype), count).tolist() == right
