"""The Triton kernels draw what the sampler draws, and note it where the next step looks.

Runs where back_ends.py finds Triton: on a CUDA device, or interpreted, which test_triton.py starts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.device_sampler import sample_on_device
from engine.draw import Draw
from engine.gumbel import noise_stream, noise_streams
from engine.plan import BROKEN_ROW, SamplingParams
from kernels.interface import Kernels, PlainDraws
from tests.kernels.back_ends import TRITON, few

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TEMPERATURES = [0.0, 1e-30, 1e-3, 0.3, 1.0, 5.0, 1e9]
SLICE = 1024  # of the vocabulary, that a program looks at
UNTOUCHED = -7

pytestmark = [
    pytest.mark.covers("M04", "M05", "D07"),
    pytest.mark.parametrize("kernels", TRITON, ids=lambda kernels: kernels.name),
]


def check(kernels: Kernels, logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """What is drawn; on the device as torch draws it on the CPU, and noted at the rows' slots, which are in no order."""
    num_rows = len(draws)
    slots = np.random.default_rng(num_rows).permutation(num_rows + 3)[:num_rows]
    temperatures = np.array([draw.sampling.temperature for draw in draws])
    seeds = np.array([draw.sampling.seed for draw in draws], np.uint64)
    streams = noise_streams(seeds, np.array([draw.token_index for draw in draws]))
    assert streams.tolist() == [int(noise_stream(draw.sampling.seed, draw.token_index)) for draw in draws]
    last = torch.full((num_rows + 3,), UNTOUCHED)
    drawn = kernels.draw(logits, PlainDraws(temperatures, streams, slots, BROKEN_ROW), last)
    assert drawn is not None and drawn.dtype == torch.int64
    expected = sample_on_device(logits, draws)
    assert drawn.tolist() == expected.tolist()
    noted = torch.full_like(last, UNTOUCHED)
    noted[torch.from_numpy(slots)] = expected.clamp(min=0)
    assert torch.equal(last, noted)
    found: list[int] = drawn.tolist()
    return found


@settings(max_examples=few(60), deadline=None)
@given(
    temperatures=st.lists(st.sampled_from(TEMPERATURES), min_size=1, max_size=5),
    vocab_size=st.sampled_from([1, 15, 1000, SLICE - 1, SLICE, SLICE + 1, 2 * SLICE, 5000]),
    spread=st.sampled_from([0.0, 0.01, 1.0, 10.0, 1000.0]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, (1 << 64) - 1),
)
def test_what_is_drawn_is_what_torch_draws(
    kernels: Kernels, temperatures: list[float], vocab_size: int, spread: float, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed % (1 << 63))
    logits = (spread * torch.randn(len(temperatures), vocab_size, generator=generator)).to(dtype)
    logits[torch.rand(logits.shape, generator=generator) < 0.1] = -torch.inf
    logits[:, vocab_size // 2] = 0.5
    check(kernels, logits, [Draw(SamplingParams(each, seed), index) for index, each in enumerate(temperatures)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_with_a_logit_that_is_no_number_is_broken_wherever_that_is(kernels: Kernels, dtype: torch.dtype) -> None:
    draws = [Draw(SamplingParams(temperature, 3), 0) for temperature in (0.0, 1.0, 0.0, 1.0, 1.0, 0.0)]
    for at in (0, SLICE - 1, SLICE, 2 * SLICE + 4):
        logits = torch.zeros((6, 2 * SLICE + 5), dtype=dtype)
        logits[1, at], logits[2, at], logits[3, at] = torch.inf, torch.nan, -torch.nan
        logits[4] = -torch.inf
        logits[5, at] = 1
        drawn = check(kernels, logits, draws)
        assert drawn[1:] == [BROKEN_ROW] * 4 + [at]
    logits[:] = -torch.inf
    logits[0, 1030], logits[1, 5] = torch.nan, 1
    assert check(kernels, logits, draws) == [BROKEN_ROW, 5, *[BROKEN_ROW] * 4]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_of_equal_logits_the_lowest_id_is_the_greedy_one(kernels: Kernels, dtype: torch.dtype) -> None:
    draws = [Draw(SamplingParams(temperature, 3), 0) for temperature in (0.0, 0.0, 0.0, 1e-30)]
    logits = torch.full((4, 3 * SLICE), -2.0, dtype=dtype)
    logits[0, [SLICE, SLICE + 1, 3 * SLICE - 1]] = -1
    logits[1, [SLICE - 1, 2 * SLICE]] = torch.tensor([0.0, -0.0], dtype=dtype)
    logits[3, 77] = -1.5
    assert check(kernels, logits, draws) == [SLICE, SLICE - 1, 0, 77]
    assert check(kernels, logits[:3], draws[:3]) == [SLICE, SLICE - 1, 0]  # where nobody is drawn by chance


def test_a_large_vocabulary_is_drawn_from_evenly(kernels: Kernels) -> None:
    """All are equal: noise alone decides, whichever slice it favours."""
    draws = [Draw(SamplingParams(0.7, seed), seed) for seed in range(4)]
    drawn = check(kernels, torch.zeros((4, 128_256)), draws)
    assert len({token_id // SLICE for token_id in drawn}) == 4


def test_no_rows_are_no_draws(kernels: Kernels) -> None:
    assert check(kernels, torch.zeros((0, 9)), []) == []
