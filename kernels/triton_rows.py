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
def _turned(x, at, is_there, cos, sin, turn, HALF: tl.constexpr, dtype: tl.constexpr):
    """Both halves of some heads at x + at, before and behind the rotation that cos and sin have at `turn`; fp32."""
    first = widened(tl.load(x + at, mask=is_there, other=0.0))
    second = widened(tl.load(x + at + HALF, mask=is_there, other=0.0))
    c = rounded(tl.load(cos + turn, mask=is_there, other=0.0), dtype)
    s = rounded(tl.load(sin + turn, mask=is_there, other=0.0), dtype)
    turned_first = rounded(first * c, dtype) - rounded(second * s, dtype)
    turned_second = rounded(second * c, dtype) + rounded(first * s, dtype)
    return first, second, turned_first, turned_second


@triton.jit(do_not_specialize=["num_lanes"])
def rotate(
    x,  # [num_rows, num_heads, 2 * HALF], rows row_stride apart
    cos,  # [num_rows, HALF] fp32, as sin
    sin,
    out,  # [num_rows, num_heads, 2 * HALF]
    num_lanes,  # num_rows * num_heads
    row_stride,
    num_heads,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,  # HALF or more, a power of two
    LANES: tl.constexpr,
):
    """Rotary embedding, element i with i + HALF, rounded at each step as transformers rounds. Grid: heads of rows by LANES."""
    dtype: tl.constexpr = x.dtype.element_ty
    lanes = (tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES))[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    is_there = (lanes < num_lanes) & (columns < HALF)
    rows, heads = lanes // num_heads, lanes % num_heads
    at = rows * row_stride + heads * (2 * HALF) + columns
    _, _, first, second = _turned(x, at, is_there, cos, sin, rows * HALF + columns, HALF, dtype)
    to = out + lanes * (2 * HALF) + columns
    tl.store(to, narrowed(first, dtype), mask=is_there)
    tl.store(to + HALF, narrowed(second, dtype), mask=is_there)


@triton.jit(do_not_specialize=["num_lanes"])
def rotate_and_write(
    qkv,  # [num_rows, NUM_HEADS + 2 * NUM_KV_HEADS, 2 * HALF]: queries, keys, values
    cos,  # [num_rows, HALF] fp32, as sin
    sin,
    write_positions,  # [num_rows] int64: block id * BLOCK_SIZE + offset in the block
    queries,  # [num_rows, NUM_HEADS, 2 * HALF]
    keys_of_block_0,  # of this layer; values lie plane_stride behind
    num_lanes,  # num_rows * (NUM_HEADS + 2 * NUM_KV_HEADS)
    block_stride,
    plane_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,  # HALF or more, a power of two
    LANES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Rotate queries and keys; queries go to memory of their own, keys and values to the KV cache. Grid: heads by LANES."""
    dtype: tl.constexpr = qkv.dtype.element_ty
    FIRST_VALUE: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    ALL_HEADS: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    lanes = (tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES))[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    is_there = (lanes < num_lanes) & (columns < HALF)
    rows, heads = lanes // ALL_HEADS, lanes % ALL_HEADS
    at = lanes * (2 * HALF) + columns
    first, second, turned_first, turned_second = _turned(
        qkv, at, is_there, cos, sin, rows * HALF + columns, HALF, dtype
    )
    is_value = heads >= FIRST_VALUE
    first = narrowed(tl.where(is_value, first, turned_first), dtype)
    second = narrowed(tl.where(is_value, second, turned_second), dtype)
    is_query = is_there & (heads < NUM_HEADS)
    to = queries + (rows * NUM_HEADS + heads) * (2 * HALF) + columns
    tl.store(to, first, mask=is_query)
    tl.store(to + HALF, second, mask=is_query)
    place = tl.load(write_positions + rows, mask=lanes < num_lanes, other=0)
    of_block = place // BLOCK_SIZE * block_stride + tl.where(is_value, plane_stride, 0)
    kv_heads = (heads - NUM_HEADS) % NUM_KV_HEADS  # of keys, then of values
    of_position = (place % BLOCK_SIZE) * (NUM_KV_HEADS * 2 * HALF) + kv_heads * (2 * HALF)
    to = keys_of_block_0 + of_block + of_position + columns
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
