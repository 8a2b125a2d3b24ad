"""Which shapes of tiles serve a product, and what becomes of those with which the device sums otherwise."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels.choice import has_triton
from kernels.interface import AttentionBatch
from kernels.triton_agreement import CHUNK, DECODED, FIRST, agreeing_attention, agreeing_shapes
from kernels.triton_tuning import (
    AttentionTuning,
    LinearTuning,
    Schedule,
    fitting_shape,
    next_power_of_two,
    read_table,
)

CPU = torch.device("cpu")
LARGE, MIDDLE, FEW, SMALL = SHAPES = (
    LinearTuning(128, 128, 64, 8, 4, by_descriptor=True, above=64),
    LinearTuning(64, 64, 128, 4, 6, by_descriptor=True, above=16),
    LinearTuning(16, 64, 128, 4, 4, up_to=16),
    LinearTuning(64, 16, 256, 4, 4),
)
TUNING = AttentionTuning(64, 512, Schedule(64, 4, 2), Schedule(16, 2, 3))

pytestmark = [
    pytest.mark.covers("M05", "M06"),
    pytest.mark.skipif(not has_triton(), reason="Triton is not installed; make setup does that"),
]


@pytest.mark.parametrize(
    ("num_rows", "out_features", "expected"),
    [
        (2048, 4096, LARGE),
        (512, 4096, LARGE),  # 128 tiles for 132 multiprocessors
        (256, 4096, MIDDLE),  # 64 of the large ones
        (65, 1000, SMALL),
        (64, 14336, MIDDLE),
        (17, 14336, MIDDLE),
        (16, 14336, FEW),
        (1, 128256, FEW),
        (1, 4096, SMALL),
    ],
)
def test_a_product_takes_the_largest_tiles_that_keep_the_device_busy(
    num_rows: int, out_features: int, expected: LinearTuning
) -> None:
    assert fitting_shape(SHAPES, num_rows, out_features, 132) == expected


@given(num_rows=st.integers(1, 10_000), out_features=st.integers(1, 200_000), num_processors=st.integers(1, 200))
def test_every_product_has_a_shape_on_every_device(num_rows: int, out_features: int, num_processors: int) -> None:
    table = read_table()
    for device in ("80", "90", "120", "interpreter"):
        for dtype in ("fp32", "bf16", "fp16"):
            for is_gated in (False, True):
                shapes = table.linear(device, dtype, is_gated=is_gated)
                shape = fitting_shape(shapes, num_rows, out_features, num_processors)
                assert shape.above < num_rows <= shape.up_to


def test_shapes_that_sum_otherwise_are_left_out() -> None:
    def multiply(shape: LinearTuning, x: Tensor, weight: Tensor) -> Tensor:
        product = x @ weight.T
        is_odd = shape == MIDDLE and len(x) == 1  # in the last bit, and of a row by itself only
        return torch.nextafter(product, product + 1) if is_odd else product

    found = agreeing_shapes(SHAPES, multiply, torch.float32, CPU, is_gated=False)
    assert found == (LARGE, FEW, SMALL)
    asked: list[LinearTuning] = []

    def noted(shape: LinearTuning, x: Tensor, weight: Tensor) -> Tensor:
        asked.append(shape)
        return x @ weight.T

    assert agreeing_shapes(SHAPES[-1:], noted, torch.float32, CPU, is_gated=True) == (SMALL,)
    assert asked == []  # one shape agrees with itself
    assert agreeing_shapes(SHAPES, noted, torch.float32, CPU, is_gated=True) == SHAPES
    assert set(asked) == set(SHAPES)


@pytest.mark.parametrize("odd", ["nothing", "few rows", "all that is alone"])
def test_where_few_rows_sum_otherwise_they_take_the_tiles_of_many(odd: str) -> None:
    asked: list[tuple[Schedule, int]] = []

    def attend(tuning: AttentionTuning, kv: Tensor, batch: AttentionBatch, queries: Tensor) -> Tensor:
        ((_, num_rows, first),) = batch.spans.tolist()
        assert len(queries) == num_rows and queries.shape[1:] == (3, 32)
        assert batch.block_tables.shape[1] * kv.shape[3] >= first + num_rows  # all that is seen is there
        asked.append((tuning.split, num_rows))
        is_odd = num_rows == 1 and first > 1200 and (odd != "few rows" or tuning.split != tuning.whole)
        return torch.nextafter(queries, queries + 1) if is_odd and odd != "nothing" else queries

    alike = TUNING._replace(split=TUNING.whole)
    expected = {"nothing": TUNING, "few rows": alike, "all that is alone": None}[odd]
    assert agreeing_attention(TUNING, attend, torch.float32, CPU, head_dim=32, group_size=3) == expected
    assert (TUNING.split, CHUNK) in asked and (TUNING.split, 1) in asked  # both kernels
    assert max(DECODED) < CHUNK
    asked.clear()
    of_alike = agreeing_attention(alike, attend, torch.float32, CPU, head_dim=32, group_size=3)
    assert of_alike == (None if odd == "all that is alone" else alike)
    assert len(asked) == 1 + len(DECODED)  # one schedule is asked, too: two kernels run by it


@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 7, 8, 16])
def test_some_row_that_is_asked_sees_a_tile_in_full_alone_and_not_among_the_rows_of_its_tile(group_size: int) -> None:
    """The kernels have code of their own for tiles that all rows see in full, and it must give the same bits."""
    table = read_table()
    for device in ("80", "90", "120"):
        for dtype, head_dim in product(("fp32", "bf16", "fp16"), (64, 128, 256)):
            tuning = table.attention(device, dtype, head_dim)
            rows_of_tile = max(tuning.whole.rows, next_power_of_two(group_size)) // group_size
            assert rows_of_tile == 1 or any(
                (FIRST + row + 1) // tuning.tile != (FIRST + row // rows_of_tile * rows_of_tile + 1) // tuning.tile
                for row in DECODED
            ), f"{device}, {dtype}, {head_dim}"


def test_a_back_end_whose_device_sums_otherwise_by_every_schedule_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels import triton_kernels

    monkeypatch.setattr(triton_kernels, "agreeing_attention", lambda *_: None)
    kernels = triton_kernels.TritonKernels(capability=(9, 0), num_processors=132)
    assert kernels.keeps_row_bits
    kernels._attention_tuning(torch.empty((1, 1, 2, 16, 1, 64), dtype=torch.bfloat16), 4)
    assert not kernels.keeps_row_bits
