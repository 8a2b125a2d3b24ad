"""Attention over paged KV compiled by numba: the machine code behind kernels/numba_kernels.py.

One unit of work is one row and one KV head with the query heads that share it; it reads each KV byte once, in two passes: scores
and their maximum, then the weighted values. Everything is fp32 and follows from the row alone: where its groups of PARTS positions
begin, the order of each sum, which lane of a vector a number is in. So threads may take units as they like.

KV is read as what numpy has a type for, and that type says what it is: float32 as it is, uint16 as bf16, int16 as fp16.

Compiled at the first call for each dtype (seconds), or found in CACHE_DIR, where `make setup` has had it put. What lies there
spoiled, by a loss of power, say, is compiled anew, and what a full disk does not take is compiled once more by the next process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numba
import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.core import caching
from numba.extending import intrinsic

_LOG = logging.getLogger(__name__)

CACHE_DIR: Final = Path(__file__).resolve().parent / "numba_built"
PARTS: Final = 4  # positions at once

# Where a directory cannot be written, numba has others.
numba.config.CACHE_DIR = str(CACHE_DIR)

# Of a file that is empty, full of zeros, cut short, or not for us.
_SPOILED: Final = (OSError, EOFError, ValueError, LookupError, caching.pickle.UnpicklingError)


class _Shelf(caching.FunctionCache):  # type: ignore[misc]  # numba has no types
    """Where a function's machine code is kept if that can be had: numba's own ends a step over it."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """What was kept of it; None: compile it."""
        try:
            return super().load_overload(sig, target_context)
        except _SPOILED as error:
            _LOG.warning("event=machine_code_spoiled function=%s reason=%s", self._py_func.__name__, error)
            with suppress(OSError):
                self.flush()  # or what is compiled now could not be kept either
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep what was compiled."""
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _LOG.warning("event=machine_code_not_kept function=%s reason=%s", self._py_func.__name__, error.strerror)


def compiled(**options: Any) -> Callable[[Any], Any]:
    """As numba.njit; raises RuntimeError where there is no directory to keep machine code in."""

    def make(function: Any) -> Any:
        made = njit(nogil=True, error_model="numpy", **options)(function)
        made._cache = _Shelf(function)
        return made

    return make


_I32: Final = ir.IntType(32)
_F32: Final = ir.FloatType()
# What may be reordered is fixed when it is compiled, and then the same for every row.
_REORDERED: Final = {"reassoc", "contract", "nsz"}


