"""Which nodes hold the KV of which block: the index behind placement by cache. Pure.

A *holder* is a small number that stands for one node's cache. A key's value in the table (key_table.py) is the one
holder that has it, or, where several do, a set of holders: a set is kept once, however many keys have it, since blocks
of one prefix come and go together. So a key costs some 16 bytes, whether one node has it or a thousand, and a decision
costs one look per block of the prompt and one `and` of two sets.

Who holds a block holds those before it. `leading` does not rely on that: it counts blocks in a row from the first.

A holder that is closed is gone at once (its bit is masked); its keys are swept out a piece at a time, and only then is
its number used again.

At the bound: the index goes over to a sample of the keys, every second one, then every fourth … (by the key's own bits,
so the same for all nodes). What it says stays true, and gets coarser: a node's prefix ends at the last sampled block
that it holds. `share` says how far it came. It never goes back: whoever wants it fine again needs a larger bound, and
another process.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from router.key_table import Cells, Keys, KeyTable

MAX_HOLDERS: Final = 1 << 16
_SET_BYTES: Final = 200  # of a set beside its bits: entries in two tables and a list
_LOOK: Final = 64  # blocks looked up at once, then four times as many, and so on
_SWEEP_WHEN_FULL: Final = 1024  # buckets swept at once while somebody waits for room


class Run(NamedTuple):
    """Holders of a prompt's leading blocks, as bits."""

    num_blocks: int
    holders: int  # bit h: holder h has that many in a row, or more


