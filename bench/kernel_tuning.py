"""Finds tile shapes for kernels/triton_table.json: tries candidates, keeps the fastest. Pure: the times are given.

What is tuned is one shape for decode and for chunks alike: a shape for each would be two orders of summation, and a token's bits
would depend on how it was computed (kernels/triton_attention.py). A candidate counts by the product of its times over all cases.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Final, TypeVar

from kernels.triton_tuning import AttentionTuning, LinearTuning

HEAD_DIMS: Final = (64, 128, 256)
# Of an sm_90. What a shape needs is estimated by its tiles alone: one that needs more than there is does not run.
_MAX_SHARED_BYTES: Final = 227 << 10
Tuning = TypeVar("Tuning", AttentionTuning, LinearTuning)
Measure = Callable[[Tuning], Sequence[float]]  # seconds of each case; none: it does not run on this device


def attention_candidates(head_dim: int, itemsize: int) -> Iterator[AttentionTuning]:
    """Shapes that are worth a try, for numbers of so many bytes."""
    for rows, tile, part, warps, stages in product(
        (16, 32, 64, 128), (32, 64, 128), (256, 512, 1024), (4, 8), (1, 2, 3)
    ):
        shared_bytes = (rows + 2 * tile * stages) * head_dim * itemsize
        if shared_bytes <= _MAX_SHARED_BYTES and rows * tile <= _most_products(itemsize):
            yield AttentionTuning(rows, tile, part, warps, stages)


def linear_candidates(itemsize: int) -> Iterator[LinearTuning]:
    """Shapes that are worth a try, for numbers of so many bytes."""
    for rows, columns, depth, warps, stages in product((16, 32, 64, 128), (32, 64, 128), (32, 64, 128), (4, 8), (3, 4)):
        shared_bytes = (rows + columns) * depth * stages * itemsize
        if shared_bytes <= _MAX_SHARED_BYTES and rows * columns <= _most_products(itemsize):
            yield LinearTuning(rows, columns, depth, warps, stages)


def _most_products(itemsize: int) -> int:
    """Of one tile by another. Those of fp32 are unrolled, and a large tile's compile for minutes."""
    return 1024 if itemsize == 4 else 128 * 128


def fastest(candidates: Iterator[Tuning], measure: Measure[Tuning]) -> Tuning:
    """The one with the least product of times. Raises ValueError where none runs."""
    best: Tuning | None = None
    best_score = math.inf
    for candidate in candidates:
        times = measure(candidate)
        score = sum(map(math.log, times)) if times else math.inf
        if score < best_score:
            best, best_score = candidate, score
    if best is None:
        raise ValueError("no tile shape runs on this device")
    return best


def with_measured(
    table: Mapping[str, Any],
    device: str,
    attention: Mapping[tuple[str, int], AttentionTuning],
    linear: Mapping[str, LinearTuning],
) -> dict[str, Any]:
    """The file's content with a device's entries replaced: by (dtype, greatest head_dim), and by dtype."""
    changed: dict[str, Any] = copy.deepcopy(dict(table))
    changed["devices"][device] = {
        "measured": True,
        "attention": [
            {"dtypes": [dtype], "max_head_dim": head_dim, **tuning._asdict()}
            for (dtype, head_dim), tuning in sorted(attention.items())
        ],
        "linear": [{"dtypes": [dtype], **tuning._asdict()} for dtype, tuning in sorted(linear.items())],
    }
    return changed
