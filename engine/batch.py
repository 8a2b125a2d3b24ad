"""One step as tensors: which rows there are, where their KV goes and which of them want logits.

A step's decode rows are laid out by whole arrays, its chunks one by one; all of it in memory that earlier steps had (M07).
Not here: which rows run (the plan), whose blocks they are, any arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.step_memory import SharedNumbers
from kernels.interface import AttentionBatch

STEPS_KEPT: Final = 2  # a batch is overwritten by the second one after it


class SlotTables(NamedTuple):
    """The block tables of all sequences that may have rows."""

    block_ids: NDArray[np.int64]  # [num_slots, max_blocks], contiguous
    num_blocks: NDArray[np.int64]  # [num_slots]: so many of each row are meant


class FedRows(NamedTuple):
    """Rows that are their sequence's only one in the step and want logits; each array is [num_decodes] int64."""

    slots: NDArray[np.int64]
    positions: NDArray[np.int64]
    token_ids: NDArray[np.int64]


class Chunk(NamedTuple):
    """Consecutive positions of one slot's sequence that a step computes."""

    slot: int
    first_position: int
    token_ids: Sequence[int]
    num_logits: int  # how many of its last rows want logits


class Segment(NamedTuple):
    """Consecutive positions of a sequence that has no slot."""

    token_ids: Sequence[int]
    first_position: int
    block_ids: Sequence[int]  # the sequence's block table, up to its last position here or further
    num_logits: int  # how many of its last rows want logits


class Batch(NamedTuple):
    """One step as tensors; a row is a token. Rows and spans: the decodes, then the chunks, in the given order."""

    token_ids: Tensor  # [num_rows] int64
    positions: Tensor  # [num_rows] int64
    logit_rows: Tensor  # [num_logits] int64
    attention: AttentionBatch


NO_DECODES: Final = FedRows(*(np.zeros(0, np.int64) for _ in range(3)))


def build_batch(segments: Sequence[Segment], block_size: int) -> Batch:
    """Lay segments out in memory of their own. Raises ValueError where a block table is too short for its positions."""
    num_blocks = np.array([len(segment.block_ids) for segment in segments])
    tables = SlotTables(np.zeros((len(segments), num_blocks.max()), np.int64), num_blocks)
    for row, segment in zip(tables.block_ids, segments, strict=True):
        row[: len(segment.block_ids)] = segment.block_ids
    chunks = [
        Chunk(index, segment.first_position, segment.token_ids, segment.num_logits)
        for index, segment in enumerate(segments)
    ]
    return BatchBuffers(block_size).lay_out(tables, NO_DECODES, chunks)


