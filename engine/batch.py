"""One step as tensors: which rows there are, where their KV goes and which of them want logits.

Not here: which rows run (the plan), whose blocks they are, any arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.interface import AttentionBatch, RowSpan


class Segment(NamedTuple):
    """Consecutive positions of one sequence that a step computes."""

    token_ids: Sequence[int]
    first_position: int
    block_ids: Sequence[int] | NDArray[np.int64]  # the sequence's block table, up to its last position here or further
    num_logits: int  # how many of its last rows want logits


class Batch(NamedTuple):
    """One step as tensors; a row is a token."""

    token_ids: Tensor  # [num_rows] int64
    positions: Tensor  # [num_rows] int64
    logit_rows: Tensor  # [num_logits] int64
    attention: AttentionBatch


def build_batch(segments: Sequence[Segment], block_size: int) -> Batch:
    """Lay segments out as rows, in order. Raises ValueError where a block table is too short for its positions."""
    counts = [len(segment.token_ids) for segment in segments]
    first_rows = [0, *np.cumsum(counts)[:-1].tolist()]
    ends = [segment.first_position + count for segment, count in zip(segments, counts, strict=True)]
    widths = [-(-end // block_size) for end in ends]
    tables = np.zeros((len(segments), max(widths)), np.int64)
    positions = np.empty(sum(counts), np.int64)
    writes = np.empty(sum(counts), np.int64)
    logit_rows: list[int] = []
    for index, (segment, first_row, count) in enumerate(zip(segments, first_rows, counts, strict=True)):
        table = np.asarray(segment.block_ids[: widths[index]], np.int64)
        if len(table) < widths[index]:
            raise ValueError(f"position {ends[index] - 1} is past the {len(table)} blocks of its sequence")
        rows = slice(first_row, first_row + count)
        tables[index, : widths[index]] = table
        positions[rows] = np.arange(segment.first_position, ends[index])
        writes[rows] = table[positions[rows] // block_size] * block_size + positions[rows] % block_size
        logit_rows += range(first_row + count - segment.num_logits, first_row + count)
    spans = (RowSpan(*row) for row in zip(first_rows, counts, (s.first_position for s in segments), strict=True))
    return Batch(
        token_ids=torch.tensor([token_id for segment in segments for token_id in segment.token_ids]),
        positions=torch.from_numpy(positions),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
        attention=AttentionBatch(tuple(spans), torch.from_numpy(tables), torch.from_numpy(writes)),
    )
