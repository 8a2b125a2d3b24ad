"""Which rows of a step one program attends with: spans cut into tiles of rows. Pure.

A tile has rows of one sequence: as many tokens as fit, with all query heads of a KV head. A short span goes through
`attend_split`, in small tiles, a longer one through `attend_whole` (triton_attention.py); which of the two changes no bit.
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


def cut_rows(spans: NDArray[np.int32], split_rows: int, whole_rows: int) -> RowTiles:
    """Cut spans [num_spans, 3] (RowSpans): those of at most whole_rows into tiles of split_rows, longer ones into whole_rows.

    The longest work of `whole` comes first.
    """
    counts = spans[:, 1]
    split, whole = (
        _cut(spans, chosen, rows)
        for chosen, rows in ((counts <= whole_rows, split_rows), (counts > whole_rows, whole_rows))
    )
    slots = np.cumsum(split[:, 2]) - split[:, 2]
    whole = whole[np.argsort(-whole[:, 3], kind="stable")]
    return RowTiles(
        np.ascontiguousarray(np.column_stack([split, slots]), np.int32),
        np.ascontiguousarray(np.column_stack([whole, np.zeros(len(whole))]), np.int32),
        int(split[:, 2].sum()),
        int((split[:, 3] + split[:, 2]).max(initial=0)),
    )


def _cut(spans: NDArray[np.int32], is_chosen: NDArray[np.bool_], rows: int) -> NDArray[np.int64]:
    """The chosen spans in tiles of so many rows, [num_tiles, 4]: as RowTiles', but for the slot."""
    first_rows, counts, first_positions = (column[is_chosen].astype(np.int64) for column in spans.T)
    num_tiles = -(-counts // rows)
    of_span = np.repeat(np.arange(len(counts)), num_tiles)
    begins = (np.arange(len(of_span)) - (np.cumsum(num_tiles) - num_tiles)[of_span]) * rows
    taken = np.minimum(rows, counts[of_span] - begins)
    numbers = np.flatnonzero(is_chosen)[of_span]
    return np.column_stack([numbers, first_rows[of_span] + begins, taken, first_positions[of_span] + begins])
