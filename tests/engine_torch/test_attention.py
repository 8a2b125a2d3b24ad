"""Tiled attention over paged KV against a softmax written down plainly."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.interface import AttentionBatch, Kernels, RowSpan
from kernels.torch_attention import TiledAttention
from tests.kernels.back_ends import BACK_ENDS, IS_INTERPRETED, a_few, few
from tests.thorough import IS_THOROUGH

# Several parts and tiles long; those that the interpreter's table has are 32 and 16 positions.
MAX_LEN, CHUNKS = (100, (33, 50)) if IS_INTERPRETED and not IS_THOROUGH else (300, (63, 130))


def plain_attention(queries: Tensor, keys: Tensor, values: Tensor, first_position: int, window: int | None) -> Tensor:
    """[rows, heads, head_dim] over [positions, kv_heads, head_dim] in fp64."""
    group_size = queries.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(group_size, 1) for x in (keys, values))
    scores = torch.einsum("rhd,phd->hrp", queries.double(), keys) / math.sqrt(queries.shape[2])
    own = first_position + torch.arange(queries.shape[0])[:, None]
    positions = torch.arange(keys.shape[0])[None]
    hidden = (positions > own) | (positions <= own - (window or MAX_LEN + 200))
    return torch.einsum("hrp,phd->rhd", scores.masked_fill(hidden, -math.inf).softmax(-1), values)


@pytest.mark.covers("M04")
@pytest.mark.parametrize("kernels", BACK_ENDS, ids=lambda kernels: kernels.name)
@settings(max_examples=few(60), deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, MAX_LEN), st.sampled_from([1, 1, 2, *CHUNKS])), min_size=1, max_size=5),
    heads=st.sampled_from([(1, 1, 16), (2, 2, 8), (8, 2, 32), (7, 1, 24), (6, 3, 64)]),
    block_size=st.sampled_from([1, 8, 16, 48, 64, 100]),
    window=st.sampled_from([None, 1, 2, 63, 64, 65, 150]),
    seed=st.integers(0, 1 << 32),
)
def test_paged_attention_equals_softmax_of_what_each_row_sees(
    kernels: Kernels,
    spans: list[tuple[int, int]],
    heads: tuple[int, int, int],
    block_size: int,
    window: int | None,
    seed: int,
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    generator = torch.Generator().manual_seed(seed)
    lengths = [first + count for first, count in spans]
    widths = [-(-length // block_size) for length in lengths]
    order = torch.randperm(sum(widths), generator=generator)
    tables = torch.zeros(len(spans), max(widths), dtype=torch.int64)
    kv = torch.full((sum(widths), 2, 2, block_size, num_kv_heads, head_dim), math.nan)
    layer = 1
    row_spans: list[RowSpan] = []
    writes: list[Tensor] = []
    queries: list[Tensor] = []
    written: list[tuple[Tensor, Tensor]] = []
    expected: list[Tensor] = []
    for index, ((first, count), table) in enumerate(zip(spans, torch.split(order, widths), strict=True)):
        tables[index, : len(table)] = table
        positions = torch.arange(lengths[index])
        where = table[positions // block_size], positions % block_size
        keys = torch.randn(lengths[index], num_kv_heads, head_dim, generator=generator)
        values = torch.randn(lengths[index], num_kv_heads, head_dim, generator=generator)
        kv[where[0][:first], layer, 0, where[1][:first]] = keys[:first]
        kv[where[0][:first], layer, 1, where[1][:first]] = values[:first]
        query = torch.randn(count, num_heads, head_dim, generator=generator)
        row_spans.append(RowSpan(sum(len(rows) for rows in queries), count, first))
        writes.append((where[0] * block_size + where[1])[first:])
        queries.append(query)
        written.append((keys[first:], values[first:]))
        expected.append(plain_attention(query, keys, values, first, window))
    attention = kernels.step_attention(
        kv, AttentionBatch(np.array(row_spans, np.int32), tables, torch.cat(writes)), num_heads
    )
    attention.write(layer, *(torch.cat(parts) for parts in zip(*written, strict=True)))
    out = attention.attend(layer, torch.cat(queries), window)
    torch.testing.assert_close(out.double(), torch.cat(expected), rtol=1e-4, atol=1e-5)
    assert kv[:, 0].isnan().all()  # the other layer is untouched


@pytest.mark.covers("M06")
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("gather_bytes", [1, 100_000, 400_000])
def test_cutting_a_step_to_fit_memory_changes_no_bit(gather_bytes: int, window: int | None) -> None:
    generator = torch.Generator().manual_seed(gather_bytes)
    kv = torch.randn((60, 1, 2, 16, 2, 32), generator=generator)
    starts_and_counts = [(0, 1), (200, 1), (130, 101), (90, 1), (199, 1), (0, 65)]
    spans, num_rows = [], 0
    for start, count in starts_and_counts:
        spans.append(RowSpan(num_rows, count, start))
        num_rows += count
    tables = torch.randint(0, 60, (len(spans), 15), generator=generator)
    batch = AttentionBatch(np.array(spans, np.int32), tables, torch.zeros(num_rows, dtype=torch.int64))
    queries = torch.randn(num_rows, 8, 32, generator=generator)
    whole = TiledAttention(kv, batch, num_heads=8).attend(0, queries, window)
    assert torch.equal(TiledAttention(kv, batch, 8, gather_bytes).attend(0, queries, window), whole)


@pytest.mark.covers("M06")
@pytest.mark.parametrize("heads", a_few([(2, 2, 18), (5, 1, 6), (6, 2, 10), (7, 1, 14), (3, 1, 22)]), ids=str)
@pytest.mark.parametrize("kernels", BACK_ENDS, ids=lambda kernels: kernels.name)
def test_heads_of_any_size_have_the_same_bits_alone_and_behind_others(
    kernels: Kernels, heads: tuple[int, int, int]
) -> None:
    """Of 18 numbers every second head begins in the middle of 16 bytes, where it does not when its row is alone."""
    num_heads, num_kv_heads, head_dim = heads
    generator = torch.Generator().manual_seed(head_dim)
    num_rows, block_size = 9, 16
    first, num_blocks = 70, 5
    kv = torch.randn((num_blocks, 1, 2, block_size, num_kv_heads, head_dim), generator=generator)
    queries = torch.randn(num_rows, num_heads, head_dim, generator=generator)
    table = torch.arange(num_blocks)[None]

    def attended(start: int, count: int) -> Tensor:
        where = torch.arange(first + start, first + start + count)
        batch = AttentionBatch(np.array([RowSpan(0, count, first + start)], np.int32), table, where)
        return kernels.step_attention(kv, batch, num_heads).attend(0, queries[start : start + count])

    alone = torch.cat([attended(row, 1) for row in range(num_rows)])
    assert torch.equal(attended(0, num_rows), alone)
    assert torch.equal(torch.cat([attended(0, 2), attended(2, 7)]), alone)
