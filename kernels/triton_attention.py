"""Causal attention over paged KV in Triton: one arithmetic in two schedules, so that a row's bits depend on its own tokens only.

Theory. A sequence's positions are cut at absolute places into parts of PART, and a part into tiles of TILE. For each row

    a part      the online softmax of FlashAttention-2 (arXiv:2307.08691) over its tiles, first position first, begun anew
    the parts   merged one after the other, first position first, as Flash-Decoding merges its splits

and both schedules run these two functions, compiled with the same tile shapes and without contraction of a * b + c:

    attend_split, merge_parts    few rows of a sequence (decode): a program per part, or one row would keep one multiprocessor
                                 busy; what the parts gave goes through memory
    attend_whole                 many rows of a sequence (a prompt's chunk): a program goes through its rows' parts by itself

PART is fixed; how many parts there are follows from a row's position alone, never from how busy the device is or who else is in
the batch. A tile, or a part, of which a row sees nothing multiplies its sums by 1 and adds 0: no bit changes, so rows of different
positions share a tile of rows. Keys and values that nobody of a tile of rows may see are never read: 0 * NaN is NaN.

KV is paged (arXiv:2309.06180): kv [num_blocks, num_layers, 2, BLOCK_SIZE, num_kv_heads, HEAD_DIM], a table of blocks per sequence.
The query heads of one KV head are rows of one tile, so that each key and value is read once for all of them.

Scores, weights' sums and results are fp32; weights are rounded to the dtype for the product with values, as in FlashAttention.
Not here: which rows go which way (triton_step.py), tile shapes (triton_tuning.py).
"""

import triton
import triton.language as tl

from kernels.triton_numbers import multiply, narrowed


@triton.jit
def _merge(maximum, total, mixed, more_maximum, more_total, more_mixed):
    """Join two softmaxes over different positions: [ROWS], [ROWS], [ROWS, DIM] each, in powers of two."""
    greatest = tl.maximum(maximum, more_maximum)
    anchor = tl.where(greatest == -float("inf"), 0.0, greatest)  # nothing seen yet: -inf - -inf is not a number
    old, new = tl.exp2(maximum - anchor), tl.exp2(more_maximum - anchor)
    return greatest, total * old + more_total * new, mixed * old[:, None] + more_mixed * new[:, None]


@triton.jit
def _nothing(ROWS: tl.constexpr, DIM: tl.constexpr):
    """A softmax over no position."""
    return (
        tl.full([ROWS], -float("inf"), tl.float32),
        tl.zeros([ROWS], tl.float32),
        tl.zeros([ROWS, DIM], tl.float32),
    )


