"""How the Triton kernels are launched: what Triton looks up at every launch is looked up once.

A launch by `kernel[grid](...)` binds, inspects and hashes all arguments and reads a dozen settings: 90 us of a host's time on the
machine that this was measured on, for a kernel of 5 us. A kernel that `warmup` has compiled is launched without (triton-lang.org,
"Fused Softmax"), and then it is on the caller to see that the machine code fits: `_kind` says of each argument what Triton
specializes for.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any, Final

import triton
from torch import Tensor

from kernels.triton_rows import rms_norm
from kernels.triton_tuning import next_power_of_two

# Whether a * b + c is one rounding would be the compiler's choice, and might be another one in each of two kernels.
EXACT: Final = {"enable_fp_fusion": False}
LANES: Final = 64  # heads that one program rotates
_ALIGNMENT: Final = 16  # bytes: Triton compiles a kernel of its own for pointers that have less
_TILE_NUMBERS: Final = 2048  # of a norm's tile, where rows are shorter than that
_MAX_TILE_ROWS: Final = 16


class Launcher:
    """One kernel with its constants (by the names of its parameters, which come last) and its compiler's options."""

    def __init__(self, kernel: Any, **constants_and_options: Any) -> None:
        self._kernel, self._named = kernel, constants_and_options | EXACT
        self._compiled: dict[Hashable, Any] = {}
        if triton.knobs.runtime.interpret:
            return
        parameters = kernel.params
        self._constants = tuple(self._named[each.name] for each in parameters if each.is_constexpr)
        # Of each argument whether Triton looks at its value.
        self._is_special = tuple(not each.do_not_specialize for each in parameters if not each.is_constexpr)

    def __call__(self, grid: tuple[int, ...], *arguments: Any) -> None:
        """Launch it for all programs of the grid; arguments in the order of the parameters."""
        if triton.knobs.runtime.interpret:
            self._kernel[grid](*arguments, **self._named)
            return
        kinds = tuple(map(_kind, arguments, self._is_special))
        compiled = self._compiled.get(kinds)
        if compiled is None:
            compiled = self._compiled[kinds] = self._kernel.warmup(*arguments, grid=grid, **self._named)
        compiled[(*grid, 1, 1)[:3]](*arguments, *self._constants)


def _kind(argument: object, is_special: bool) -> Hashable:
    """What machine code for this argument depends on; a descriptor's tile is among the kernel's constants."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % _ALIGNMENT == 0
    if isinstance(argument, int):
        is_wide = not -(1 << 31) <= argument < 1 << 31
        return (argument == 1, argument % _ALIGNMENT == 0, is_wide) if is_special else is_wide
    return None


@cache
def launcher(kernel: Any, **constants_and_options: Any) -> Launcher:
    """The one with these; for callers who do not keep it."""
    return Launcher(kernel, **constants_and_options)


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
        sizes = {"WIDTH": width, "COLUMNS": columns, "ROWS": rows, "HAS_DELTA": delta is not None}
        norm = launcher(rms_norm, **sizes, num_warps=4 if columns <= _TILE_NUMBERS else 8)
        norm((-(-num_rows // rows),), x, x if delta is None else delta, weight, out, num_rows, eps)
