"""Asks the device whether shapes of tiles that are to be used side by side give a row the same bits; others are left out.

That they do follows from how the kernels sum (triton_linear.py, triton_attention.py), if the device's products do not care how
wide they are. Instructions of another shape (wgmma of 64 rows beside mma of 16) sum alike where somebody looked: on an H200 all
shapes of the table did. So each start looks, over random numbers of several magnitudes, before the first number of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.interface import AttentionBatch
from kernels.triton_tuning import AttentionTuning, LinearShapes, LinearTuning

Multiply = Callable[[LinearTuning, Tensor, Tensor], Tensor]  # x [num_rows, in_features] by a weight
Attend = Callable[[AttentionTuning, Tensor, AttentionBatch, Tensor], Tensor]  # with KV, a step and its queries
_ROWS, _DEPTH, _WIDTH = 130, 1000, 200  # no multiple of any tile; rows of 16 bytes' multiples, as descriptors need
_BLOCK_SIZE = 16
FIRST, CHUNK = 1100, 150  # position and length of a chunk in the third part of 512
# Rows of it that are computed alone, too. Some are the last of a tile, which they see in full, and the chunk's first rows do not.
DECODED = (0, 37, 51, 115, 147, 149)


def agreeing_shapes(
    shapes: LinearShapes, multiply: Multiply, dtype: torch.dtype, device: torch.device, *, is_gated: bool
) -> LinearShapes:
    """Those whose products of the same rows are the last shape's to the bit."""
    if len(shapes) == 1:
        return shapes
    x, weight = _drawn(dtype, device, (_ROWS, _DEPTH), ((1 + is_gated) * _WIDTH, _DEPTH))
    rows = (slice(None), slice(77, 78))
    expected = [multiply(shapes[-1], x[chosen].clone(), weight) for chosen in rows]
    return tuple(
        shape
        for shape in shapes
        if shape is shapes[-1] or _are_equal([multiply(shape, x[chosen].clone(), weight) for chosen in rows], expected)
    )


def agreeing_attention(
    tuning: AttentionTuning, attend: Attend, dtype: torch.dtype, device: torch.device, head_dim: int, group_size: int
) -> AttentionTuning | None:
    """The tuning; where a few rows' tiles give other bits than a chunk's, with a chunk's for both; None: so do these."""
    num_blocks = -(-(FIRST + CHUNK) // _BLOCK_SIZE)
    kv, queries = _drawn(dtype, device, (num_blocks, 1, 2, _BLOCK_SIZE, 1, head_dim), (CHUNK, group_size, head_dim))
    whole = attend(tuning, kv, _batch(num_blocks, CHUNK, FIRST), queries)
    for asked in dict.fromkeys((tuning, tuning._replace(split=tuning.whole))):
        alone = [
            attend(asked, kv, _batch(num_blocks, 1, FIRST + row), queries[row : row + 1].clone()) for row in DECODED
        ]
        if _are_equal(alone, [whole[row : row + 1] for row in DECODED]):
            return asked
    return None


def _drawn(dtype: torch.dtype, device: torch.device, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Numbers of several magnitudes, the same at every start."""
    generator = torch.Generator().manual_seed(0)
    numbers = (torch.randn((2, *shape), generator=generator) for shape in shapes)
    return [(each[0] * each[1].mul(2).exp2()).to(dtype).to(device) for each in numbers]


def _batch(num_blocks: int, num_rows: int, first_position: int) -> AttentionBatch:
    tables = torch.arange(num_blocks).flip(0).unsqueeze(0)
    spans = np.array([(0, num_rows, first_position)], np.int32)
    return AttentionBatch(spans, tables, torch.zeros(num_rows, dtype=torch.int64))


def _are_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(map(torch.equal, found, expected))
