"""Causal attention over paged KV whose bits do not depend on the batch.

Theory. The KV of a sequence is cut into tiles of TILE positions at absolute positions, so the cut is the same for every row
of the sequence in every step. Everything is fp32. For each row:

    scores    one [group_size, head_dim] x [head_dim, TILE] product per tile and KV head: the matrix shape, and with it the
              kernel and its order of summation, is fixed by the model; rows and sequences are only *batch* elements
    maximum   over all tiles; exact in any order
    sums      of weights and of weighted values per tile, then over the tiles one after the other, first position first

A tile past the row's position, or before its window, adds exp(-inf) = 0 to each, which changes no bit; that is why rows of
different lengths may share a batch and why a chunk may skip the tiles that a row cannot see. Values past a sequence's end are
zeroed, because the memory there is somebody's old block: 0 * NaN would let one broken sequence into another.

A batch element alone may be split over threads by the matrix library (measured), so single elements are doubled. The library also
adds up in an order that depends on where an element begins within 16 bytes (measured), so heads of 6, 10, 18 … numbers are widened
by zeros until each element begins there as every other does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.interface import AttentionBatch, RowSpan

TILE: Final = 64  # positions
GATHER_BYTES: Final = 64 << 20  # bound of what a group gathers, and of its scores
_ALIGNED: Final = 4  # fp32 numbers: 16 bytes


class _Tile(NamedTuple):
    rows: slice  # the batch elements that see something of the tile
    mask: (
        Tensor | None
    )  # [those of them up to the last that sees only a part, 1, TILE] bool: True where they may not look


class _Group(NamedTuple):
    """Rows that are computed together, by ascending position: single rows of several sequences, or a run of rows of one."""

    rows: Tensor  # [num_rows] int64, of the step
    block_ids: Tensor  # [num_sequences * blocks_each] int64
    lengths: tuple[int, ...]  # KV positions of each sequence
    has_own_kv: bool  # each row is a sequence's only one; else all rows are of one sequence
    tiles: tuple[_Tile, ...]


class TiledAttention:
    """kernels.interface.StepAttention over fixed tiles."""

    def __init__(self, kv: Tensor, batch: AttentionBatch, num_heads: int, gather_bytes: int = GATHER_BYTES) -> None:
        _, self._num_layers, _, self._block_size, self._num_kv_heads, self._head_dim = kv.shape
        self._kv = kv
        # A layer's keys (or values) of one block are one row of this view, a position's are one row of the other. Positions may
        # be further apart than their heads are long.
        width = self._num_kv_heads * self._head_dim
        self._position_rows = kv.as_strided((kv.shape[:4].numel(), width), (kv.stride(3), 1))
        self._block_rows = self._position_rows.view(-1, self._block_size, width)
        block, offset = batch.write_positions // self._block_size, batch.write_positions % self._block_size
        self._write_base = (block * (2 * self._num_layers * self._block_size) + offset).to(kv.device)
        self._batch = batch
        self._spans = [RowSpan(*span) for span in batch.spans.tolist()]
        self._gather_bytes = gather_bytes
        self._group_size = num_heads // self._num_kv_heads
        self._groups: dict[int | None, list[_Group]] = {}  # by window; a model has one or two

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store the step's keys and values of one layer."""
        for plane, rows in ((2 * layer, keys), (2 * layer + 1, values)):
            index = self._write_base + plane * self._block_size
            self._position_rows.index_copy_(0, index, rows.reshape(rows.shape[0], -1))

    def attend(self, layer: int, queries: Tensor, window: int | None = None) -> Tensor:
        """Attend over the last `window` positions up to each row's own, or all."""
        if window not in self._groups:
            self._groups[window] = self._plan(window)
        out = torch.empty_like(queries)
        for group in self._groups[window]:
            out[group.rows] = self._attend_group(group, layer, queries[group.rows]).to(out.dtype)
        return out

    def _attend_group(self, group: _Group, layer: int, queries: Tensor) -> Tensor:
        num_rows, num_heads, head_dim = queries.shape
        keys = self._gather(group, 2 * layer)
        values = self._gather(group, 2 * layer + 1)
        for sequence, length in enumerate(group.lengths):
            values[sequence, :, length:] = 0
        scaled = _widened(queries.float() * (1 / math.sqrt(head_dim)))
        scaled = scaled.view(num_rows, self._num_kv_heads, num_heads // self._num_kv_heads, -1)
        if group.has_own_kv:  # a batch element is one (row, KV head)
            mixed = _attend_tiles(scaled.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1), group.tiles)
        else:  # one sequence: all rows share its KV, head by head
            heads = range(self._num_kv_heads)
            mixed = torch.stack(
                [_attend_tiles(scaled[:, h].contiguous(), keys[:, h], values[:, h], group.tiles) for h in heads], 1
            )
        return mixed.view(num_rows, num_heads, -1)[..., :head_dim]

    def _gather(self, group: _Group, plane: int) -> Tensor:
        """Copy one plane of the group's blocks to [num_sequences, num_kv_heads, num_tiles * TILE, head_dim, widened] fp32."""
        index = group.block_ids * (2 * self._num_layers) + plane
        gathered = self._block_rows.index_select(0, index)
        gathered = gathered.view(len(group.lengths), -1, self._num_kv_heads, self._head_dim)
        gathered = gathered[:, : len(group.tiles) * TILE].transpose(1, 2)
        return _widened(gathered.contiguous().float())

    def _plan(self, window: int | None) -> list[_Group]:
        """Cut the step into groups within the memory bound. How it is cut changes no bit."""
        singles = [(span.first_position, index) for index, span in enumerate(self._spans) if span.num_rows == 1]
        groups = self._plan_singles(sorted(singles), window)
        for index, span in enumerate(self._spans):
            if span.num_rows > 1:
                groups += self._plan_run(index, span, window)
        return groups

    def _plan_singles(self, singles: Sequence[tuple[int, int]], window: int | None) -> list[_Group]:
        """Put rows of alike lengths together: gathered memory is padded to the longest, at most twofold."""
        position_bytes = 4 * self._num_kv_heads * (2 * self._head_dim + self._group_size)
        groups: list[_Group] = []
        start = 0
        for end in range(1, len(singles) + 1):
            if end < len(singles):
                longest, shortest = singles[end][0] // TILE + 1, singles[start][0] // TILE + 1
                fits = (end + 1 - start) * longest * TILE * position_bytes <= self._gather_bytes
                if fits and longest <= 2 * shortest:
                    continue
            members = singles[start:end]
            spans = [index for _, index in members]
            rows = [self._spans[index].first_row for index in spans]
            group = self._group(rows, spans, np.array([position for position, _ in members]), window)
            tiles = tuple(_each_head(tile, self._num_kv_heads) for tile in group.tiles)
            groups.append(group._replace(tiles=tiles, has_own_kv=True))
            start = end
        return groups

    def _plan_run(self, index: int, span: RowSpan, window: int | None) -> list[_Group]:
        """Cut one sequence's rows so that the scores of one KV head stay within the bound."""
        num_positions = span.first_position + span.num_rows
        step = max(1, self._gather_bytes // (4 * self._group_size * num_positions))
        groups = []
        for start in range(0, span.num_rows, step):
            count = min(step, span.num_rows - start)
            positions = span.first_position + start + np.arange(count)
            first_row = span.first_row + start
            groups.append(self._group(range(first_row, first_row + count), [index], positions, window))
        return groups

    def _group(self, rows: Sequence[int], spans: Sequence[int], positions: np.ndarray, window: int | None) -> _Group:
        """Lay out one sequence's rows, or one row of each of several."""
        num_tiles = int(positions[-1]) // TILE + 1
        num_blocks = -(-num_tiles * TILE // self._block_size)
        tables = self._batch.block_tables[list(spans), :num_blocks]
        # A table may end inside the last tile: what is gathered there instead is masked, so any block serves.
        tables = torch.nn.functional.pad(tables, (0, num_blocks - tables.shape[1]))
        lengths = tuple((positions[-len(spans) :] + 1).tolist())  # of a run: up to its last row
        tiles = tuple(_tile(positions, index * TILE, window) for index in range(num_tiles))
        if self._kv.device.type != "cpu":
            tiles = tuple(
                tile._replace(mask=None if tile.mask is None else tile.mask.to(self._kv.device)) for tile in tiles
            )
        index, block_ids = torch.tensor(list(rows)).to(self._kv.device), tables.flatten().to(self._kv.device)
        return _Group(index, block_ids, lengths, has_own_kv=False, tiles=tiles)


def _tile(positions: np.ndarray, start: int, window: int | None) -> _Tile:
    """Which of these ascending positions see nothing, a part, or all of the tile that starts here."""
    columns = start + np.arange(TILE)
    first_row, full_row = np.searchsorted(positions, (start, start + TILE - 1)).tolist()
    if window is None:
        rows = slice(first_row, len(positions))
        hidden = columns[None, :] > positions[first_row:full_row, None]
    else:
        # The last position that sees the tile's last column is start + TILE - 1 + window - 1.
        rows = slice(first_row, max(first_row, int(np.searchsorted(positions, start + TILE - 1 + window))))
        seen_from = positions[rows, None]
        hidden = (columns[None, :] > seen_from) | (columns[None, :] <= seen_from - window)
    return _Tile(rows, torch.from_numpy(hidden)[:, None, :] if hidden.any() else None)


def _widened(heads: Tensor) -> Tensor:
    """The last dimension filled up with zeros to a multiple of 16 bytes."""
    lacking = -heads.shape[-1] % _ALIGNED
    return torch.nn.functional.pad(heads, (0, lacking)) if lacking else heads


def _each_head(tile: _Tile, num_kv_heads: int) -> _Tile:
    """Repeat a tile's rows for batches whose element is (row, KV head)."""
    mask = None if tile.mask is None else tile.mask.repeat_interleave(num_kv_heads, 0)
    return _Tile(slice(tile.rows.start * num_kv_heads, tile.rows.stop * num_kv_heads), mask)


def _attend_tiles(queries: Tensor, keys: Tensor, values: Tensor, tiles: Sequence[_Tile]) -> Tensor:
    """Attend with [batch, group_size, head_dim] over keys and values [batch or 1, num_tiles * TILE, head_dim], all fp32."""
    batch, group_size, _ = queries.shape
    scores = queries.new_full((len(tiles), batch, group_size, TILE), -math.inf)
    for index, (rows, mask) in enumerate(tiles):
        if rows.start == rows.stop:
            continue
        seen = scores[index, rows]
        seen.copy_(_batched_product(queries[rows], _tile_of(keys, index, rows).transpose(1, 2)))
        if mask is not None:
            seen[: mask.shape[0]].masked_fill_(mask, -math.inf)
    weights = scores.sub_(scores.amax(-1, keepdim=True).amax(0)).exp_()
    tile_sums = weights.sum(-1, keepdim=True)  # [num_tiles, batch, group_size, 1]
    total = torch.zeros_like(tile_sums[0])
    mixed = torch.zeros_like(queries)
    for index, (rows, _) in enumerate(tiles):
        if rows.start == rows.stop:
            continue
        total += tile_sums[index]
        mixed[rows] += _batched_product(weights[index, rows], _tile_of(values, index, rows))
    return mixed.div_(total)


def _tile_of(side: Tensor, index: int, rows: slice) -> Tensor:
    """One tile of keys or values, for these batch elements (all, where they share one sequence)."""
    tile = side[:, index * TILE : (index + 1) * TILE]
    return tile if side.shape[0] == 1 else tile[rows]


def _batched_product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply [batch, m, k] by [batch or 1, k, n], never with a single batch element."""
    batch = left.shape[0]
    if batch == 1:
        left = torch.cat((left, left))
        right = right.expand(2, -1, -1)
    return torch.bmm(left, right.expand(left.shape[0], -1, -1))[:batch]
