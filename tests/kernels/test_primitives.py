"""Each primitive of each back end that is no reference against the torch reference, over random shapes and strides."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.interface import Kernels
from tests.kernels.back_ends import COMPARED, REFERENCE, few

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Of the largest number of the result, or of 1: a few units in the last place, for sums are taken in another order.
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}

pytestmark = [
    pytest.mark.covers("M04"),
    pytest.mark.parametrize("kernels", COMPARED, ids=lambda kernels: kernels.name),
    pytest.mark.parametrize("dtype", DTYPES, ids=str),
]
seeds = st.integers(0, 1 << 32)


def drawn(seed: int, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(found: Tensor, expected: Tensor, spread: float = 1.0) -> None:
    """`spread`: about how far partial sums stray, whatever is left of them in the end."""
    assert found.dtype is expected.dtype
    assert found.shape == expected.shape
    bound = BOUNDS[expected.dtype] * max(spread, expected.float().abs().max().item())
    torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=bound)


@settings(max_examples=few(25), deadline=None)
@given(
    rows=st.one_of(st.integers(1, 70), st.just(321)),
    widths=st.tuples(st.sampled_from([2, 16, 34, 112, 576, 1300]), st.sampled_from([1, 15, 16, 33, 64, 100, 300])),
    has_bias=st.booleans(),
    seed=seeds,
)
def test_linears_with_and_without_bias(
    kernels: Kernels, dtype: torch.dtype, rows: int, widths: tuple[int, int], has_bias: bool, seed: int
) -> None:
    width_in, width_out = widths
    x, weight = drawn(seed, dtype, rows, width_in), drawn(seed + 1, dtype, width_out, width_in)
    bias = 10 * drawn(seed + 2, dtype, width_out) if has_bias else None
    exact = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    assert_close(kernels.pack_linear(weight, bias)(x), exact.to(dtype), width_in**0.5)  # terms of about 1


@settings(max_examples=few(25), deadline=None)
@given(
    rows=st.integers(1, 40),
    width=st.sampled_from([1, 15, 16, 17, 96, 200]),
    has_bias=st.booleans(),
    seed=seeds,
)
def test_gated_linears(kernels: Kernels, dtype: torch.dtype, rows: int, width: int, has_bias: bool, seed: int) -> None:
    x, weight = drawn(seed, dtype, rows, 64), drawn(seed + 1, dtype, 2 * width, 64) / 4
    bias = drawn(seed + 2, dtype, 2 * width) if has_bias else None
    found = kernels.pack_gate_up(weight, bias)(x)
    assert_close(found, REFERENCE.silu_gate(torch.nn.functional.linear(x, weight, bias)), 64**0.5 / 4)
    # What is fused has the bits of what is not.
    assert torch.equal(found, kernels.silu_gate(kernels.pack_linear(weight, bias)(x)))


@settings(max_examples=few(25), deadline=None)
@given(rows=st.integers(1, 9), width=st.sampled_from([1, 8, 16, 24, 112, 576, 1000]), seed=seeds)
def test_norms(kernels: Kernels, dtype: torch.dtype, rows: int, width: int, seed: int) -> None:
    x, weight = 5 * drawn(seed, dtype, rows, width), drawn(seed + 1, dtype, width)
    assert_close(kernels.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))


@settings(max_examples=few(25), deadline=None)
@given(
    rows=st.integers(1, 9),
    heads=st.integers(1, 7),
    more_heads=st.integers(0, 3),
    head_dim=st.sampled_from([2, 8, 16, 24, 64, 128]),
    seed=seeds,
)
def test_rotations_of_some_heads_of_a_wider_row(
    kernels: Kernels, dtype: torch.dtype, rows: int, heads: int, more_heads: int, head_dim: int, seed: int
) -> None:
    x = drawn(seed, dtype, rows, heads + more_heads, head_dim)[:, :heads]
    angles = 100 * drawn(seed + 1, torch.float32, rows, head_dim // 2)
    expected = REFERENCE.rotate(x, angles.cos(), angles.sin())
    assert torch.equal(kernels.rotate(x, angles.cos(), angles.sin()), expected)


@settings(max_examples=few(25), deadline=None)
@given(rows=st.integers(1, 9), width=st.sampled_from([1, 16, 17, 200]), scale=st.sampled_from([1, 40]), seed=seeds)
def test_gates_also_where_exp_overflows(
    kernels: Kernels, dtype: torch.dtype, rows: int, width: int, scale: int, seed: int
) -> None:
    gate_up = scale * drawn(seed, dtype, rows, 2 * width)
    assert_close(kernels.silu_gate(gate_up), REFERENCE.silu_gate(gate_up))


def test_numbers_that_are_none_stay_so(kernels: Kernels, dtype: torch.dtype) -> None:
    """A broken row must be seen to be broken, and must break no other."""
    x = drawn(0, dtype, 3, 64)
    x[1, 5] = torch.nan
    weight = drawn(1, dtype, 128, 64)
    for found in (
        kernels.pack_linear(weight)(x),
        kernels.pack_gate_up(weight)(x),
        kernels.rms_norm(x, weight[0], 1e-5),
    ):
        assert found[1].isnan().all()
        assert found[[0, 2]].isfinite().all()


def test_a_linear_of_an_odd_number_of_inputs_is_computed_or_refused(kernels: Kernels, dtype: torch.dtype) -> None:
    """Where a product takes pairs, a row's last number would be taken with the next row's first, which may be none."""
    weight, x = drawn(1, dtype, 40, 33), drawn(2, dtype, 2, 33)
    x[1] = float("nan")
    try:
        linear = kernels.pack_linear(weight)
    except ValueError as fault:
        assert "33 inputs" in str(fault)
    else:
        assert_close(linear(x)[:1], torch.nn.functional.linear(x[:1].float(), weight.float()).to(dtype), 33**0.5)
