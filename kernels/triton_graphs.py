"""Decode steps as CUDA graphs: captured once per padded size, then a step is a few copies and one launch instead of hundreds.

A graph repeats the launches that it saw, over the same memory. So a step's inputs are copied to where the graph reads them, and
the step is padded to the sizes that there are graphs for: rows by repeating one of its own, which writes the same numbers to the
same places once more and costs least where that row sees the fewest positions; parts of attention by more programs that find
nothing to do. Neither changes a bit of the rows that were asked for: that is the law of interface.py.

What decides (graph_key, padding) is pure. Each key is captured once, and there are few: a node captures them all before it is ready
(graph_steps), since a capture waits for the device and for its memory's books. Not here: prompts' chunks, which differ in size from
step to step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.interface import AttentionBatch, DecodeStep
from kernels.triton_tuning import next_power_of_two
from kernels.upload import packed_bytes, unpacked, upload_into

MAX_ROWS: Final = 256  # more rows keep the device busy for longer than the launches take


class GraphKey(NamedTuple):
    """What a captured step cannot change."""

    num_rows: int  # padded
    num_parts: int  # padded: parts of attention that the longest row may have
    kv_address: int


class Padding(NamedTuple):
    """How a step of some rows becomes one of a graph's size."""

    chosen: NDArray[np.int64]  # [padded rows]: which row of the step each one is
    tiles: NDArray[np.int32]  # [padded rows, 5], see triton_tiles.RowTiles


