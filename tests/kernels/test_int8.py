"""Weights in 8 bits: how they are rounded, and that every back end computes with just those numbers, row by row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.choice import NoKernels, choose_kernels
from kernels.int8_weights import quantized
from kernels.interface import Kernels
from kernels.weight_memory import HUGE_PAGE, WeightMemory
from tests.kernels.back_ends import BACK_ENDS, INT8_BACK_ENDS, INT8_COMPILED, INT8_REFERENCE
from tests.kernels.test_primitives import DTYPES, assert_close, drawn, seeds
from tests.thorough import examples

of_all = pytest.mark.parametrize("kernels", INT8_BACK_ENDS, ids=lambda kernels: kernels.name)
in_all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.mark.covers("M04")
@settings(max_examples=examples(50, 3), deadline=None)
@given(rows=st.integers(1, 9), width=st.integers(1, 70), scale=st.sampled_from([1e-3, 1.0, 300.0]), seed=seeds)
def test_a_weight_is_off_by_half_a_step_at_most_and_the_greatest_of_a_row_by_nothing(
    rows: int, width: int, scale: float, seed: int
) -> None:
    weight = scale * drawn(seed, torch.float32, rows, width)
    numbers, scales = quantized(weight)
    assert numbers.dtype is torch.int8 and numbers.abs().max() == 127
    rebuilt = numbers * scales[:, None]
    assert ((rebuilt - weight).abs() <= 0.5001 * scales[:, None]).all()
    torch.testing.assert_close(rebuilt.abs().amax(1), weight.abs().amax(1))


def test_rows_of_zeros_and_rows_that_are_no_numbers_stay_so() -> None:
    weight = torch.ones(3, 40)
    weight[0] = 0
    weight[1, 7] = torch.nan
    numbers, scales = quantized(weight)
    assert not numbers[0].any() and scales[0] == 0
    assert scales[1].isnan()
    for kernels in INT8_BACK_ENDS:
        product = kernels.pack_linear(weight)(torch.ones(2, 40))
        assert not product[:, 0].any() and product[:, 1].isnan().all() and product[:, 2].isfinite().all()


@pytest.mark.covers("M04")
@of_all
@in_all_dtypes
@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 70),
    widths=st.tuples(st.sampled_from([2, 16, 34, 112, 576]), st.sampled_from([1, 15, 33, 64, 300])),
    has_bias=st.booleans(),
    seed=seeds,
)
def test_a_linear_multiplies_by_the_rounded_weights(
    kernels: Kernels, dtype: torch.dtype, rows: int, widths: tuple[int, int], has_bias: bool, seed: int
) -> None:
    width_in, width_out = widths
    x, weight = drawn(seed, dtype, rows, width_in), drawn(seed + 1, dtype, width_out, width_in)
    bias = 10 * drawn(seed + 2, dtype, width_out) if has_bias else None
    numbers, scales = quantized(weight)
    exact = x.double() @ (numbers.double() * scales.double()[:, None]).T + (0 if bias is None else bias.double())
    assert_close(kernels.pack_linear(weight, bias)(x), exact.to(dtype), width_in**0.5)


@pytest.mark.covers("M04")
@of_all
@in_all_dtypes
@settings(max_examples=15, deadline=None)
@given(rows=st.integers(1, 40), width=st.sampled_from([1, 15, 16, 17, 96]), has_bias=st.booleans(), seed=seeds)
def test_what_is_gated_in_registers_has_the_bits_of_what_is_not(
    kernels: Kernels, dtype: torch.dtype, rows: int, width: int, has_bias: bool, seed: int
) -> None:
    x, weight = drawn(seed, dtype, rows, 64), drawn(seed + 1, dtype, 2 * width, 64) / 4
    bias = drawn(seed + 2, dtype, 2 * width) if has_bias else None
    found = kernels.pack_gate_up(weight, bias)(x)
    assert torch.equal(found, kernels.silu_gate(kernels.pack_linear(weight, bias)(x)))


@pytest.mark.covers("M06")
@of_all
@in_all_dtypes
@pytest.mark.parametrize(("width_in", "width_out"), [(100, 60), (1024, 512)])
def test_a_row_has_the_same_bits_among_any_number(
    kernels: Kernels, dtype: torch.dtype, width_in: int, width_out: int
) -> None:
    linear = kernels.pack_linear(drawn(1, dtype, width_out, width_in), drawn(2, dtype, width_out))
    x = drawn(3, dtype, 300, width_in)
    whole = linear(x)
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for count in (1, 2, 4, 5, 12, 13, 23, 24, 255, 300):
            for start in {0, 300 - count}:
                assert torch.equal(linear(x[start : start + count]), whole[start : start + count])


@pytest.mark.covers("H02")
def test_its_kv_is_no_other_back_end_s() -> None:
    """The name is in the fingerprint."""
    names = [kernels.name for kernels in (*BACK_ENDS, *INT8_BACK_ENDS)]
    assert len(set(names)) == len(names)
    assert choose_kernels("cpu", weight_dtype="int8").kernels.name == INT8_COMPILED[0].name
    assert choose_kernels("torch", weight_dtype="int8").kernels.name == INT8_REFERENCE.name


def test_another_device_refuses_it_in_one_sentence() -> None:
    with pytest.raises(NoKernels, match="--weight-dtype int8: only a CPU computes with it"):
        choose_kernels("cpu", "cuda", "int8")


def test_weights_lie_one_behind_the_other_from_a_huge_page_on() -> None:
    memory = WeightMemory()
    first, second = memory.take(33, torch.bfloat16), memory.take(10, torch.float32)
    assert first.data_ptr() % HUGE_PAGE == 0
    assert second.data_ptr() == first.data_ptr() + 128
    large = memory.take(70 << 20, torch.int8)
    assert large.data_ptr() % HUGE_PAGE == 0 and len(large) == 70 << 20
    first.fill_(1), second.fill_(2), large[-1:].fill_(3)
    assert first.sum() == 33 and second.sum() == 20
