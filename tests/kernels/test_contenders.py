"""Tokens drawn among the few that can win are those drawn among all."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.draw import Draw
from engine.plan import BROKEN_ROW, SamplingParams
from engine.sampler import sample
from kernels.cpu_kernels import CpuKernels
from tests.kernels.back_ends import COMPILED
from tests.thorough import examples

VOCAB_SIZES = [1, 2, 15, 16, 17, 260, 5000, 49_152]


@pytest.mark.covers("M04", "D07")
@pytest.mark.parametrize("kernels", COMPILED, ids=lambda kernels: kernels.name)
@settings(max_examples=examples(60, 3), deadline=None)
@given(
    temperatures=st.lists(st.sampled_from([0.0, 1e-300, 1e-3, 0.3, 1.0, 2.0, 1e9]), min_size=1, max_size=5),
    vocab_size=st.sampled_from(VOCAB_SIZES),
    spread=st.sampled_from([0.0, 0.01, 1.0, 10.0, 1000.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, (1 << 64) - 1),
)
def test_the_same_tokens_are_drawn_as_without_help(
    kernels: CpuKernels, temperatures: list[float], vocab_size: int, spread: float, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed % (1 << 63))
    logits = (spread * torch.randn(len(temperatures), vocab_size, generator=generator)).to(dtype)
    draws = [Draw(SamplingParams(temperature, seed), index) for index, temperature in enumerate(temperatures)]
    assert sample(logits, draws, kernels) == sample(logits, draws)


@pytest.mark.covers("M04")
@pytest.mark.parametrize("kernels", COMPILED, ids=lambda kernels: kernels.name)
def test_few_are_left_and_the_winner_is_among_them(kernels: CpuKernels) -> None:
    logits = 3 * torch.randn(8, 49_152, generator=torch.Generator().manual_seed(1))
    found = kernels.contenders(logits, np.ones(8, np.float32), np.arange(8, dtype=np.uint64))
    assert (found.greatest_ids == logits.argmax(-1).numpy()).all()
    assert (found.greatest == logits.amax(-1).numpy()).all()
    assert all(few is not None and 1 <= len(few[0]) <= 200 for few in found.few)


@pytest.mark.covers("M04")
@pytest.mark.parametrize("kernels", COMPILED, ids=lambda kernels: kernels.name)
@settings(max_examples=examples(60, 3), deadline=None)
@given(
    temperatures=st.lists(st.sampled_from([0.0, 1e-30, 1e-3, 0.3, 1.0, 2.0, 1e9]), min_size=1, max_size=5),
    vocab_size=st.sampled_from(VOCAB_SIZES),
    spread=st.sampled_from([0.0, 0.01, 1.0, 10.0, 1000.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    banned=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, (1 << 63) - 1),
)
def test_shares_above_and_beside_a_token_are_those_of_the_rows_softmax(
    kernels: CpuKernels,
    temperatures: list[float],
    vocab_size: int,
    spread: float,
    dtype: torch.dtype,
    banned: float,
    seed: int,
) -> None:
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    logits = (spread * torch.randn(len(temperatures), vocab_size, generator=generator)).to(dtype)
    logits[:, 1:][torch.rand(len(temperatures), vocab_size - 1, generator=generator) < banned] = -torch.inf
    values = logits.float().numpy()
    # a likely token as often as any
    token_ids = np.where(rng.random(len(values)) < 0.5, values.argmax(1), rng.integers(0, vocab_size, len(values)))
    found = kernels.shares(logits, np.array(temperatures, np.float32), values.max(1), token_ids.astype(np.int32))
    for row, temperature in enumerate(temperatures):
        if temperature > 0:
            below = values[row] - values[row].max()
            weights = np.exp(below.astype(np.float64) / np.float32(temperature))
            height = below[token_ids[row]]
            beside = weights[below == height].sum() - weights[token_ids[row]]
            assert abs(found.above[row] - weights[below > height].sum() / weights.sum()) < 1e-5
            assert abs(found.beside[row] - beside / weights.sum()) < 1e-5


@pytest.mark.parametrize("kernels", COMPILED, ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_row_that_is_broken_anywhere_is_seen_to_be(kernels: CpuKernels, broken: float) -> None:
    logits = torch.zeros(3, 261)
    for position in (0, 100, 260):
        logits[1] = 0
        logits[1, position] = broken
        draws = [Draw(SamplingParams(1.0, seed), 0) for seed in range(3)]
        token_ids = sample(logits, draws, kernels)
        assert token_ids[1] == BROKEN_ROW
        assert token_ids == sample(logits, draws)


@pytest.mark.covers("M04", "D07")
@pytest.mark.parametrize("kernels", COMPILED, ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-35, 1e-30, 1e-20])
def test_next_to_zero_the_greatest_wins_however_small_all_logits_are(kernels: CpuKernels, temperature: float) -> None:
    """Those beside it are nearer than any temperature that fp32 can divide by."""
    logits = 1e-42 * torch.randn(20, 500, generator=torch.Generator().manual_seed(1))
    draws = [Draw(SamplingParams(temperature, seed), 0) for seed in range(20)]
    assert sample(logits, draws, kernels) == sample(logits, draws)
