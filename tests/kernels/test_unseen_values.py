"""Values at positions that a row does not see may be anything: not a bit of its attention may hang on them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.interface import AttentionBatch, Kernels, RowSpan
from tests.kernels.back_ends import COMPILED

LENGTH, BLOCK_SIZE = 200, 16  # three tiles of 64 positions, and a piece of one


def attended(kernels: Kernels, kv: Tensor, queries: Tensor, spans: list[RowSpan], window: int | None) -> Tensor:
    """What these spans of one sequence, whose blocks lie in order, see of it: [rows, heads, head_dim]."""
    tables = torch.arange(len(kv)).repeat(len(spans), 1)
    writes = torch.zeros(len(queries), dtype=torch.int64)
    batch = AttentionBatch(np.array(spans, np.int32), tables, writes)
    return kernels.step_attention(kv, batch, queries.shape[1]).attend(0, queries, window)


@pytest.mark.covers("M06")
@pytest.mark.parametrize("kernels", COMPILED, ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [(6, 2, 64), (3, 3, 32)], ids=str)
@pytest.mark.parametrize(("position", "window"), [(70, None), (130, 40), (3, 60)])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_value_that_is_no_number_changes_only_rows_that_see_it(
    kernels: Kernels,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    position: int,
    window: int | None,
    number: float,
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    generator = torch.Generator().manual_seed(3)
    sizes = (-(-LENGTH // BLOCK_SIZE), 1, 2, BLOCK_SIZE, num_kv_heads, head_dim)
    clean = torch.randn(sizes, generator=generator).to(dtype)
    spoiled = clean.clone()
    spoiled[position // BLOCK_SIZE, 0, 1, position % BLOCK_SIZE] = number
    queries = torch.randn(LENGTH, num_heads, head_dim, generator=generator).to(dtype)
    chunk, alone = [RowSpan(0, LENGTH, 0)], [RowSpan(row, 1, row) for row in range(LENGTH)]
    expected = attended(kernels, clean, queries, chunk, window)
    rows = torch.arange(LENGTH)
    sees = (rows >= position) & (rows < position + (window or LENGTH))
    for spans in (chunk, alone):
        found = attended(kernels, spoiled, queries, spans, window)
        assert torch.equal(found[~sees], expected[~sees])
        assert not found[sees].isfinite().any()