class BatchBuffers:
    """Where batches lie: the memory of STEPS_KEPT steps, by turns, so that a step may still be read while the next is laid out."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._steps = [_StepBuffers() for _ in range(STEPS_KEPT)]

    def lay_out(self, tables: SlotTables, decodes: FedRows, chunks: Sequence[Chunk]) -> Batch:
        """The step as tensors, good until the STEPS_KEPT-th call after this one.

        Raises ValueError where a block table is too short for its positions, and for a chunk without any.
        """
        memory = self._steps[0]
        self._steps.append(self._steps.pop(0))
        num_decodes = len(decodes.slots)
        counts = [len(chunk.token_ids) for chunk in chunks]
        num_rows, num_spans = num_decodes + sum(counts), num_decodes + len(chunks)
        num_logits = num_decodes + sum(chunk.num_logits for chunk in chunks)
        memory.resize(num_rows, num_spans, num_logits)
        memory.fill_decodes(tables, decodes, self._block_size)
        row, logit = num_decodes, num_decodes
        for span, (chunk, count) in enumerate(zip(chunks, counts, strict=True), num_decodes):
            memory.fill_chunk(tables, chunk, (span, row, logit), self._block_size)
            row, logit = row + count, logit + chunk.num_logits
        ends = [chunk.first_position + count for chunk, count in zip(chunks, counts, strict=True)]
        num_positions = max(ends, default=0)
        if num_decodes:
            num_positions = max(num_positions, int(decodes.positions.max()) + 1)
        width = -(-num_positions // self._block_size)
        return Batch(
            token_ids=memory.token_ids.tensor(num_rows),
            positions=memory.positions.tensor(num_rows),
            logit_rows=memory.logit_rows.tensor(num_logits),
            attention=AttentionBatch(
                memory.spans.array(num_spans, 3),
                memory.select_tables(tables, num_spans, width),
                memory.writes.tensor(num_rows),
            ),
        )


class _StepBuffers:
    """The memory of one step. `resize` comes first; every fill_… writes its own part in place."""

    def __init__(self) -> None:
        self.token_ids = SharedNumbers(np.int64)  # [num_rows], as the next two
        self.positions = SharedNumbers(np.int64)
        self.writes = SharedNumbers(np.int64)
        self.logit_rows = SharedNumbers(np.int64)  # [num_logits]
        self.slots = SharedNumbers(np.int64)  # [num_spans]
        self.tables = SharedNumbers(np.int64)  # [num_spans, width]
        self.spans = SharedNumbers(np.int32)  # [num_spans, 3]
        self._one = SharedNumbers(np.int64)  # [num_decodes], as the next: what a sum has halfway
        self._other = SharedNumbers(np.int64)
        self._rows = np.arange(0)

    def resize(self, num_rows: int, num_spans: int, num_logits: int) -> None:
        for numbers in (self.token_ids, self.positions, self.writes):
            numbers.array(num_rows)
        for numbers in (self.slots, self._one, self._other):
            numbers.array(num_spans)
        self.spans.array(num_spans, 3)
        if len(self._rows) < self.logit_rows.array(num_logits).size:
            self._rows = np.arange(2 * num_logits)

    def fill_decodes(self, tables: SlotTables, decodes: FedRows, block_size: int) -> None:
        count = len(decodes.slots)
        if not count:
            return
        spans, slots, rows = self.spans.array(count, 3), self.slots.array(count), self._rows[:count]
        spans[:, 0], spans[:, 1], spans[:, 2] = rows, 1, decodes.positions
        slots[:] = decodes.slots
        self.logit_rows.array(count)[:] = rows
        self.token_ids.array(count)[:] = decodes.token_ids
        self.positions.array(count)[:] = decodes.positions
        # Every result goes into memory that is there: `take` with mode "raise" would make a copy of it first.
        writes, blocks, other = self.writes.array(count), self._one.array(count), self._other.array(count)
        np.floor_divide(decodes.positions, block_size, out=blocks)
        np.take(tables.num_blocks, slots, out=other, mode="clip")
        np.subtract(other, blocks, out=other)
        if other.min() < 1:
            row = int(other.argmin())
            raise ValueError(
                f"position {decodes.positions[row]} is past the {blocks[row] + other[row]} blocks of its sequence"
            )
        np.multiply(slots, tables.block_ids.shape[1], out=other)
        np.add(blocks, other, out=blocks)
        np.take(tables.block_ids.reshape(-1), blocks, out=writes, mode="clip")
        np.multiply(writes, block_size, out=writes)
        np.remainder(decodes.positions, block_size, out=other)
        np.add(writes, other, out=writes)

    def fill_chunk(self, tables: SlotTables, chunk: Chunk, at: tuple[int, int, int], block_size: int) -> None:
        """`at`: the chunk's span, its first row, and the first of its logits."""
        span, first_row, first_logit = at
        count = len(chunk.token_ids)
        end, end_row, num_blocks = chunk.first_position + count, first_row + count, int(tables.num_blocks[chunk.slot])
        if not count:
            raise ValueError(f"slot {chunk.slot}: a chunk of no positions")
        if end > num_blocks * block_size:
            raise ValueError(f"position {end - 1} is past the {num_blocks} blocks of its sequence")
        self.spans.array(span + 1, 3)[span] = first_row, count, chunk.first_position
        self.slots.array(span + 1)[span] = chunk.slot
        self.token_ids.array(end_row)[first_row:] = chunk.token_ids
        positions = self.positions.array(end_row)[first_row:]
        positions[:] = np.arange(chunk.first_position, end)
        table = tables.block_ids[chunk.slot]
        self.writes.array(end_row)[first_row:] = table[positions // block_size] * block_size + positions % block_size
        self.logit_rows.array(first_logit + chunk.num_logits)[first_logit:] = np.arange(
            end_row - chunk.num_logits, end_row
        )

    def select_tables(self, tables: SlotTables, num_spans: int, width: int) -> Tensor:
        self.tables.array(num_spans, width)
        out = self.tables.tensor(num_spans, width)
        all_tables = torch.from_numpy(tables.block_ids)[:, :width]
        return torch.index_select(all_tables, 0, self.slots.tensor(num_spans), out=out)
