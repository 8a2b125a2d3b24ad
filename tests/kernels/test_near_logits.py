"""Tokens told from a head in 8 bits are those of the head in full, and what cannot be told is computed in full."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.plan import BROKEN_ROW, SamplingParams
from engine.sampler import Draw, sample, sample_near
from kernels.cpu_contest import MAX_NEAR_ROWS, CpuNearHead, CpuNearLogits
from kernels.cpu_kernels import CpuKernels
from kernels.cpu_linear import CpuLinear
from tests.kernels.back_ends import COMPILED, INT8_COMPILED

FORMS = ["plain", "outliers", "equal rows", "zeros", "one direction"]


class Heads:
    """A head in full, and the one in 8 bits beside it."""

    def __init__(self, kernels: CpuKernels, weight: Tensor) -> None:
        self.kernels = kernels
        head, near_head = kernels.pack_linear(weight), kernels.near_head(weight)
        assert isinstance(head, CpuLinear) and isinstance(near_head, CpuNearHead)
        self.full, self.near = head, near_head

    def near_logits(self, x: Tensor) -> CpuNearLogits:
        return CpuNearLogits(self.full, self.near, x, self.near.linear(x))


def made_weight(form: str, vocab_size: int, width: int, generator: torch.Generator) -> Tensor:
    weight = torch.randn(vocab_size, width, generator=generator)
    if form == "outliers":  # whole numbers of 8 bits are coarse beside one large weight
        weight[:, 3] *= 40
    elif form == "equal rows":
        weight[vocab_size // 2 :] = weight[: vocab_size - vocab_size // 2].clone()
    elif form == "zeros":
        weight[::3] = 0
    elif form == "one direction":  # all logits next to each other
        weight = weight[:1] + 0.003 * weight
    return weight


@pytest.mark.covers("M04", "D07")
@pytest.mark.parametrize("kernels", COMPILED, ids=lambda kernels: kernels.name)
@settings(max_examples=60, deadline=None)
@given(
    temperatures=st.lists(st.sampled_from([0.0, 1e-300, 1e-3, 0.3, 1.0, 2.0, 1e9]), min_size=1, max_size=6),
    vocab_size=st.sampled_from([1, 15, 16, 17, 260, 3000]),
    width=st.sampled_from([16, 40, 96]),
    form=st.sampled_from(FORMS),
    spread=st.sampled_from([0.01, 1.0, 10.0, 300.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, (1 << 63) - 1),
)
def test_the_same_tokens_are_drawn_as_from_all_logits(
    kernels: CpuKernels,
    temperatures: list[float],
    vocab_size: int,
    width: int,
    form: str,
    spread: float,
    dtype: torch.dtype,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    heads = Heads(kernels, made_weight(form, vocab_size, width, generator).to(dtype))
    x = (spread / width**0.5 * torch.randn(len(temperatures), width, generator=generator)).to(dtype)
    draws = [Draw(SamplingParams(temperature, seed), index) for index, temperature in enumerate(temperatures)]
    assert sample_near(heads.near_logits(x), draws, kernels) == sample(heads.full(x), draws)


@pytest.mark.covers("M04")
@pytest.mark.parametrize("kernels", COMPILED, ids=lambda kernels: kernels.name)
def test_a_usual_head_is_told_from_8_bits_and_few_logits_are_computed(kernels: CpuKernels) -> None:
    generator = torch.Generator().manual_seed(1)
    heads = Heads(kernels, torch.randn(8_000, 64, generator=generator).bfloat16())
    x = (0.3 * torch.randn(MAX_NEAR_ROWS, 64, generator=generator)).bfloat16()
    draws = [Draw(SamplingParams(row % 2, row), 5) for row in range(MAX_NEAR_ROWS)]
    near = heads.near_logits(x)
    assert sample_near(near, draws, kernels) == sample(heads.full(x), draws)
    assert (heads.near.num_told, heads.near.num_untold) == (1, 0)
    found = heads.near.contest.found()
    exact = heads.full(x).float().numpy()
    for row in range(1, MAX_NEAR_ROWS, 2):
        few = found.few[row]
        assert few is not None and 1 <= len(few[0]) <= 100
        assert (few[1] == exact[row][few[0]]).all()
    assert (found.greatest == exact.max(-1)).all() and (found.greatest_ids == exact.argmax(-1)).all()


@pytest.mark.parametrize("kernels", COMPILED, ids=lambda kernels: kernels.name)
def test_what_cannot_be_told_is_computed_in_full_and_the_next_steps_do_not_try(kernels: CpuKernels) -> None:
    heads = Heads(kernels, torch.ones(2_000, 32).bfloat16())  # anybody may win
    x, draws = torch.ones(1, 32).bfloat16(), [Draw(SamplingParams(1.0, 3), 0)]
    assert heads.near.begins(1)
    assert sample_near(heads.near_logits(x), draws, kernels) == sample(heads.full(x), draws)
    assert (heads.near.num_told, heads.near.num_untold) == (0, 1)
    tries = [heads.near.begins(1) for _ in range(100)]
    assert not any(tries[:60]) and all(tries[70:])


@pytest.mark.parametrize("kernels", COMPILED, ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["row", "weight"])
def test_what_is_no_number_breaks_the_rows_that_it_breaks_in_full(
    kernels: CpuKernels, broken: float, where: str
) -> None:
    generator = torch.Generator().manual_seed(2)
    weight, x = torch.randn(300, 32, generator=generator), torch.randn(3, 32, generator=generator)
    (x if where == "row" else weight)[1, 7] = broken
    heads = Heads(kernels, weight.bfloat16())
    draws = [Draw(SamplingParams(temperature, 3), 0) for temperature in (0.0, 1.0, 1.0)]
    token_ids = sample_near(heads.near_logits(x.bfloat16()), draws, kernels)
    assert token_ids == sample(heads.full(x.bfloat16()), draws) and BROKEN_ROW in token_ids


def test_a_head_in_8_bits_has_none_beside_it_and_large_steps_do_not_try() -> None:
    weight = torch.randn(64, 32)
    assert all(kernels.near_head(weight) is None for kernels in INT8_COMPILED)
    near = Heads(COMPILED[0], weight).near
    assert near.begins(MAX_NEAR_ROWS) and not near.begins(MAX_NEAR_ROWS + 1) and not near.begins(0)
