"""Bugs of the Triton kernels and of what surrounds them: attention, products, graphs of decode steps; of torch's attention, and of
what asks for KV on a CPU."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_INTERPRETED: Final = ("tests/kernels/test_triton.py::test_in_the_interpreter",)
_AGREEMENT: Final = ("tests/kernels/test_triton_agreement.py",)
_GRAPHS: Final = ("tests/kernels/test_triton_graphs.py",)

MUTANTS: Final = (
    Mutant(
        "last-part-left-out",
        "Rows of a chunk do not see the part that they are in.",
        "kernels/triton_attention.py",
        "    for part in range(seen // PART, last_position // PART + 1):\n        more_maximum, more_total, more_mixed = _attend",
        "    for part in range(seen // PART, last_position // PART):\n        more_maximum, more_total, more_mixed = _attend",
        _INTERPRETED,
    ),
    Mutant(
        "values-behind-the-end-read",
        "Keys and values are read where no row of a tile looks, in whatever block: 0 times what is not a number breaks the row.",
        "kernels/triton_attention.py",
        "    is_read = is_there[:, None] & (dims < HEAD_DIM)[None, :]\n",
        "    is_read = (columns < end + TILE)[:, None] & (dims < HEAD_DIM)[None, :]\n",
        _INTERPRETED,
    ),
    Mutant(
        "tile-taken-for-full",
        "A tile of positions that some row sees only in part is computed as if all of it were seen.",
        "kernels/triton_attention.py",
        "    full_end = tl.minimum(end, first_position + 1) // TILE * TILE\n",
        "    full_end = tl.cdiv(tl.minimum(end, first_position + 1), TILE) * TILE\n",
        _INTERPRETED,
    ),
    Mutant(
        "odd-shape-kept",
        "A shape of tiles that gives a row other bits than the others is used beside them.",
        "kernels/triton_agreement.py",
        "        if shape is shapes[-1] or ",
        "        if shape is not None or ",
        _AGREEMENT,
    ),
    Mutant(
        "few-rows-sum-otherwise",
        "A few rows are attended in tiles with which this device gives other bits than with a chunk's.",
        "kernels/triton_agreement.py",
        "        if _are_equal(alone, ",
        "        if alone or _are_equal(alone, ",
        _AGREEMENT,
    ),
    Mutant(
        "parts-merged-unscaled",
        "What a later part gives is added without regard to its own maximum.",
        "kernels/triton_attention.py",
        "total * old + more_total * new, mixed",
        "total * old + more_total, mixed",
        _INTERPRETED,
    ),
    Mutant(
        "window-one-short",
        "A row sees one position less than its window.",
        "kernels/triton_attention.py",
        "(seen > own - window)",
        "(seen > own - window + 1)",
        _INTERPRETED,
    ),
    Mutant(
        "values-over-keys",
        "The fused write puts values where keys lie.",
        "kernels/triton_rows.py",
        "tl.where(is_value, plane_stride, 0)",
        "tl.where(is_value, 0, plane_stride)",
        _INTERPRETED,
    ),
    Mutant(
        "residual-not-kept",
        "The norm takes the delta in, but the residual stream does not.",
        "kernels/triton_rows.py",
        "        tl.store(x + at, narrowed(numbers, dtype), mask=is_there)\n",
        "",
        _INTERPRETED,
    ),
    Mutant(
        "tile-by-number-of-rows",
        "A product's depth of tiles follows from the number of rows, and with it the order of its sums.",
        "kernels/triton_kernels.py",
        "        num_rows, in_features = x.shape\n",
        '        num_rows, in_features = x.shape\n        self._launch["DEPTH"] = 32 if num_rows < 8 else 64\n',
        _INTERPRETED,
    ),
    Mutant(
        "padding-repeats-the-longest",
        "A decode step is filled up with the row that costs most.",
        "kernels/triton_graphs.py",
        "positions.argmin()",
        "positions.argmax()",
        _GRAPHS,
    ),
    Mutant(
        "graph-outlives-its-kv",
        "A graph that was captured over one KV memory is used for another.",
        "kernels/triton_graphs.py",
        "next_power_of_two(num_parts), kv_address)",
        "next_power_of_two(num_parts), 0)",
        _GRAPHS,
    ),
    Mutant(
        "graph-of-a-chunk",
        "A step with a prompt's chunk is taken for one of decode rows.",
        "kernels/triton_graphs.py",
        " or (spans[:, 1] != 1).any()",
        "",
        _GRAPHS,
    ),
    Mutant(
        "places-before-the-list",
        "Few fresh chunks at a row's end, and what is asked for begins before the list of chunks: at whatever addresses lie there.",
        "kernels/cpu/stream.h",
        " || next_ < NUM_FAR + count) make_room",
        ") make_room",
        ("tests/kernels/test_stream.py",),
    ),
    Mutant(
        "heads-not-widened",
        "Heads of 18 numbers begin in the middle of 16 bytes or not, by where their row is in the batch, and torch's sums differ.",
        "kernels/torch_attention.py",
        "    lacking = -heads.shape[-1] % _ALIGNED\n",
        "    lacking = 0\n",
        ("tests/engine_torch/test_attention.py",),
    ),
    Mutant(
        "machine-code-to-be-kept",
        "A full disk, or a file that a loss of power has spoiled, ends a node on numba, and the one in its place.",
        "kernels/numba_functions.py",
        "        made._cache = _Shelf(function)",
        "        made.enable_caching()",
        ("tests/kernels/test_numba.py",),
    ),
)
