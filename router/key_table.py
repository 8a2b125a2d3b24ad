"""A hash table from 64-bit keys to small numbers, in two numpy arrays: 12 bytes per cell, whole batches at a time. Pure.

Cells come in buckets of eight. A key may lie in either of two buckets (two-choice hashing: Azar, Broder, Karlin, Upfal,
"Balanced allocations", 1994) and goes into the emptier one, so buckets fill evenly and nothing is ever searched beyond
sixteen cells; where both are full it takes the place of one of the sixteen, which goes on to its own other bucket
(cuckoo hashing: Pagh, Rodler, 2004). Taking a key out empties its cell: no tombstones.

The table grows by splitting a few buckets at a time (linear hashing: Litwin, 1980): what lies in bucket b goes to b, or
to b plus the number of buckets that the table had when it had last doubled. No operation ever touches the whole table,
so no request waits for one. The arrays are reserved at their full size and take memory as they are touched, from the
front.

A batch goes through numpy as rows of eight keys: a bucket's comparison is eight bytes, read as one number whose bits say
which cell it was. So a batch of a message's size costs some tens of nanoseconds a key, and what is left of the cost is the
memory's: two cache lines a key, wherever they lie.
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
_FIRST_BUCKETS: Final = 32  # or more: less than twice as many
_LOAD: Final = 0.65  # cells in use, of those that there are: above it the table grows
_MOST_LOAD: Final = 0.75  # when it cannot grow any more
_MOST_STEPS: Final = 100  # before a key without a place is given up
_SPLIT: Final = 4096  # buckets at once: a few milliseconds
_ODD: Final = np.uint64(0x9E3779B97F4A7C15)
_HALF: Final = np.uint64(32)
_TOP: Final = np.uint64(48)
_BELOW_TOP: Final = np.uint64(16)
_ONE: Final = np.uint64(1)
_ALL: Final = 2**64 - 1
_BYTE: Final = np.uint8(3)  # bits to shift by: eight in a byte

_Marks = npt.NDArray[np.uint64]  # [num_buckets]; byte i is 1 for a cell i that is meant, 0 for others


class KeyTable:
    """Keys with a value each. Batches of keys have no key twice, and no key is 0."""

    def __init__(self, max_bytes: int, seed: int = 0) -> None:
        """`max_bytes`: of both arrays; 6 KiB at least are taken. `seed`: where keys lie follows from it too, so nobody can aim."""
        most = max(max_bytes // BUCKET_BYTES, 2 * _FIRST_BUCKETS)
        doublings = most.bit_length() - _FIRST_BUCKETS.bit_length()
        # At its full size the table has been doubled so often, and its buckets are equal again: then they can be filled most.
        self._num_first = most >> doublings
        self._max_buckets = self._num_first << doublings
        self._rows = np.zeros((self._max_buckets, BUCKET), dtype=np.uint64)
        self._keys = self._rows.reshape(-1)  # of cells; 0: it is empty
        self._values = np.zeros(self._max_buckets * BUCKET, dtype=np.uint32)
        self._seed = np.uint64(seed & (2**64 - 1))
        self._num_doubled = self._num_first  # buckets when it had last doubled
        self._num_split = 0  # since then
        self.num_keys = 0

    def __len__(self) -> int:
        return self.num_keys

    @property
    def num_buckets(self) -> int:
        """In use; cells are eight times as many."""
        return self._num_doubled + self._num_split

    @property
    def num_bytes(self) -> int:
        """Memory taken."""
        return self.num_buckets * BUCKET_BYTES

    def has_room(self, num_keys: int) -> bool:
        """Whether so many more keys may be put in."""
        return self.num_keys + num_keys <= self._max_buckets * BUCKET * _MOST_LOAD

    def find(self, keys: Keys) -> Cells:
        """Where each key lies, until the next put(); -1: nowhere."""
        first, second = self._buckets_of(keys)
        cells = self._cells_in(first, keys)
        left = np.flatnonzero(cells < 0)
        cells[left] = self._cells_in(second[left], keys[left])
        return cells

    def value_of(self, key: int) -> int:
        """The value of one key, sooner than `find` has it; 0: it is nowhere."""
        first = ((key ^ int(self._seed)) * int(_ODD)) & _ALL
        first ^= first >> int(_HALF)
        second = (first * int(_ODD)) & _ALL
        second ^= second >> int(_HALF)
        for hashed in (first, second):
            bucket = (hashed & (2 * self._num_doubled // self._num_first - 1)) * self._num_first
            bucket += (hashed >> int(_TOP)) * self._num_first >> int(_BELOW_TOP)
            bucket -= self._num_doubled if bucket >= self.num_buckets else 0
            row = self._rows[bucket].tolist()
            if key in row:
                return int(self._values[bucket * BUCKET + row.index(key)])
        return 0

    def values_at(self, cells: Cells) -> Values:
        """The values there; 0 for a key that is nowhere."""
        return np.where(cells >= 0, self._values.take(cells), np.uint32(0))

    def set_at(self, cells: Cells, value: int) -> None:
        """Give keys that are in another value; 0 takes them out."""
        self._values[cells] = value
        if not value:
            self._keys[cells] = 0
            self.num_keys -= len(cells)

    def put(self, keys: Keys, value: int) -> Values:
        """Put in keys that are not there, all with this value; the values of those keys, these or older, that there is no
        place for: none but by a great accident."""
        self._grow(len(keys))
        values = np.full(len(keys), value, dtype=np.uint32)
        self.num_keys += len(keys)
        for step in range(_MOST_STEPS):
            if not len(keys):
                return values
            chosen = self._places_for(keys, step)
            before_keys, before_values = self._keys.take(chosen), self._values.take(chosen)
            # Of several keys that chose one cell the last one written has it; the others choose again.
            self._keys[chosen] = keys
            has_won = self._keys.take(chosen) == keys
            if has_won.all():
                self._values[chosen] = values
            else:
                self._values[chosen[has_won]] = values[has_won]
            is_out = has_won & (before_keys != 0)
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

    def _hashes_of(self, keys: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Both."""
        first = (keys ^ self._seed) * _ODD
        first ^= first >> _HALF
        second = first * _ODD
        second ^= second >> _HALF
        return first, second

    def _buckets_of(self, keys: Keys) -> tuple[Cells, Cells]:
        """Both buckets of each key."""
        first, second = (self._bucket(hashes) for hashes in self._hashes_of(keys))
        return first, second

    def _bucket(self, hashes: npt.NDArray[np.uint64]) -> Cells:
        """Its bucket, by each hash: the top bits choose one of the first buckets, the low ones which of those split from it."""
        buckets = self._bucket_of_many(hashes, 2 * self._num_doubled)
        buckets -= self._num_doubled * (buckets >= self.num_buckets)
        return buckets

    def _bucket_of_many(self, hashes: npt.NDArray[np.uint64], number: int) -> Cells:
        """The same in a table of so many, doubled and not split."""
        buckets = hashes & np.uint64(number // self._num_first - 1)
        buckets *= np.uint64(self._num_first)
        buckets += (hashes >> _TOP) * np.uint64(self._num_first) >> _BELOW_TOP
        return buckets.view(np.int64)

    def _marked(self, buckets: Cells, keys: Keys | int) -> _Marks:
        """The cells of each bucket that hold its key, or all of them this one."""
        wanted = keys[:, None] if isinstance(keys, np.ndarray) else np.uint64(keys)
        marks: _Marks = (self._rows.take(buckets, axis=0) == wanted).view(np.uint64).reshape(-1)
        return marks

    def _cells_in(self, buckets: Cells, keys: Keys) -> Cells:
        """The cell of each key in its bucket; -1: it is not there."""
        marks = self._marked(buckets, keys)
        return np.where(marks != 0, buckets * BUCKET + _lowest(marks), -1)

    def _places_for(self, keys: Keys, step: int) -> Cells:
        """A cell for each key: free, in the emptier of its two buckets."""
        first, second = self._buckets_of(keys)
        free_first, free_second = self._marked(first, 0), self._marked(second, 0)
        is_second = np.bitwise_count(free_second) > np.bitwise_count(free_first)
        free = np.where(is_second, free_second, free_first)
        cells = np.where(is_second, second, first) * BUCKET + _lowest(free)
        if len(full := np.flatnonzero(free == 0)):
            # Who finds both buckets full takes the place of one of the sixteen, another one at each step.
            place = (5 * step + full) % (2 * BUCKET)
            cells[full] = np.where(place < BUCKET, first[full], second[full] - 1) * BUCKET + place
        return cells

    def _grow(self, num_keys: int) -> None:
        wanted = min(int((self.num_keys + num_keys) / (BUCKET * _LOAD)) + 1, self._max_buckets)
        while (num_more := wanted - self.num_buckets) > 0:
            self._split(min(num_more, self._num_doubled - self._num_split, _SPLIT))

    def _split(self, num_buckets: int) -> None:
        """Split the next buckets: each key stays, or goes to the same cell of the new bucket."""
        distance, here = self._num_doubled, slice(self._num_split, self._num_split + num_buckets)
        there = slice(here.start + distance, here.stop + distance)
        rows, values = self._rows[here], self._values.reshape(-1, BUCKET)
        first, second = self._hashes_of(rows.reshape(-1))
        buckets = np.repeat(np.arange(here.start, here.stop), BUCKET)
        of_first = self._bucket_of_many(first, distance) == buckets  # by which of its two hashes it lies here
        is_moving = self._bucket_of_many(np.where(of_first, first, second), 2 * distance) != buckets
        is_moving = is_moving.reshape(-1, BUCKET)
        self._rows[there] = rows * is_moving
        values[there] = values[here] * is_moving
        self._rows[here] *= ~is_moving
        values[here] *= ~is_moving
        self._num_split += num_buckets
        if self._num_split == self._num_doubled:
            self._num_doubled, self._num_split = 2 * self._num_doubled, 0


def _lowest(marks: _Marks) -> Cells:
    """The first cell that each marks, of 0 to 7; 8: none."""
    return (np.bitwise_count((marks & (~marks + _ONE)) - _ONE) >> _BYTE).astype(np.int64)
