"""Decode steps in one call: tokens are those that the sampler draws from all logits, whether a head in 8 bits tells them or not."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.draw import Draw
from engine.gumbel import MASK_64
from engine.plan import BROKEN_ROW, SamplingParams
from engine.sampler import sample
from kernels.cpu_contest import MAX_NEAR_ROWS, CpuNearHead
from kernels.cpu_kernels import CpuKernels, CpuModel
from kernels.interface import AttentionBatch, DecodeRows, ModelEnds, SlotNumbers, StackLayer, StepRows
from tests.kernels.back_ends import COMPILED, INT8_COMPILED
from tests.thorough import examples

FORMS = ["plain", "outliers", "equal rows", "zeros", "one direction"]
HEAD_DIM = 16
BLOCK_SIZE = 4
BLOCKS_EACH = 2
FIRST_POSITION = 5  # of all rows, in their second blocks


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


@dataclass(frozen=True)
class Step:
    """What a step's draws came to."""

    token_ids: list[int]
    is_told: bool  # by the call itself
    numbers: SlotNumbers  # behind it


class Ends:
    """A model of which only the head matters: its layer adds nothing to what token ids look up."""

    def __init__(self, kernels: CpuKernels, weight: Tensor, embedding: Tensor, spread: float = 1.0) -> None:
        """weight, embedding: [vocab_size, width]. A row's logits are of what its token looks up, normed and times `spread`."""
        width, dtype = weight.shape[1], weight.dtype

        def nothing(out_features: int, in_features: int) -> Tensor:
            return torch.zeros(out_features, in_features, dtype=dtype)

        layer = StackLayer(
            torch.ones(width, dtype=dtype),
            kernels.pack_linear(nothing(3 * HEAD_DIM, width)),
            kernels.pack_linear(nothing(width, HEAD_DIM)),
            torch.ones(width, dtype=dtype),
            kernels.pack_gate_up(nothing(2 * HEAD_DIM, width)),
            kernels.pack_linear(nothing(width, HEAD_DIM)),
        )
        near_head = kernels.near_head(weight)
        assert isinstance(near_head, CpuNearHead)
        self.near_head = near_head
        self._embedding = embedding
        norm = torch.full((width,), spread, dtype=dtype)
        ends = ModelEnds(embedding, norm, kernels.pack_linear(weight))
        self.full = kernels.whole(ends, [layer], 1, 1e-5)
        self.near = kernels.whole(ends._replace(near_head=near_head), [layer], 1, 1e-5)
        angles = torch.arange(BLOCKS_EACH * BLOCK_SIZE)[:, None] * 0.5 ** torch.arange(HEAD_DIM // 2)
        self._cos, self._sin = angles.cos(), angles.sin()

    def _memory(self, num_rows: int) -> tuple[Tensor, Tensor]:
        sizes = (num_rows * BLOCKS_EACH, 1, 2, BLOCK_SIZE, 1, HEAD_DIM)
        kv = torch.zeros(sizes, dtype=self._embedding.dtype)
        return kv, self._embedding.new_full((num_rows, len(self._embedding)), torch.nan)

    def _fed(self, num_rows: int) -> Tensor:
        return torch.arange(num_rows) % len(self._embedding)

    def logits(self, num_rows: int) -> Tensor:
        """All of them."""
        kv, logits = self._memory(num_rows)
        positions = torch.full((num_rows,), FIRST_POSITION)
        tables = torch.arange(num_rows * BLOCKS_EACH).view(num_rows, -1)
        spans = np.array([(row, 1, FIRST_POSITION) for row in range(num_rows)], np.int32)
        batch = AttentionBatch(spans, tables, tables[:, 1] * BLOCK_SIZE + FIRST_POSITION % BLOCK_SIZE)
        rows = StepRows(self._fed(num_rows), positions, torch.arange(num_rows))
        self.full.logits(rows, self._cos, self._sin, kv, batch, logits)
        return logits

    def step(self, model: CpuModel, draws: list[Draw], position: int = FIRST_POSITION) -> Step:
        """Row r is of the slot that comes r-th from the end."""
        count = len(draws)
        kv, logits = self._memory(count)
        slots = np.arange(count)[::-1].copy()
        numbers = SlotNumbers.of(count, BLOCKS_EACH)
        numbers.block_ids[:] = np.arange(count * BLOCKS_EACH).reshape(count, -1)
        numbers.num_blocks[:] = BLOCKS_EACH
        numbers.token_ids[slots] = self._fed(count)
        numbers.next_indices[slots] = [draw.token_index for draw in draws]
        numbers.seeds[slots] = [draw.sampling.seed & MASK_64 for draw in draws]
        numbers.temperatures[slots] = [draw.sampling.temperature for draw in draws]
        rows = DecodeRows(slots, np.full(count, position))
        token_ids = model.decode(numbers, rows, self._cos, self._sin, kv, logits)
        if token_ids is None:
            return Step(sample(logits, draws), is_told=False, numbers=numbers)
        assert (numbers.token_ids[slots] == token_ids).all()
        assert (numbers.next_indices[slots] == [draw.token_index + 1 for draw in draws]).all()
        return Step(token_ids.tolist(), is_told=True, numbers=numbers)


@pytest.mark.covers("M04", "D07")
@pytest.mark.parametrize("kernels", COMPILED, ids=lambda kernels: kernels.name)
@settings(max_examples=examples(60, 3), deadline=None)
@given(
    temperatures=st.lists(st.sampled_from([0.0, 1e-300, 1e-3, 0.3, 1.0, 2.0, 1e9]), min_size=1, max_size=6),
    vocab_size=st.sampled_from([1, 15, 16, 17, 260, 3000]),
    width=st.sampled_from([16, 40, 96]),
    form=st.sampled_from(FORMS),
    spread=st.sampled_from([0.01, 1.0, 10.0, 300.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(-(1 << 63), (1 << 63) - 1),
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
    generator = torch.Generator().manual_seed(seed & (MASK_64 >> 1))
    weight = made_weight(form, vocab_size, width, generator).to(dtype)
    embedding = torch.randn(vocab_size, width, generator=generator).to(dtype)
    ends = Ends(kernels, weight, embedding, spread / width**0.5)
    draws = [Draw(SamplingParams(temperature, seed), index) for index, temperature in enumerate(temperatures)]
    expected = sample(ends.logits(len(draws)), draws)
    assert ends.step(ends.full, draws).token_ids == expected
    assert ends.step(ends.near, draws).token_ids == expected


@pytest.mark.covers("M04", "D07")
@pytest.mark.parametrize("kernels", COMPILED, ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("size", "spread"), [(5e-23, 1e17), (1e17, 5e-24)])
def test_what_8_bits_lose_counts_where_its_square_or_that_of_a_row_is_no_number_of_fp32(
    kernels: CpuKernels, dtype: torch.dtype, size: float, spread: float
) -> None:
    generator = torch.Generator().manual_seed(6)
    weight, embedding = torch.randn(1000, 576, generator=generator), torch.randn(1000, 576, generator=generator)
    weight[:, 0], embedding[:, 0] = 130, 0  # whole numbers of 8 bits are coarse beside it, and no logit knows of it
    ends = Ends(kernels, (size * weight).to(dtype), embedding.to(dtype), spread)
    draws = [Draw(SamplingParams(0.0, 1), 0)] * MAX_NEAR_ROWS
    assert ends.step(ends.near, draws).token_ids == sample(ends.logits(MAX_NEAR_ROWS), draws)


def usual(kernels: CpuKernels, vocab_size: int = 8_000) -> Ends:
    generator = torch.Generator().manual_seed(1)
    weight, embedding = (torch.randn(vocab_size, 64, generator=generator).bfloat16() for _ in range(2))
    return Ends(kernels, weight, embedding, 0.3)


@pytest.mark.covers("M04")
@pytest.mark.parametrize("kernels", COMPILED, ids=lambda kernels: kernels.name)
def test_usual_draws_are_told_and_from_8_bits_where_rows_are_few(kernels: CpuKernels) -> None:
    ends = usual(kernels)
    for num_rows in (1, 2, MAX_NEAR_ROWS, MAX_NEAR_ROWS + 1, 40):
        draws = [Draw(SamplingParams(row % 2, row), 5) for row in range(num_rows)]
        num_told = ends.near_head.num_told
        step = ends.step(ends.near, draws)
        assert step.is_told and ends.step(ends.full, draws).is_told
        assert step.token_ids == sample(ends.logits(num_rows), draws)
        assert ends.near_head.num_told - num_told == (num_rows <= MAX_NEAR_ROWS)
    assert not ends.near_head.num_untold


@pytest.mark.covers("M04")
@pytest.mark.parametrize("kernels", COMPILED, ids=lambda kernels: kernels.name)
def test_a_draw_that_is_won_by_too_little_is_the_samplers_from_the_logits_in_full(kernels: CpuKernels) -> None:
    ends = usual(kernels)
    draws = [Draw(SamplingParams(0.7, 4), 5)]
    for model in (ends.full, ends.near):
        model._draws.c.margin = math.inf
        step = ends.step(model, draws)
        assert not step.is_told and step.token_ids == sample(ends.logits(1), draws)
        assert step.numbers.next_indices.tolist() == [5], "noted for nobody"


@pytest.mark.parametrize("kernels", COMPILED, ids=lambda kernels: kernels.name)
def test_what_8_bits_cannot_tell_is_computed_in_full_and_the_next_steps_do_not_try(kernels: CpuKernels) -> None:
    ends = Ends(kernels, torch.ones(2_000, 32).bfloat16(), torch.ones(2_000, 32).bfloat16())  # anybody may win
    draws = [Draw(SamplingParams(1.0, 3), 0)]
    assert ends.near_head.begins(1)
    step = ends.step(ends.near, draws)
    assert not step.is_told and step.token_ids == sample(ends.logits(1), draws)
    assert (ends.near_head.num_told, ends.near_head.num_untold) == (0, 1)
    tries = [ends.near_head.begins(1) for _ in range(100)]
    assert not any(tries[:60]) and all(tries[70:])


@pytest.mark.parametrize("kernels", COMPILED, ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["row", "weight"])
def test_what_is_no_number_breaks_the_rows_that_it_breaks_in_full(
    kernels: CpuKernels, broken: float, where: str
) -> None:
    generator = torch.Generator().manual_seed(2)
    weight, embedding = torch.randn(300, 32, generator=generator), torch.randn(300, 32, generator=generator)
    (embedding if where == "row" else weight)[1, 7] = broken
    ends = Ends(kernels, weight.bfloat16(), embedding.bfloat16())
    draws = [Draw(SamplingParams(temperature, 3), 0) for temperature in (0.0, 1.0, 1.0)]
    expected = sample(ends.logits(3), draws)
    assert BROKEN_ROW in expected
    for model in (ends.full, ends.near):
        step = ends.step(model, draws)
        assert step.token_ids == expected and not step.is_told


@pytest.mark.parametrize("kernels", COMPILED, ids=lambda kernels: kernels.name)
def test_rows_that_fit_no_block_or_feed_no_token_are_refused(kernels: CpuKernels) -> None:
    ends = usual(kernels, 100)
    draws = [Draw(SamplingParams(0.0, 1), 0)] * 3
    with pytest.raises(ValueError, match="position 8 is past the 2 blocks of its sequence"):
        ends.step(ends.near, draws, position=8)
    small = usual(kernels, 2)
    small._fed = torch.arange  # type: ignore[method-assign, assignment]
    with pytest.raises(IndexError, match="none of the vocabulary's"):
        small.step(small.near, draws)


def test_rows_in_arrays_with_gaps_are_refused() -> None:
    ends = usual(COMPILED[0], 100)
    gaps = DecodeRows(np.zeros(4, np.int64)[::2], np.zeros(2, np.int64))
    angles, (kv, logits) = torch.ones(4, HEAD_DIM // 2), ends._memory(2)
    with pytest.raises(ValueError, match="not contiguous"):
        ends.near.decode(SlotNumbers.of(1, 1), gaps, angles, angles, kv, logits)


def test_a_head_in_8_bits_has_none_beside_it_and_large_steps_do_not_try() -> None:
    weight = torch.randn(64, 32)
    assert all(kernels.near_head(weight) is None for kernels in INT8_COMPILED)
    near = COMPILED[0].near_head(weight)
    assert near is not None
    assert near.begins(MAX_NEAR_ROWS) and not near.begins(MAX_NEAR_ROWS + 1) and not near.begins(0)
