"""What happens to each row by itself, in Triton: norms, rotations, gates; fused where that spares a trip through memory.

Numbers are rounded to the dtype where the reference rounds (torch_reference.py), so all of it is fp32 between `rounded`s.
A row is summed by one program, in an order that the tile's shape fixes, and the tile's shape follows from the row's width alone.
"""

import triton
import triton.language as tl

from kernels.triton_numbers import narrowed, rounded, widened


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm(
    x,  # [num_rows, WIDTH]; HAS_DELTA: becomes x + delta
    delta,  # [num_rows, WIDTH], or anything
    weight,  # [WIDTH]
    out,  # [num_rows, WIDTH]
    num_rows,
    eps,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,  # WIDTH or more, a power of two
    ROWS: tl.constexpr,
    HAS_DELTA: tl.constexpr,
):
    """Each row to unit mean square, then by weight; before that the residual stream takes its delta in. Grid: rows by ROWS."""
    dtype: tl.constexpr = x.dtype.element_ty
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    is_there = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    at = rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    numbers = widened(tl.load(x + at, mask=is_there, other=0.0))
    if HAS_DELTA:
        numbers = rounded(numbers + widened(tl.load(delta + at, mask=is_there, other=0.0)), dtype)
        tl.store(x + at, narrowed(numbers, dtype), mask=is_there)
    scale = tl.rsqrt(tl.sum(numbers * numbers, 1) / WIDTH + eps)
    weights = widened(tl.load(weight + columns, mask=columns < WIDTH, other=0.0))
    normed = rounded(numbers * scale[:, None], dtype) * weights[None, :]
    tl.store(out + at, narrowed(normed, dtype), mask=is_there)


@triton.jit
def _turned(first, second, cos, sin, dtype: tl.constexpr):
    """Both halves of rotated heads, fp32, rounded at each step as transformers rounds."""
    return (
        rounded(rounded(first * cos, dtype) - rounded(second * sin, dtype), dtype),
        rounded(rounded(second * cos, dtype) + rounded(first * sin, dtype), dtype),
    )


@triton.jit
def rotate(
    x,  # [num_rows, num_heads, 2 * HALF], rows row_stride apart
    cos,  # [num_rows, HALF] fp32, as sin
    sin,
    out,  # [num_rows, num_heads, 2 * HALF]
    row_stride,
    num_heads,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,  # HALF or more, a power of two
    HEADS: tl.constexpr,  # num_heads or more, a power of two
):
    """Rotary embedding, element i with i + HALF. Grid: rows."""
    dtype: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    heads, columns = tl.arange(0, HEADS)[:, None], tl.arange(0, COLUMNS)[None, :]
    is_there = (heads < num_heads) & (columns < HALF)
    at = heads * (2 * HALF) + columns
    turn = row * HALF + columns
    c = rounded(tl.load(cos + turn, mask=columns < HALF, other=0.0), dtype)
    s = rounded(tl.load(sin + turn, mask=columns < HALF, other=0.0), dtype)
    first = widened(tl.load(x + row * row_stride + at, mask=is_there, other=0.0))
    second = widened(tl.load(x + row * row_stride + at + HALF, mask=is_there, other=0.0))
    first, second = _turned(first, second, c, s, dtype)
    to = out + row * num_heads * (2 * HALF) + at
    tl.store(to, narrowed(first, dtype), mask=is_there)
    tl.store(to + HALF, narrowed(second, dtype), mask=is_there)


@triton.jit
def rotate_and_write(
    qkv,  # [num_rows, NUM_HEADS + 2 * NUM_KV_HEADS, 2 * HALF]: queries, keys, values
    cos,  # [num_rows, HALF] fp32, as sin
    sin,
    write_positions,  # [num_rows] int64: block id * BLOCK_SIZE + offset in the block
    queries,  # [num_rows, NUM_HEADS, 2 * HALF]
    keys_of_block_0,  # of this layer; values lie plane_stride behind
    block_stride,
    plane_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,  # HALF or more, a power of two
    HEADS: tl.constexpr,  # NUM_HEADS + 2 * NUM_KV_HEADS or more, a power of two
    BLOCK_SIZE: tl.constexpr,
):
    """Rotate queries and keys; queries go to memory of their own, keys and values to the KV cache. Grid: rows."""
    dtype: tl.constexpr = qkv.dtype.element_ty
    NUM_ROTATING: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    row = tl.program_id(0).to(tl.int64)
    heads, columns = tl.arange(0, HEADS)[:, None], tl.arange(0, COLUMNS)[None, :]
    is_there = (heads < NUM_ROTATING + NUM_KV_HEADS) & (columns < HALF)
    at = qkv + row * (NUM_ROTATING + NUM_KV_HEADS) * (2 * HALF) + heads * (2 * HALF) + columns
    first = widened(tl.load(at, mask=is_there, other=0.0))
    second = widened(tl.load(at + HALF, mask=is_there, other=0.0))
    turn = row * HALF + columns
    c = rounded(tl.load(cos + turn, mask=columns < HALF, other=0.0), dtype)
    s = rounded(tl.load(sin + turn, mask=columns < HALF, other=0.0), dtype)
    turned_first, turned_second = _turned(first, second, c, s, dtype)
    first = narrowed(tl.where(heads < NUM_ROTATING, turned_first, first), dtype)
    second = narrowed(tl.where(heads < NUM_ROTATING, turned_second, second), dtype)
    is_query = is_there & (heads < NUM_HEADS)
    to = queries + row * NUM_HEADS * (2 * HALF) + heads * (2 * HALF) + columns
    tl.store(to, first, mask=is_query)
    tl.store(to + HALF, second, mask=is_query)
    place = tl.load(write_positions + row)
    kv_heads = tl.where(heads < NUM_ROTATING, heads - NUM_HEADS, heads - NUM_ROTATING)
    offset = (place % BLOCK_SIZE) * (NUM_KV_HEADS * 2 * HALF) + kv_heads * (2 * HALF) + columns
    plane = tl.where(heads < NUM_ROTATING, 0, plane_stride)
    to = keys_of_block_0 + place // BLOCK_SIZE * block_stride + plane + offset
    is_kept = is_there & (heads >= NUM_HEADS)
    tl.store(to, first, mask=is_kept)
    tl.store(to + HALF, second, mask=is_kept)


@triton.jit
def gated(gate, up, dtype: tl.constexpr):
    """silu(gate) * up of fp32 that the dtype holds, yet to be rounded. Where exp overflows the quotient is the right 0."""
    return rounded(gate / (1.0 + tl.exp(-gate)), dtype) * up


@triton.jit(do_not_specialize=["num_numbers"])
def silu_gate(
    gate_up,  # [num_rows, 2 * width]: gates, ups
    out,  # [num_rows, width]
    num_numbers,  # num_rows * width
    width,
    NUMBERS: tl.constexpr,
):
    """silu(gate) * up. Grid: numbers of the result by NUMBERS."""
    dtype: tl.constexpr = gate_up.dtype.element_ty
    at = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    is_there = at < num_numbers
    gates = gate_up + at // width * (2 * width) + at % width
    gate = widened(tl.load(gates, mask=is_there, other=0.0))
    up = widened(tl.load(gates + width, mask=is_there, other=0.0))
    tl.store(out + at, narrowed(gated(gate, up, dtype), dtype), mask=is_there)
