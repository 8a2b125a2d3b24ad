"""The reference's linears where oneDNN packs less than elsewhere, or by the rows: nothing is refused, and a row keeps its bits."""

from __future__ import annotations

import pytest
import torch

from kernels import torch_reference
from kernels.torch_reference import TorchKernels
from tests.kernels.test_primitives import assert_close, drawn


@pytest.mark.covers("M04", "M06")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_onednn_does_not_pack_is_computed_in_fp32_and_rounded_once(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch_reference, "can_pack", lambda asked: asked is torch.float32)
    check_widened(dtype)


@pytest.mark.covers("M04", "M06")
def test_what_onednn_sums_by_the_number_of_rows_is_computed_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """As tests/engine_torch/test_row_bits.py found on a CPU with AMX: [512, 1024] from 33 rows on, [1024, 512] from 7 on."""
    monkeypatch.setattr(
        torch_reference, "cpu_flags", lambda _: frozenset({"avx512f", "avx512_bf16", "amx_tile", "amx_bf16"})
    )
    goes_by_rows = torch_reference.goes_by_rows.__wrapped__  # not what was found out about this CPU
    monkeypatch.setattr(torch_reference, "goes_by_rows", goes_by_rows)
    assert not goes_by_rows(torch.float32) and not goes_by_rows(torch.float16)
    check_widened(torch.bfloat16)


def check_widened(dtype: torch.dtype) -> None:
    kernels = TorchKernels()
    assert kernels.keeps_row_bits
    weight, bias, x = drawn(1, dtype, 60, 100), drawn(2, dtype, 60), drawn(3, dtype, 33, 100)
    for linear, added in ((kernels.pack_linear(weight, bias), bias), (kernels.pack_linear(weight), bias * 0)):
        whole = linear(x)
        assert whole.dtype is dtype
        assert_close(whole, (x.double() @ weight.double().T + added.double()).to(dtype))
        assert torch.equal(whole, (kernels.pack_linear(weight.float())(x.float()) + added.float()).to(dtype))
        assert all(torch.equal(linear(x[row : row + 1])[0], whole[row]) for row in range(len(x)))


@pytest.mark.covers("M04")
def test_a_torch_without_onednn_computes_and_promises_no_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_reference, "can_pack", lambda _: False)
    kernels = TorchKernels()
    assert not kernels.keeps_row_bits
    weight, x = drawn(1, torch.float32, 60, 100), drawn(3, torch.float32, 33, 100)
    assert_close(kernels.pack_linear(weight)(x), x @ weight.T)
    rounded = TorchKernels(is_int8=True).pack_linear(weight)(x)
    assert 0 < (rounded - x @ weight.T).abs().max() < 0.5