@triton.jit
def _attend_tile(
    maximum,  # [ROWS], as total: what these rows have mixed so far
    total,
    mixed,  # [ROWS, DIM]
    queries,  # [ROWS, DIM] the dtype
    positions,  # [ROWS] int32: each row's own; -1: a row that sees nothing
    keys_of_block_0,
    table,
    start,
    end,
    window,
    score_scale,
    block_stride,
    plane_stride,
    position_stride,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    IS_FULL: tl.constexpr,  # whether every row sees every position of the tile: then nothing is compared, and no bit changes
):
    """One step of the online softmax: positions [start, start + TILE), those before `end`."""
    dims = tl.arange(0, DIM)
    columns = start + tl.arange(0, TILE)
    is_there = columns < end
    if IS_FULL:
        blocks = tl.load(table + columns // BLOCK_SIZE).to(tl.int64)
    else:
        blocks = tl.load(table + columns // BLOCK_SIZE, mask=is_there, other=0).to(tl.int64)
    places = blocks * block_stride + (columns % BLOCK_SIZE) * position_stride
    at = keys_of_block_0 + places[:, None] + dims[None, :]
    is_read = is_there[:, None] & (dims < HEAD_DIM)[None, :]
    if not IS_FULL:
        keys = tl.load(at, mask=is_read, other=0.0)
    elif DIM == HEAD_DIM:
        keys = tl.load(at)
    else:
        keys = tl.load(at, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    scores = multiply(queries, tl.trans(keys), tl.zeros([ROWS, TILE], tl.float32)) * score_scale
    if not IS_FULL:
        own, seen = positions[:, None], columns[None, :]
        is_seen = (seen <= own) & (seen > own - window) & is_there[None, :]
        scores = tl.where(is_seen, scores, -float("inf"))
    greatest = tl.maximum(maximum, tl.max(scores, 1))
    anchor = tl.where(greatest == -float("inf"), 0.0, greatest)
    kept, weights = tl.exp2(maximum - anchor), tl.exp2(scores - anchor[:, None])
    if not IS_FULL:
        values = tl.load(at + plane_stride, mask=is_read, other=0.0)
    elif DIM == HEAD_DIM:
        values = tl.load(at + plane_stride)
    else:
        values = tl.load(at + plane_stride, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    total = total * kept + tl.sum(weights, 1)
    narrow = narrowed(weights, values.dtype)
    mixed = multiply(narrow, values, mixed * kept[:, None])
    return greatest, total, mixed


@triton.jit
def _attend_part(
    queries,  # as in _attend_tile, like all that is named there
    positions,
    first_position,  # the least of the rows' own, and the greatest
    last_position,
    keys_of_block_0,  # of this layer and KV head; values lie plane_stride behind
    table,  # this sequence's blocks
    begin,
    end,  # positions [begin, end): begin a multiple of TILE, all in one part
    window,
    score_scale,
    block_stride,
    plane_stride,
    position_stride,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """The softmax of these rows over some positions of one part: maximum [ROWS], total [ROWS], mixed values [ROWS, DIM]."""
    maximum, total, mixed = _nothing(ROWS, DIM)
    full_end = tl.minimum(end, first_position + 1) // TILE * TILE
    full_end = tl.where(begin > last_position - window, tl.maximum(full_end, begin), begin)
    for is_rest in tl.static_range(2):
        for start in range(full_end if is_rest else begin, end if is_rest else full_end, TILE):
            maximum, total, mixed = _attend_tile(
                maximum,
                total,
                mixed,
                queries,
                positions,
                keys_of_block_0,
                table,
                start,
                end,
                window,
                score_scale,
                block_stride,
                plane_stride,
                position_stride,
                HEAD_DIM,
                DIM,
                ROWS,
                TILE,
                BLOCK_SIZE,
                is_rest == 0,
            )
    return maximum, total, mixed


@triton.jit
def _lanes(tiles, tile, kv_head, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Of one tile of rows: its first row's position, its last one's, its table's and its first slot's number.

    And of each of its ROWS lanes: which row of the tile it is, its query head, whether there is such a row.
    """
    entry = tiles + tile * 5
    num_rows, first_position = tl.load(entry + 2), tl.load(entry + 3)
    lanes = tl.arange(0, ROWS)
    tokens = lanes // GROUP
    return (
        first_position,
        first_position + num_rows - 1,
        tl.load(entry),
        tl.load(entry + 4),
        tokens,
        kv_head * GROUP + lanes % GROUP,
        tokens < num_rows,
    )


@triton.jit
def _queries(queries, first_row, tokens, heads, num_heads, is_row, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """The queries of a tile's lanes, [ROWS, DIM]; zeros where there are none."""
    dims = tl.arange(0, DIM)
    at = ((first_row + tokens).to(tl.int64) * num_heads + heads) * HEAD_DIM
    return tl.load(queries + at[:, None] + dims[None, :], mask=is_row[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def _store_result(
    out,
    first_row,
    tokens,
    heads,
    num_heads,
    is_row,
    total,
    mixed,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
):
    """What a tile's lanes have mixed, by the sums of their weights, in the dtype."""
    dims = tl.arange(0, DIM)
    at = ((first_row + tokens).to(tl.int64) * num_heads + heads) * HEAD_DIM
    result = mixed / tl.where(is_row, total, 1.0)[:, None]
    is_used = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    result = narrowed(result, out.dtype.element_ty)
    tl.store(out + at[:, None] + dims[None, :], result, mask=is_used)


@triton.jit
def _first_seen(first_position, window):
    """The first position that any row sees whose own is first_position or later."""
    return tl.maximum(first_position - window + 1, 0)


@triton.jit(do_not_specialize=["window", "max_blocks", "num_parts"])
def attend_split(
    queries,  # [num_rows, num_heads, HEAD_DIM]
    keys_of_block_0,  # of this layer
    tables,  # [num_spans, max_blocks] int32
    tiles,  # [num_tiles, 5] int32: span, first row, number of rows, first position, first slot
    part_mixed,  # [num_slots, num_parts, num_heads, HEAD_DIM] fp32: what each part gives a row, and in part_sums
    part_sums,  # [num_slots, num_parts, num_heads, 2] fp32: its maximum, its total
    max_blocks,
    num_parts,
    window,
    score_scale,
    block_stride,
    plane_stride,
    position_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One part of one tile of rows, for one KV head. Grid: (num_tiles, num_kv_heads, num_parts)."""
    tile, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_position, last_position, span, slot, tokens, heads, is_row = _lanes(tiles, tile, kv_head, GROUP, ROWS)
    seen = _first_seen(first_position, window)
    if part < seen // PART or part > last_position // PART:
        return
    num_heads = tl.num_programs(1) * GROUP
    maximum, total, mixed = _attend_part(
        _queries(queries, tl.load(tiles + tile * 5 + 1), tokens, heads, num_heads, is_row, HEAD_DIM, DIM),
        tl.where(is_row, first_position + tokens, -1),
        first_position,
        last_position,
        keys_of_block_0 + kv_head * HEAD_DIM,
        tables + span.to(tl.int64) * max_blocks,
        tl.maximum(part * PART, seen // TILE * TILE),
        tl.minimum(part * PART + PART, last_position + 1),
        window,
        score_scale,
        block_stride,
        plane_stride,
        position_stride,
        HEAD_DIM,
        DIM,
        ROWS,
        TILE,
        BLOCK_SIZE,
    )
    dims = tl.arange(0, DIM)
    is_used = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    at = ((slot + tokens).to(tl.int64) * num_parts + part) * num_heads + heads
    tl.store(part_mixed + at[:, None] * HEAD_DIM + dims[None, :], mixed, mask=is_used)
    tl.store(part_sums + at * 2, maximum, mask=is_row)
    tl.store(part_sums + at * 2 + 1, total, mask=is_row)


@triton.jit(do_not_specialize=["window", "num_parts"])
def merge_parts(
    out,  # [num_rows, num_heads, HEAD_DIM] the dtype
    tiles,  # as in attend_split, like the next three
    part_mixed,
    part_sums,
    num_parts,
    window,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
):
    """Join the parts of one tile of rows, for one KV head. Grid: (num_tiles, num_kv_heads)."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    first_position, last_position, _, slot, tokens, heads, is_row = _lanes(tiles, tile, kv_head, GROUP, ROWS)
    num_heads = tl.num_programs(1) * GROUP
    dims = tl.arange(0, DIM)
    is_used = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    maximum, total, mixed = _nothing(ROWS, DIM)
    for part in range(_first_seen(first_position, window) // PART, last_position // PART + 1):
        at = ((slot + tokens).to(tl.int64) * num_parts + part) * num_heads + heads
        more_maximum = tl.load(part_sums + at * 2, mask=is_row, other=-float("inf"))
        more_total = tl.load(part_sums + at * 2 + 1, mask=is_row, other=0.0)
        more_mixed = tl.load(part_mixed + at[:, None] * HEAD_DIM + dims[None, :], mask=is_used, other=0.0)
        maximum, total, mixed = _merge(maximum, total, mixed, more_maximum, more_total, more_mixed)
    first_row = tl.load(tiles + tile * 5 + 1)
    _store_result(out, first_row, tokens, heads, num_heads, is_row, total, mixed, HEAD_DIM, DIM)


@triton.jit(do_not_specialize=["window", "max_blocks"])
def attend_whole(
    out,  # [num_rows, num_heads, HEAD_DIM] the dtype
    queries,  # as in attend_split, like the next three; slots mean nothing here
    keys_of_block_0,
    tables,
    tiles,
    max_blocks,
    window,
    score_scale,
    block_stride,
    plane_stride,
    position_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """All parts of one tile of rows, for one KV head. Grid: (num_tiles, num_kv_heads)."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    first_position, last_position, span, _, tokens, heads, is_row = _lanes(tiles, tile, kv_head, GROUP, ROWS)
    seen = _first_seen(first_position, window)
    num_heads = tl.num_programs(1) * GROUP
    first_row = tl.load(tiles + tile * 5 + 1)
    asked = _queries(queries, first_row, tokens, heads, num_heads, is_row, HEAD_DIM, DIM)
    maximum, total, mixed = _nothing(ROWS, DIM)
    for part in range(seen // PART, last_position // PART + 1):
        more_maximum, more_total, more_mixed = _attend_part(
            asked,
            tl.where(is_row, first_position + tokens, -1),
            first_position,
            last_position,
            keys_of_block_0 + kv_head * HEAD_DIM,
            tables + span.to(tl.int64) * max_blocks,
            tl.maximum(part * PART, seen // TILE * TILE),
            tl.minimum(part * PART + PART, last_position + 1),
            window,
            score_scale,
            block_stride,
            plane_stride,
            position_stride,
            HEAD_DIM,
            DIM,
            ROWS,
            TILE,
            BLOCK_SIZE,
        )
        maximum, total, mixed = _merge(maximum, total, mixed, more_maximum, more_total, more_mixed)
    _store_result(out, first_row, tokens, heads, num_heads, is_row, total, mixed, HEAD_DIM, DIM)
