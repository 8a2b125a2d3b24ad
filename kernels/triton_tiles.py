"""Which rows of a step one program attends with: spans cut into tiles of rows. Pure.

A tile has rows of one sequence: as many tokens as fit, with all query heads of a KV head. A span that is one tile goes through
`attend_split`, a longer one through `attend_whole` (triton_attention.py); which of the two changes no bit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class RowTiles(NamedTuple):
    """A step's rows, cut: each array is [num_tiles, 5] int32: span, first row, number of rows, first position, first slot.

    A slot is where a row of `split` puts what its parts give; slots count from 0.
    """

    split: NDArray[np.int32]
    whole: NDArray[np.int32]
    num_slots: int
    num_positions: int  # up to the last position of `split`


def cut_rows(spans: NDArray[np.int32], rows_of_tile: int) -> RowTiles:
    """Cut spans [num_spans, 3] (RowSpans) into tiles of at most so many rows; the longest work of `whole` comes first."""
    first_rows, counts, first_positions = (column.astype(np.int32) for column in spans.T)
    numbers = np.arange(len(spans), dtype=np.int32)
    is_split = counts <= rows_of_tile
    slots = np.cumsum(counts[is_split]) - counts[is_split]
    split = np.stack([*(each[is_split] for each in (numbers, first_rows, counts, first_positions)), slots], 1)
    whole = [
        (span, first_rows[span] + begin, min(rows_of_tile, counts[span] - begin), first_positions[span] + begin, 0)
        for span in numbers[~is_split]
        for begin in range(0, counts[span], rows_of_tile)
    ]
    whole.sort(key=lambda tile: -tile[3])
    ends = first_positions[is_split] + counts[is_split]
    return RowTiles(
        np.ascontiguousarray(split, np.int32),
        np.array(whole, np.int32).reshape(-1, 5),
        int(counts[is_split].sum()),
        int(ends.max(initial=0)),
    )
