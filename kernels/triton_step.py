"""One step's attention on the Triton kernels: which rows go together, what the device must know of them, and the launches.

What goes together is decided in triton_tiles.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from kernels.interface import AttentionBatch
from kernels.triton_attention import attend_split, attend_whole, merge_parts
from kernels.triton_launch import LANES, launcher
from kernels.triton_rows import rotate_and_write
from kernels.triton_tiles import cut_rows
from kernels.triton_tuning import AttentionTuning, Schedule, next_power_of_two
from kernels.upload import upload_together

NO_WINDOW: Final = 1 << 30
_LOG2_E: Final = math.log2(math.e)


class DeviceBatch(NamedTuple):
    """An AttentionBatch as the kernels read it: all tensors on the device."""

    split: Tensor  # see RowTiles, like the next
    whole: Tensor
    tables: Tensor  # [num_spans, max_blocks] int32
    write_positions: Tensor  # [num_rows] int64
    num_slots: int
    num_parts: int  # that a row of `split` may have


def on_device(batch: AttentionBatch, device: torch.device, tuning: AttentionTuning, group_size: int) -> DeviceBatch:
    """Cut a step's rows and bring all of it to the device."""
    tiles = cut_rows(batch.spans, *(_lanes(each, group_size) // group_size for each in (tuning.split, tuning.whole)))
    tables = batch.block_tables.to(torch.int32)
    known = [torch.from_numpy(tiles.split), torch.from_numpy(tiles.whole), tables, batch.write_positions]
    split, whole, tables, write_positions = upload_together(known, device)
    return DeviceBatch(
        split,
        whole,
        tables,
        write_positions,
        tiles.num_slots,
        -(-tiles.num_positions // tuning.part),
    )


def _lanes(schedule: Schedule, group_size: int) -> int:
    """How many queries a tile takes: rows of a sequence, with all query heads of a KV head."""
    return max(schedule.rows, next_power_of_two(group_size))


class TritonAttention:
    """kernels.interface.StepAttention; also the fused way in that the stack takes."""

    def __init__(
        self,
        kv: Tensor,
        batch: DeviceBatch,
        num_heads: int,
        tuning: AttentionTuning,
        layers: Sequence[Tensor] | None = None,
    ) -> None:
        """`layers`: kv's, one by one, where somebody has them."""
        _, _, _, self._block_size, num_kv_heads, head_dim = kv.shape
        self._layers = kv.unbind(1) if layers is None else layers
        self._kv, self._batch = kv, batch
        self._num_heads, self._num_kv_heads, self._head_dim = num_heads, num_kv_heads, head_dim
        group_size = num_heads // num_kv_heads
        shape = (batch.num_slots, batch.num_parts, num_heads)
        self._part_mixed = kv.new_empty((*shape, head_dim), dtype=torch.float32)
        self._part_sums = kv.new_empty((*shape, 2), dtype=torch.float32)
        self._strides = kv.stride(0), kv.stride(2), kv.stride(3)  # of a block, of keys or values, of a position
        sizes = {
            "GROUP": group_size,
            "HEAD_DIM": head_dim,
            "DIM": max(16, next_power_of_two(head_dim)),
            "PART": tuning.part,
        }
        tiles = {"TILE": tuning.tile, "BLOCK_SIZE": self._block_size}
        whole, split = tuning.whole, tuning.split
        self._attend_whole = launcher(
            attend_whole,
            **sizes,
            **tiles,
            ROWS=_lanes(whole, group_size),
            num_warps=whole.warps,
            num_stages=whole.stages,
        )
        sizes["ROWS"] = _lanes(split, group_size)
        self._attend_split = launcher(attend_split, **sizes, **tiles, num_warps=split.warps, num_stages=split.stages)
        self._merge_parts = launcher(merge_parts, **sizes)
        half = head_dim // 2
        self._rotate_and_write = launcher(
            rotate_and_write,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HALF=half,
            COLUMNS=next_power_of_two(half),
            LANES=LANES,
            BLOCK_SIZE=self._block_size,
        )

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store the step's keys and values of one layer."""
        places = self._batch.write_positions
        block, offset = places // self._block_size, places % self._block_size
        self._kv[block, layer, 0, offset] = keys
        self._kv[block, layer, 1, offset] = values

    def rotate_and_write(
        self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, queries: Tensor | None = None
    ) -> Tensor:
        """Rotate queries and keys, store keys and values; the queries, [num_rows, num_heads, head_dim], where they may go."""
        if queries is None:
            queries = qkv.new_empty((len(qkv), self._num_heads, self._head_dim))
        num_lanes = len(qkv) * (self._num_heads + 2 * self._num_kv_heads)
        self._rotate_and_write(
            (-(-num_lanes // LANES),),
            qkv,
            cos,
            sin,
            self._batch.write_positions,
            queries,
            self._layers[layer],
            num_lanes,
            *self._strides[:2],
        )
        return queries

    def attend(self, layer: int, queries: Tensor, window: int | None = None, out: Tensor | None = None) -> Tensor:
        """Attend over the last `window` positions up to each row's own, or all; into `out`, if there is one."""
        queries = queries.contiguous()
        out = torch.empty_like(queries) if out is None else out
        batch, tables = self._batch, self._batch.tables
        seen = NO_WINDOW if window is None else window
        kv = self._layers[layer]
        places = (seen, _LOG2_E / math.sqrt(self._head_dim), *self._strides)
        if len(batch.whole):
            whole = out, queries, kv, tables, batch.whole, tables.shape[1], *places
            self._attend_whole((len(batch.whole), self._num_kv_heads), *whole)
        if len(batch.split):
            grid = len(batch.split), self._num_kv_heads
            parts = batch.split, self._part_mixed, self._part_sums
            split = queries, kv, tables, *parts, tables.shape[1], batch.num_parts, *places
            self._attend_split((*grid, batch.num_parts), *split)
            self._merge_parts(grid, out, *parts, batch.num_parts, seen)
        return out
