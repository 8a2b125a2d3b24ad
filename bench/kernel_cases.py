"""What `bench.kernels` measures: a primitive of a back end and the same by torch, over the same numbers.

    decode   one row of each of several sequences        torch: scaled_dot_product_attention over KV that lies together
    chunk    a run of rows of one sequence               the same, causal
    linear   rows times a weight                         torch.nn.functional.linear

torch's side is spared the block table: it is what the kernels would be without paging, and not what a server could run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.interface import AttentionBatch, Kernels

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """So many sequences, each with so many positions, of which it computes the last `num_rows`."""

    num_sequences: int
    num_positions: int
    num_rows: int = 1
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128

    @property
    def name(self) -> str:
        """For a table."""
        if self.num_rows == 1:
            return f"decode {self.num_sequences} x {self.num_positions}"
        return f"chunk {self.num_rows} of {self.num_positions}"


@dataclass(frozen=True, slots=True)
class LinearCase:
    """Rows times a weight."""

    num_rows: int
    in_features: int = 4096
    out_features: int = 4096

    @property
    def name(self) -> str:
        """For a table."""
        return f"linear {self.num_rows} x {self.in_features} x {self.out_features}"


Case = AttentionCase | LinearCase


class Pair(NamedTuple):
    """The same result twice, and what it takes at least."""

    ours: Callable[[], Tensor]
    torchs: Callable[[], Tensor]
    num_bytes: int  # read and written
    num_operations: int  # an addition is one, too


def pair_of(case: Case, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> Pair:
    """Draw the numbers and prepare both sides; results of both are [rows, ...] alike."""
    if isinstance(case, LinearCase):
        return _linear(case, kernels, dtype, device)
    return _attention(case, kernels, dtype, device)


def _linear(case: LinearCase, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> Pair:
    x = torch.randn((case.num_rows, case.in_features), device=device).to(dtype)
    weight = torch.randn((case.out_features, case.in_features), device=device).to(dtype)
    linear = kernels.pack_linear(weight)
    num_numbers = x.numel() + weight.numel() + case.num_rows * case.out_features
    return Pair(
        lambda: linear(x),
        lambda: torch.nn.functional.linear(x, weight),
        num_numbers * dtype.itemsize,
        2 * case.num_rows * weight.numel(),
    )


def _attention(case: AttentionCase, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> Pair:
    blocks_each = -(-case.num_positions // BLOCK_SIZE)
    num_blocks = case.num_sequences * blocks_each
    kv = torch.randn((num_blocks, 1, 2, BLOCK_SIZE, case.num_kv_heads, case.head_dim), device=device).to(dtype)
    tables = torch.randperm(num_blocks).view(case.num_sequences, blocks_each)
    first = case.num_positions - case.num_rows
    spans = [(index * case.num_rows, case.num_rows, first) for index in range(case.num_sequences)]
    num_rows = case.num_sequences * case.num_rows
    batch = AttentionBatch(np.array(spans, np.int32), tables, torch.zeros(num_rows, dtype=torch.int64))
    queries = torch.randn((num_rows, case.num_heads, case.head_dim), device=device).to(dtype)
    attention = kernels.step_attention(kv, batch, case.num_heads)

    together = kv[:, 0].transpose(0, 1)[:, tables.to(device)]  # [2, sequences, blocks, BLOCK_SIZE, KV heads, head_dim]
    together = together.flatten(2, 3)[:, :, : case.num_positions].transpose(2, 3).contiguous()
    asked = queries.view(case.num_sequences, case.num_rows, case.num_heads, -1).transpose(1, 2).contiguous()
    own = first + torch.arange(case.num_rows, device=device)
    mask = torch.arange(case.num_positions, device=device)[None, :] <= own[:, None]
    is_square = case.num_rows == case.num_positions  # then SDPA knows a faster way to say so

    def by_torch() -> Tensor:
        found = torch.nn.functional.scaled_dot_product_attention(
            asked,
            together[0],
            together[1],
            attn_mask=None if is_square or case.num_rows == 1 else mask,
            is_causal=is_square,
            enable_gqa=True,
        )
        return found.transpose(1, 2).reshape(queries.shape)

    pairs_seen = case.num_sequences * (case.num_rows * first + case.num_rows * (case.num_rows + 1) // 2)
    numbers_seen = 2 * case.num_sequences * case.num_positions * case.num_kv_heads * case.head_dim
    return Pair(
        lambda: attention.attend(0, queries),
        by_torch,
        (numbers_seen + 2 * queries.numel()) * dtype.itemsize,
        4 * pairs_seen * case.num_heads * case.head_dim,
    )