class CacheIndex:
    """Keys and their holders, within a bound."""

    def __init__(self, max_bytes: int, seed: int = 0, sample: int = 1) -> None:
        """An eighth of `max_bytes` is for sets; `seed`: see KeyTable; one key of `sample`, a power of two, is taken up at most."""
        self._table = KeyTable(max_bytes - max_bytes // 8, seed)
        self._max_set_bytes = max_bytes // 8
        self._set_bytes = 0
        self._sets: list[int] = []  # bits by number
        self._uses: dict[int, int] = {}  # keys that have it, by value
        self._number_of: dict[int, int] = {}
        self._unused: list[int] = []
        self._free: list[int] = []
        self._num_opened = 0  # numbers that were ever used: 1, 2, 3 …
        self._closed = 0  # bits of holders that may still be in the table
        self._leaving = 0  # those of them that the sweep under way has been after from its beginning
        self._swept = 0  # buckets
        self._is_sweeping = False
        self._mask = sample - 1  # keys with any of these bits are left out
        self.num_dropped = 0  # keys that were not taken up, or lost holders, for want of room

    # ---------------------------------------------------------------- holders

    def open(self) -> int | None:
        """A new holder, which holds nothing; None: there are too many."""
        if self._free:
            return self._free.pop()
        if self._num_opened + 1 == MAX_HOLDERS:
            return None
        self._num_opened += 1
        return self._num_opened

    def close(self, holder: int) -> None:
        """It holds nothing any more, and its number is not used until the sweep has been everywhere."""
        self._closed |= 1 << holder
        self._begin_sweep()

    @property
    def is_sweeping(self) -> bool:
        """Whether there is something to sweep."""
        return self._is_sweeping

    def sweep(self, num_buckets: int) -> None:
        """Look through so many buckets for what does not belong there any more."""
        if not self._is_sweeping:
            return
        cells = self._table.taken_cells(self._swept, num_buckets)
        unwanted = (self._table.keys_at(cells) & np.uint64(self._mask)) != 0
        for value, of_value in self._by_value(cells[unwanted]):
            self._table.set_at(of_value, 0)
            self._use(value, -len(of_value))
        for value, of_value in self._by_value(cells[~unwanted]):  # as many as there are nodes, most as they should be
            if self._bits(value) & self._closed:
                self._set(of_value, value, self._live(value))
        self._swept += num_buckets
        if self._swept >= self._table.num_buckets:
            self._end_sweep()

    # ---------------------------------------------------------------- keys

    def store(self, holder: int, keys: Keys) -> int:
        """This holder has these keys from now on; how many of them are taken up."""
        keys = self._wanted(keys)
        while not self._table.has_room(len(keys)):
            if self._is_sweeping:
                self.sweep(_SWEEP_WHEN_FULL)
            else:
                self._mask = 2 * self._mask + 1
                self._begin_sweep()
            keys = self._wanted(keys)
        cells = self._table.find(keys)
        for value, of_value in self._by_value(cells[cells >= 0]):
            self._set(of_value, value, self._live(value) | 1 << holder)
        new = keys[cells < 0]
        self._use(holder, len(new))
        for value in self._table.put(new, holder).tolist():
            self._use(value, -1)
            self.num_dropped += 1
        return len(keys)

    def evict(self, holders: int, keys: Keys) -> None:
        """These holders, as bits, have these keys no more."""
        cells = self._table.find(self._wanted(keys))
        for value, of_value in self._by_value(cells[cells >= 0]):
            self._set(of_value, value, self._live(value) & ~holders)

    def leading(self, keys: Keys, groups: Collection[int] = ()) -> list[Run]:
        """Who holds how many of a prompt's blocks, from the first on: shorter runs first, holders of longer ones in them.

        `groups`: of open holders, as bits; what one of a group holds, all of it do.
        """
        runs: list[Run] = []
        first = next((key for key in keys.tolist() if not key & self._mask), None)
        if first is None or not self._live(self._table.value_of(first)):
            return runs  # as with most prompts that nobody has seen before
        indices = np.flatnonzero((keys & np.uint64(self._mask)) == 0)
        start, most = 0, _LOOK
        last_value, num_blocks, holders = -1, 0, -1
        while start < len(indices):
            at = indices[start : start + most]
            values = self._table.values_at(self._table.find(keys[at])).tolist()
            for index, value in zip(at.tolist(), values, strict=True):
                if value != last_value:
                    live = self._live(value)
                    for group in groups:
                        live |= group if live & group else 0
                    still = holders & live
                    if still != holders and num_blocks:
                        runs.append(Run(num_blocks, holders))
                    if not still:
                        return runs
                    last_value, holders = value, still
                num_blocks = index + 1
            start, most = start + most, 4 * most
        return [*runs, Run(num_blocks, holders)] if num_blocks else []

    # ---------------------------------------------------------------- what there is

    @property
    def share(self) -> float:
        """Of all keys, how many are taken up: 1, 1/2, 1/4 …"""
        return 1 / (self._mask + 1)

    @property
    def num_keys(self) -> int:
        """Keys in the table, those that a sweep has yet to reach included."""
        return len(self._table)

    @property
    def num_bytes(self) -> int:
        """Memory taken by table and sets, about."""
        return self._table.num_bytes + self._set_bytes

    def keys_of(self, holder: int) -> set[int]:
        """Every key of a holder; looks at the whole table."""
        cells = self._table.taken_cells(0, self._table.num_buckets)
        found: set[int] = set()
        for value, of_value in self._by_value(cells):
            if self._live(value) >> holder & 1:
                keys = self._table.keys_at(of_value)
                found.update(keys[(keys & np.uint64(self._mask)) == 0].tolist())
        return found

    # ---------------------------------------------------------------- inside

    def _wanted(self, keys: Keys) -> Keys:
        """Those that are taken up, each once; 0 is none."""
        keys = np.sort(keys if not self._mask else keys[(keys & np.uint64(self._mask)) == 0])
        is_new = np.empty(len(keys), dtype=np.bool_)
        is_new[:1] = keys[:1] != 0
        np.not_equal(keys[1:], keys[:-1], out=is_new[1:])
        return keys if is_new.all() else keys[is_new & (keys != 0)]

    def _by_value(self, cells: Cells) -> Iterator[tuple[int, Cells]]:
        """Cells by the value that they have, each value once."""
        if not len(cells):
            return
        values = self._table.values_at(cells)
        if values[0] == values[-1] and (values == values[0]).all():
            yield int(values[0]), cells
            return
        order = np.argsort(values)
        values, cells = values[order], cells[order]
        bounds = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)]
        for start, end in pairwise(bounds):
            yield int(values[start]), cells[start:end]

    def _bits(self, value: int) -> int:
        """The holders that a value stands for, closed ones included."""
        if value < MAX_HOLDERS:
            return 1 << value if value else 0
        return self._sets[value - MAX_HOLDERS]

    def _live(self, value: int) -> int:
        """The holders, as bits, that a value stands for."""
        return self._bits(value) & ~self._closed

    def _set(self, cells: Cells, value: int, bits: int) -> None:
        """Give keys that all have this value these holders instead."""
        old = self._bits(value)
        if bits == old or not len(cells):
            return
        new = self._value_of(bits)
        if new is None:
            self.num_dropped += len(cells)
            if bits & old == old:
                return  # they keep those that they had
            new = 0
        self._use(new, len(cells))
        self._table.set_at(cells, new)
        self._use(value, -len(cells))

    def _value_of(self, bits: int) -> int | None:
        """The value that stands for these holders; None: there is no room for one more set."""
        if not bits & (bits - 1):
            return max(bits.bit_length() - 1, 0)
        if (number := self._number_of.get(bits)) is None:
            num_bytes = _num_set_bytes(bits)
            if self._set_bytes + num_bytes > self._max_set_bytes:
                return None
            self._set_bytes += num_bytes
            if self._unused:
                number = self._unused.pop()
                self._sets[number] = bits
            else:
                number = len(self._sets)
                self._sets.append(bits)
            self._number_of[bits] = number
        return MAX_HOLDERS + number

    def _use(self, value: int, num_keys: int) -> None:
        """So many more keys have this value; a set that none has is forgotten."""
        if not value or not num_keys:
            return
        left = self._uses.get(value, 0) + num_keys
        if left:
            self._uses[value] = left
            return
        del self._uses[value]
        if value >= MAX_HOLDERS:
            number = value - MAX_HOLDERS
            bits, self._sets[number] = self._sets[number], 0
            del self._number_of[bits]
            self._set_bytes -= _num_set_bytes(bits)
            self._unused.append(number)

    def _begin_sweep(self) -> None:
        if not self._is_sweeping:
            self._leaving, self._swept, self._is_sweeping = self._closed, 0, True

    def _end_sweep(self) -> None:
        """Numbers that nothing has any more are free; a key that moved while the sweep was under way may have been missed."""
        missed = 0
        for value in self._uses:
            missed |= self._bits(value)
        gone = self._leaving & ~missed
        self._free += [holder for holder in range(gone.bit_length()) if gone >> holder & 1]
        self._closed &= ~gone
        self._is_sweeping = False
        if self._closed:
            self._begin_sweep()


def _num_set_bytes(bits: int) -> int:
    return _SET_BYTES + bits.bit_length() // 7
