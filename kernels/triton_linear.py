"""Matrix products in Triton whose rows do not know how many they are.

The libraries of a device choose a kernel, and with it an order of summation, by the number of rows; that is what makes a token's
logits depend on the load. Here a sum over the inner dimension is one chain of products of 16 numbers (of one, in fp32), first ones
first, never split, whatever the shape of the tile that it lies in; so small tiles may serve few rows and large ones many. What it
costs: where one row runs, the arithmetic of 16 or 64, which a step that waits for weights does not feel (64 operations for each
byte of bf16 weights; an A100 could do 150 in that time, an H100 290, an H200 180); and where weights are narrow and deep, programs
that are few and long: a library would split the sum.

Weights stay as models store them, [out_features, in_features]. Sources: triton-lang.org, "Matrix Multiplication" (the order of
programs that keeps tiles in L2); Thinking Machines, "Defeating Nondeterminism in LLM Inference" (2025).
"""

import triton
import triton.language as tl

from kernels.triton_numbers import multiply, narrowed, rounded, widened
from kernels.triton_rows import gated


@triton.jit(do_not_specialize=["num_rows"])
def linear(
    x,  # [num_rows, in_features]; BY_DESCRIPTOR: a descriptor of its tiles [ROWS, DEPTH]
    weight,  # [out_features, in_features]; IS_GATED: [2 * out_features, in_features], gates first; or of [COLUMNS, DEPTH]
    bias,  # [out_features], or twice that, or anything
    out,  # [num_rows, out_features]
    num_rows,
    out_features,
    in_features,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    BY_DESCRIPTOR: tl.constexpr,
):
    """x @ weight.T + bias, or its two halves gated. Grid: tiles of ROWS x COLUMNS, those of the same columns side by side."""
    dtype: tl.constexpr = out.dtype.element_ty
    num_row_tiles = tl.cdiv(num_rows, ROWS)
    first_row = tl.program_id(0) % num_row_tiles * ROWS
    first_column = tl.program_id(0) // num_row_tiles * COLUMNS
    rows, columns = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
    is_row, is_column = rows < num_rows, columns < out_features
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    up_total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if BY_DESCRIPTOR:  # what is outside of a tensor is 0
        for start in range(0, in_features, DEPTH):
            numbers = x.load([first_row, start])
            total = multiply(numbers, tl.trans(weight.load([first_column, start])), total)
            if IS_GATED:
                up = weight.load([first_column + out_features, start])
                up_total = multiply(numbers, tl.trans(up), up_total)
    else:
        depths = tl.arange(0, DEPTH)
        left = x + rows.to(tl.int64)[:, None] * in_features + depths[None, :]
        right = weight + columns.to(tl.int64)[None, :] * in_features + depths[:, None]
        up = weight + (columns + out_features).to(tl.int64)[None, :] * in_features + depths[:, None]
        for start in range(0, in_features, DEPTH):
            is_deep = start + depths < in_features
            is_right = is_deep[:, None] & is_column[None, :]
            numbers = tl.load(left + start, mask=is_row[:, None] & is_deep[None, :], other=0.0)
            total = multiply(numbers, tl.load(right + start, mask=is_right, other=0.0), total)
            if IS_GATED:
                up_total = multiply(numbers, tl.load(up + start, mask=is_right, other=0.0), up_total)
    if HAS_BIAS:
        total += widened(tl.load(bias + columns, mask=is_column, other=0.0))[None, :]
        if IS_GATED:
            up_bias = tl.load(bias + out_features + columns, mask=is_column, other=0.0)
            up_total += widened(up_bias)[None, :]
    if IS_GATED:
        gate, up_total = rounded(total, dtype), rounded(up_total, dtype)
        total = gated(gate, up_total, dtype)
    to = out + rows.to(tl.int64)[:, None] * out_features + columns[None, :]
    tl.store(to, narrowed(total, dtype), mask=is_row[:, None] & is_column[None, :])