@intrinsic
def _wide(context: Any, number: Any) -> Any:
    """A stored number as float32."""

    def of_float(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return arguments[0]

    def of_bf16(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.shl(builder.zext(arguments[0], _I32), _I32(16)), _F32)

    def of_fp16(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        # Exponent and fraction in their places, then the difference of the biases; infinities and NaN keep their exponent.
        bits = builder.zext(arguments[0], _I32)
        magnitude = builder.shl(builder.and_(bits, _I32(0x7FFF)), _I32(13))
        scaled = builder.fmul(builder.bitcast(magnitude, _F32), _F32(2.0**112))
        is_special = builder.icmp_unsigned(">=", magnitude, _I32(0x0F800000))
        special = builder.or_(magnitude, _I32(0x7F800000))
        found = builder.select(is_special, special, builder.bitcast(scaled, _I32))
        sign = builder.shl(builder.and_(bits, _I32(0x8000)), _I32(16))
        return builder.bitcast(builder.or_(found, sign), _F32)

    makers = {types.float32: of_float, types.uint16: of_bf16, types.int16: of_fp16}
    return (types.float32(number), makers[number]) if number in makers else None


@intrinsic
def _times_power_of_two(context: Any, number: Any, shifted: Any) -> Any:
    """number * 2**n, where the low bits of `shifted`, a float32, are n: what is left of adding 1.5 * 2**23."""

    def make(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        exponent = builder.shl(builder.bitcast(arguments[1], _I32), _I32(23))
        return builder.fmul(arguments[0], builder.bitcast(builder.add(exponent, _I32(0x3F800000)), _F32))

    return types.float32(types.float32, types.float32), make


@compiled(fastmath=_REORDERED)
def _scores(queries, stored, starts, scores, at):  # type: ignore[no-untyped-def]
    """Products of [group, head_dim] with the keys that begin at `starts`, to scores[:, at : at + PARTS]."""
    s0, s1, s2, s3 = starts
    for head in range(queries.shape[0]):
        query = queries[head]
        a = b = c = d = np.float32(0)
        for i in range(
            np.uint64(query.shape[0])
        ):  # unsigned: no index counts from the end, so the loop can be a vector's
            x = query[i]
            a += x * _wide(stored[s0 + i])
            b += x * _wide(stored[s1 + i])
            c += x * _wide(stored[s2 + i])
            d += x * _wide(stored[s3 + i])
        scores[head, at], scores[head, at + 1], scores[head, at + 2], scores[head, at + 3] = a, b, c, d


@compiled(fastmath={"contract"})
def _add_values(mixed, weights, at, stored, starts):  # type: ignore[no-untyped-def]
    """Add PARTS positions' weighted values to [group, head_dim], one after the other."""
    s0, s1, s2, s3 = starts
    for head in range(mixed.shape[0]):
        row = mixed[head]
        a, b, c, d = weights[head, at], weights[head, at + 1], weights[head, at + 2], weights[head, at + 3]
        for i in range(np.uint64(row.shape[0])):
            total = row[i] + a * _wide(stored[s0 + i])
            total = total + b * _wide(stored[s1 + i])
            total = total + c * _wide(stored[s2 + i])
            row[i] = total + d * _wide(stored[s3 + i])


@compiled()
def _exponentiate(scores, count):  # type: ignore[no-untyped-def]
    """exp(score - the greatest) in place, within two units in the last place. A NaN stays one, and is not the greatest."""
    greatest = np.float32(-np.inf)
    for i in range(count):
        if scores[i] > greatest:
            greatest = scores[i]
    for i in range(np.uint64(count)):
        x = scores[i] - greatest
        x = np.float32(-87.0) if x < np.float32(-87.0) else x
        shifted = x * np.float32(1.4426950408889634) + np.float32(12582912.0)
        whole = shifted - np.float32(12582912.0)
        f = (x - whole * np.float32(0.693359375)) + whole * np.float32(2.12194440e-4)  # ln 2 in two parts
        p = np.float32(1 / 720)
        p = p * f + np.float32(1 / 120)
        p = p * f + np.float32(1 / 24)
        p = p * f + np.float32(1 / 6)
        p = p * f + np.float32(0.5)
        p = p * f + np.float32(1)
        p = p * f + np.float32(1)
        scores[i] = _times_power_of_two(p, shifted)


@compiled(fastmath=_REORDERED)
def _sum(numbers, count):  # type: ignore[no-untyped-def]
    total = np.float32(0)
    for i in range(np.uint64(count)):
        total += numbers[i]
    return total


@compiled()
def _starts(table, layout, base, position, last):  # type: ignore[no-untyped-def]
    """Where PARTS positions begin behind `base`; those past `last` stand for it, and have no weight."""
    block_size, position_size, block_numbers = layout
    p0, p1, p2, p3 = position, min(position + 1, last), min(position + 2, last), min(position + 3, last)
    return (
        np.uint64(table[p0 // block_size] * block_numbers + base + p0 % block_size * position_size),
        np.uint64(table[p1 // block_size] * block_numbers + base + p1 % block_size * position_size),
        np.uint64(table[p2 // block_size] * block_numbers + base + p2 % block_size * position_size),
        np.uint64(table[p3 // block_size] * block_numbers + base + p3 % block_size * position_size),
    )


@compiled()
def _attend_one(queries, stored, table, layout, place, scores, mixed):  # type: ignore[no-untyped-def]
    """One row's query heads of one KV head: [group, head_dim] to the same.

    place: the first and last position that the row sees, and where its head begins in a block's keys and in its values.
    """
    first, last, keys, values = place
    count = last + 1 - first
    for at in range(0, count, PARTS):
        _scores(queries, stored, _starts(table, layout, keys, first + at, last), scores, at)
    mixed[:] = np.float32(0)
    for head in range(queries.shape[0]):
        _exponentiate(scores[head], count)
        scores[head, count : count + PARTS] = np.float32(0)
    for at in range(0, count, PARTS):
        _add_values(mixed, scores, at, stored, _starts(table, layout, values, first + at, last))
    for head in range(queries.shape[0]):
        total = _sum(scores[head], count)
        for i in range(mixed.shape[1]):
            mixed[head, i] /= total


@compiled(parallel=True)
def attend(queries, kv, sizes, scores, mixed):  # type: ignore[no-untyped-def]
    """Attention of all rows, one layer.

    queries, mixed: [num_rows, num_kv_heads, group, head_dim] float32, queries scaled; kv: all of it, flat, then the block tables
    [num_spans, max_blocks] int64, then each row's span and position [num_rows, 2] int64; sizes: layer, number of layers, block
    size, how many positions a row sees at most, and numbers from a position to the next; scores: [num_threads, group, at least
    the longest row + PARTS] float32, to be used.
    """
    stored, tables, rows = kv
    layer, num_layers, block_size, window, position_size = sizes
    num_rows, num_kv_heads, _, head_dim = queries.shape
    plane_size = block_size * position_size
    layout = block_size, position_size, num_layers * 2 * plane_size
    num_threads = scores.shape[0]
    for thread in prange(num_threads):
        for unit in range(thread, num_rows * num_kv_heads, num_threads):
            row, head = unit // num_kv_heads, unit % num_kv_heads
            last = rows[row, 1]
            keys = 2 * layer * plane_size + head * head_dim
            place = max(0, last + 1 - window), last, keys, keys + plane_size
            table = tables[rows[row, 0]]
            _attend_one(queries[row, head], stored, table, layout, place, scores[thread], mixed[row, head])
