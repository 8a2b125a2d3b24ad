"""How the Triton kernels are launched, where several places launch them alike."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from kernels.triton_rows import rms_norm
from kernels.triton_tuning import next_power_of_two

# Whether a * b + c is one rounding would be the compiler's choice, and might be another one in each of two kernels.
EXACT: Final = {"enable_fp_fusion": False}
LANES: Final = 64  # heads that one program rotates
_ALIGNMENT: Final = 16  # bytes: Triton compiles a kernel of its own for pointers that have less
_TILE_NUMBERS: Final = 2048  # of a norm's tile, where rows are shorter than that
_MAX_TILE_ROWS: Final = 16


def aligned(x: Tensor) -> Tensor:
    """The same numbers, contiguous, at an address from which every launch runs the same machine code."""
    x = x.contiguous()
    return x if x.data_ptr() % _ALIGNMENT == 0 else x.clone()


def launch_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
    """Norm x [num_rows, width], contiguous, into out; where there is a delta of x's shape x takes it in first, in place."""
    num_rows, width = x.shape
    columns = next_power_of_two(width)
    rows = max(1, min(_MAX_TILE_ROWS, _TILE_NUMBERS // columns))
    if num_rows:
        grid = (-(-num_rows // rows),)
        sizes = {"WIDTH": width, "COLUMNS": columns, "ROWS": rows, "HAS_DELTA": delta is not None}
        warps = 4 if columns <= _TILE_NUMBERS else 8
        before = x if delta is None else delta
        rms_norm[grid](x, before, weight, out, num_rows, eps, **sizes, num_warps=warps, **EXACT)
