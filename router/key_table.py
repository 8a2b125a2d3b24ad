"""A hash table from 64-bit keys to small numbers, in two numpy arrays: 12 bytes per cell, whole batches at a time. Pure.

Cells come in buckets of eight. A key may lie in either of two buckets (two-choice hashing: Azar, Broder, Karlin, Upfal,
"Balanced allocations", 1994) and goes into the emptier one, so buckets fill evenly and nothing is ever searched beyond
sixteen cells; where both are full it takes the place of one of the sixteen, which goes on to its own other bucket
(cuckoo hashing: Pagh, Rodler, 2004). Taking a key out empties its cell: no tombstones.

The table grows by splitting a few buckets at a time (linear hashing: Litwin, 1980): what lies in bucket b goes to b, or
to b plus the number of buckets that the table had at the last power of two. No operation ever touches the whole table,
so no request waits for one. The arrays are reserved at their full size and take memory as they are touched, from the
front.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]  # [num_keys]
Values = npt.NDArray[np.uint32]  # [num_keys]; 0: no such key
Cells = npt.NDArray[np.int64]  # positions in the table; -1: none

BUCKET: Final = 8
BUCKET_BYTES: Final = BUCKET * (8 + 4)
_FIRST_BUCKETS: Final = 64
_LOAD: Final = 0.75  # cells in use, of those that there are: above it the table grows
_MOST_LOAD: Final = 0.85  # when it cannot grow any more
_MOST_STEPS: Final = 100  # before a key without a place is given up
_SPLIT: Final = 4096  # buckets at once: a few milliseconds
_ODD: Final = np.uint64(0x9E3779B97F4A7C15)
_HALF: Final = np.uint64(32)
_OFFSETS: Final = np.arange(BUCKET)


class KeyTable:
    """Keys with a value each. Batches of keys have no key twice."""

    def __init__(self, max_bytes: int, seed: int = 0) -> None:
        """`max_bytes`: of both arrays; 6 KiB at least are taken. `seed`: where keys lie follows from it too, so nobody can aim."""
        self._max_buckets = max(max_bytes // BUCKET_BYTES, _FIRST_BUCKETS)
        self._keys = np.zeros(self._max_buckets * BUCKET, dtype=np.uint64)
        self._values = np.zeros(self._max_buckets * BUCKET, dtype=np.uint32)
        self._seed = np.uint64(seed & (2**64 - 1))
        self._num_at_power = _FIRST_BUCKETS  # buckets at the last power of two
        self._num_split = 0  # since then
        self.num_keys = 0

    def __len__(self) -> int:
        return self.num_keys

    @property
    def num_buckets(self) -> int:
        """In use; cells are eight times as many."""
        return self._num_at_power + self._num_split

    @property
    def num_bytes(self) -> int:
        """Memory taken."""
        return self.num_buckets * BUCKET_BYTES

    def has_room(self, num_keys: int) -> bool:
        """Whether so many more keys may be put in."""
        return self.num_keys + num_keys <= self._max_buckets * BUCKET * _MOST_LOAD

    def find(self, keys: Keys) -> Cells:
        """Where each key lies, until the next put(); -1: nowhere."""
        cells = self._cells_of(keys)
        match = (self._keys[cells] == keys[:, None]) & (self._values[cells] != 0)
        found = cells[np.arange(len(keys)), match.argmax(axis=1)]
        return np.where(match.any(axis=1), found, -1)

    def values_at(self, cells: Cells) -> Values:
        """The values there; 0 for a key that is nowhere."""
        return np.where(cells >= 0, self._values[cells], np.uint32(0))

    def set_at(self, cells: Cells, value: int) -> None:
        """Give keys that are in another value; 0 takes them out."""
        self._values[cells] = value
        self.num_keys -= 0 if value else len(cells)

    def put(self, keys: Keys, value: int) -> Values:
        """Put in keys that are not there, all with this value; the values of those keys, these or older, that there is no
        place for: none but by a great accident."""
        self._grow(len(keys))
        values = np.full(len(keys), value, dtype=np.uint32)
        self.num_keys += len(keys)
        for step in range(_MOST_STEPS):
            if not len(keys):
                return values
            cells = self._cells_of(keys)
            is_free = self._values[cells] == 0  # [num_keys, 2 * BUCKET]
            num_free = is_free.reshape(-1, 2, BUCKET).sum(axis=2)
            second = BUCKET * (num_free[:, 0] < num_free[:, 1])  # the emptier of both
            rows = np.arange(len(keys))
            columns = second + is_free[rows[:, None], second[:, None] + _OFFSETS].argmax(axis=1)
            # Who finds both buckets full takes the place of one of the sixteen, another one at each step.
            columns = np.where(num_free.any(axis=1), columns, (5 * step + rows) % (2 * BUCKET))
            chosen = cells[rows, columns]
            before_keys, before_values = self._keys[chosen], self._values[chosen]
            # Of several keys that chose one cell the last one written has it; the others choose again.
            self._keys[chosen] = keys
            has_won = self._keys[chosen] == keys
            self._values[chosen[has_won]] = values[has_won]
            is_out = has_won & (before_values != 0)
            keys = np.concatenate((keys[~has_won], before_keys[is_out]))
            values = np.concatenate((values[~has_won], before_values[is_out]))
        self.num_keys -= len(keys)
        return values

    def taken_cells(self, first_bucket: int, num_buckets: int) -> Cells:
        """Cells of these buckets that hold a key."""
        first = first_bucket * BUCKET
        behind = min(first_bucket + num_buckets, self.num_buckets) * BUCKET
        return first + np.flatnonzero(self._values[first:behind])

    def keys_at(self, cells: Cells) -> Keys:
        """The keys there."""
        return self._keys[cells]

    # ---------------------------------------------------------------- inside

    def _buckets_of(self, keys: Keys) -> npt.NDArray[np.int64]:
        """Both buckets of each key, [num_keys, 2]."""
        mixed = (keys ^ self._seed) * _ODD
        mixed ^= mixed >> _HALF
        hashes = np.stack((mixed & np.uint64(0xFFFFFFFF), (mixed * _ODD) >> _HALF), axis=1).astype(np.int64)
        buckets = hashes & (2 * self._num_at_power - 1)
        return np.where(buckets >= self.num_buckets, buckets - self._num_at_power, buckets)

    def _cells_of(self, keys: Keys) -> Cells:
        """The sixteen cells in which each key may lie, [num_keys, 2 * BUCKET]."""
        return (self._buckets_of(keys)[:, :, None] * BUCKET + _OFFSETS).reshape(len(keys), 2 * BUCKET)

    def _grow(self, num_keys: int) -> None:
        wanted = min(int((self.num_keys + num_keys) / (BUCKET * _LOAD)) + 1, self._max_buckets)
        while (num_more := wanted - self.num_buckets) > 0:
            self._split(min(num_more, self._num_at_power - self._num_split, _SPLIT))

    def _split(self, num_buckets: int) -> None:
        """Split the next buckets: each key stays, or goes to the same cell of the new bucket."""
        distance = self._num_at_power
        cells = self.taken_cells(self._num_split, num_buckets)
        keys = self._keys[cells]
        old = cells // BUCKET
        of_first = self._buckets_of(keys)[:, 0] == old  # by which of its two hashes it lies here
        self._num_split += num_buckets
        buckets = self._buckets_of(keys)
        moving = np.where(of_first, buckets[:, 0], buckets[:, 1]) != old
        here = cells[moving]
        there = here + distance * BUCKET
        self._keys[there], self._values[there] = keys[moving], self._values[here]
        self._values[here] = 0
        if self._num_split == self._num_at_power:
            self._num_at_power, self._num_split = 2 * self._num_at_power, 0
