"""How a step's rows are cut: each is in exactly one tile, with its own position, and no two share a slot."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.triton_tiles import cut_rows

pytestmark = pytest.mark.covers("M05")


@given(
    runs=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 500)), min_size=1, max_size=12),
    rows_of_tiles=st.tuples(st.integers(1, 16), st.integers(1, 16)),
)
def test_every_row_is_in_one_tile_with_its_own_position(
    runs: list[tuple[int, int]], rows_of_tiles: tuple[int, int]
) -> None:
    split_rows, whole_rows = rows_of_tiles
    spans: list[tuple[int, int, int]] = []
    owners: list[tuple[int, int]] = []
    for index, (count, first_position) in enumerate(runs):
        spans.append((len(owners), count, first_position))
        owners += [(index, first_position + row) for row in range(count)]
    tiles = cut_rows(np.array(spans, np.int32), split_rows, whole_rows)
    assert tiles.split.dtype == tiles.whole.dtype == np.int32
    seen: dict[int, tuple[int, int]] = {}
    slots: list[int] = []
    sizes = [split_rows] * len(tiles.split) + [whole_rows] * len(tiles.whole)
    for size, tile in zip(sizes, (*tiles.split.tolist(), *tiles.whole.tolist()), strict=True):
        span, first_row, num_rows, first_position, _ = tile
        assert 1 <= num_rows <= size
        for row in range(num_rows):
            assert first_row + row not in seen
            seen[first_row + row] = (span, first_position + row)
    assert [seen[row] for row in range(len(owners))] == owners
    for _, _, num_rows, _, first_slot in tiles.split.tolist():
        slots += range(first_slot, first_slot + num_rows)
    assert sorted(slots) == list(range(tiles.num_slots))
    ends = [first + count for count, first in runs if count <= whole_rows]
    assert tiles.num_positions == max(ends, default=0)
    assert set(tiles.split[:, 0].tolist()) == {i for i, (count, _) in enumerate(runs) if count <= whole_rows}
    firsts = tiles.whole[:, 3].tolist()
    assert firsts == sorted(firsts, reverse=True)  # the longest work first