def padded_rows(num_rows: int) -> int:
    """The least size that there are graphs for: 1, 2, 4, 8, then steps of an eighth of the power of two below, at least 8."""
    if num_rows <= 8:
        return next_power_of_two(num_rows)
    step = max(8, next_power_of_two(num_rows) // 16)
    return -(-num_rows // step) * step


def graph_key(spans: NDArray[np.int32], part: int, kv_address: int) -> GraphKey | None:
    """Which graph serves a step with these spans [num_spans, 3] (RowSpans); None: it is no step of decode rows, or too large."""
    if not 0 < len(spans) <= MAX_ROWS or (spans[:, 1] != 1).any():
        return None
    num_parts = -(-(int(spans[:, 2].max()) + 1) // part)
    return GraphKey(padded_rows(len(spans)), next_power_of_two(num_parts), kv_address)


def pad(spans: NDArray[np.int32], num_rows: int) -> Padding:
    """Fill a step of decode rows up with copies of the one that sees the fewest positions."""
    positions = spans[:, 2]
    chosen = np.arange(num_rows)
    chosen[len(spans) :] = positions.argmin()
    tiles = np.empty((num_rows, 5), np.int32)
    tiles[:, 0] = tiles[:, 1] = tiles[:, 4] = np.arange(num_rows)
    tiles[:, 2], tiles[:, 3] = 1, positions[chosen]
    return Padding(chosen, tiles)


def graph_steps(max_rows: int, max_positions: int, part: int) -> list[DecodeStep]:
    """One step for each key that steps of so many rows and positions may have, that of the most memory first.

    Graphs share one pool of memory, and what a larger one left there is room for the smaller ones behind it.
    """
    sizes: dict[int, int] = {}  # the least number of rows for each size
    for num_rows in range(1, min(max_rows, MAX_ROWS) + 1):
        sizes.setdefault(padded_rows(num_rows), num_rows)
    parts = [1 << each for each in range(next_power_of_two(-(-max_positions // part)).bit_length())]
    keys = [(size, num_parts) for size in sizes for num_parts in parts]
    keys.sort(key=lambda key: (key[0] * key[1], key), reverse=True)
    return [DecodeStep(sizes[size], min(num_parts * part, max_positions) - 1) for size, num_parts in keys]


class DecodeInputs(NamedTuple):
    """What a graph reads; always the same memory. hidden is also what it writes."""

    hidden: Tensor  # [padded rows, hidden_size]
    cos: Tensor  # [padded rows, head_dim / 2] fp32, as sin
    sin: Tensor
    tiles: Tensor  # [padded rows, 5] int32
    tables: Tensor  # [padded rows, max_blocks] int32
    write_positions: Tensor  # [padded rows] int64
    num_parts: int


class _Place(NamedTuple):
    """Where one graph's steps go."""

    inputs: DecodeInputs
    chosen: Tensor  # [padded rows] int64: see Padding
    packed: Tensor  # uint8: what of both comes from the host, which brings it in one copy


class Capture(Protocol):
    """Records what `compute` launches; what it returns launches the same again."""

    def __call__(self, compute: Callable[[], object]) -> Callable[[], object]:
        """Called once for each graph, when `compute` has run before."""


class DecodeGraphs:
    """Runs decode steps by graphs of `decode`, a function of inputs and KV that leaves its result in inputs.hidden."""

    def __init__(self, decode: Callable[[DecodeInputs, Tensor], Tensor], capture: Capture) -> None:
        self._decode, self._capture = decode, capture
        self._graphs: dict[GraphKey, tuple[_Place, Callable[[], object]]] = {}

    def run(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, batch: AttentionBatch, part: int
    ) -> Tensor | None:
        """The rows' results, good until the next step; None: not a step for a graph."""
        key = graph_key(batch.spans, part, kv.data_ptr())
        if key is None:
            return None
        found = self._graphs.get(key)
        place = _new_place(key, hidden, cos, -(-key.num_parts * part // kv.shape[3])) if found is None else found[0]
        _fill(place, hidden, cos, sin, batch)
        inputs = place.inputs
        if found is None:
            # First as it is: kernels are compiled and loaded by that, which a capture may not do. A capture computes nothing.
            self._decode(inputs, kv)
            self._graphs[key] = place, self._capture(lambda: self._decode(inputs, kv))
        else:
            found[1]()
        return inputs.hidden[: len(hidden)]


def _new_place(key: GraphKey, hidden: Tensor, cos: Tensor, max_blocks: int) -> _Place:
    num_rows, num_angles = key.num_rows, cos.shape[1]
    tiles, tables = (torch.empty((num_rows, width), dtype=torch.int32) for width in (5, max_blocks))
    known = [torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows, dtype=torch.int64), tiles, tables]
    packed = torch.zeros(packed_bytes(known), dtype=torch.uint8, device=hidden.device)
    chosen, write_positions, tiles, tables = unpacked(packed, known)
    angles = cos.new_zeros((2, num_rows, num_angles))
    mine = hidden.new_zeros((num_rows, hidden.shape[1]))
    return _Place(
        DecodeInputs(mine, angles[0], angles[1], tiles, tables, write_positions, key.num_parts), chosen, packed
    )


def _fill(place: _Place, hidden: Tensor, cos: Tensor, sin: Tensor, batch: AttentionBatch) -> None:
    """Bring a step to where its graph reads it."""
    inputs = place.inputs
    chosen, tiles = pad(batch.spans, len(inputs.tiles))
    # A graph's tables end where its parts do; a step's may end earlier, and further columns are never looked at.
    tables = np.empty(inputs.tables.shape, np.int32)
    width = min(batch.block_tables.shape[1], tables.shape[1])
    tables[:, :width] = batch.block_tables.numpy()[chosen, :width]
    known = (chosen, batch.write_positions.numpy()[chosen], tiles, tables)
    upload_into(place.packed, [torch.from_numpy(each) for each in known])
    for to, rows in ((inputs.hidden, hidden), (inputs.cos, cos), (inputs.sin, sin)):
        torch.index_select(rows, 0, place.chosen, out=to)


class CudaCapture:
    """Captures with torch."""

    def __init__(self) -> None:
        self._last: torch.cuda.CUDAGraph | None = None

    def __call__(self, compute: Callable[[], object]) -> Callable[[], object]:
        """See Capture. Other threads may ask whether the device has come so far meanwhile."""
        graph = torch.cuda.CUDAGraph()
        # One pool for all: what a step leaves there nobody reads behind it.
        pool = None if self._last is None else self._last.pool()
        with _uncollected(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            compute()
        self._last = graph
        return graph.replay


@contextmanager
def _uncollected() -> Iterator[None]:
    """Nothing is collected meanwhile: to free another graph, or what it had, ends a capture (seen on an H200)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
