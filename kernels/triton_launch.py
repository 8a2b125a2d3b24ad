"""How the Triton kernels are launched: what Triton looks up at every launch is looked up once.

A launch by `kernel[grid](...)` binds, inspects and hashes all arguments and reads a dozen settings: 90 us of a host's time on the
machine that this was measured on, for a kernel of 5 us. A kernel that `warmup` has compiled is launched without (triton-lang.org,
"Fused Softmax"), and then it is on the caller to see that the machine code fits: Triton specializes for tensors at addresses that
are multiples of 16, for their dtypes, and for numbers that are 1 or multiples of 16.
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
_IS_INTERPRETED: Final = bool(triton.knobs.runtime.interpret)  # each look at a setting takes microseconds
_ALIGNMENT: Final = 16  # bytes: Triton compiles a kernel of its own for pointers that have less
_TILE_NUMBERS: Final = 2048  # of a norm's tile, where rows are shorter than that
_MAX_TILE_ROWS: Final = 16


class Launcher:
    """One kernel with its constants (by the names of its parameters, which come last) and its compiler's options."""

    def __init__(self, kernel: Any, **constants_and_options: Any) -> None:
        self._kernel, self._named = kernel, constants_and_options | EXACT
        self._compiled: dict[Hashable, Any] = {}
        if _IS_INTERPRETED:
            return
        self._constants = tuple(self._named[each.name] for each in kernel.params if each.is_constexpr)
        # Which arguments are tensors, and which numbers whose values machine code may depend on: known at the first launch.
        self._tensors: tuple[int, ...] = ()
        self._numbers: tuple[int, ...] = ()

    def __call__(self, grid: tuple[int, ...], *arguments: Any) -> None:
        """Launch it for all programs of the grid; arguments in the order of the parameters, of the same types each time.

        The dtype of the first tensor says which the others have.
        """
        if _IS_INTERPRETED:
            self._kernel[grid](*arguments, **self._named)
            return
        if not self._tensors:
            self._look_at(arguments)
        addresses = 0
        for at in self._tensors:
            addresses |= arguments[at].data_ptr()
        key = (addresses % _ALIGNMENT, arguments[self._tensors[0]].dtype, *[arguments[at] for at in self._numbers])
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._kernel.warmup(*arguments, grid=grid, **self._named)
            if not key[0]:  # else it is not known which ones are aligned: Triton is asked each time
                self._compiled[key] = compiled
        compiled[(*grid, 1, 1)[:3]](*arguments, *self._constants)

    def _look_at(self, arguments: tuple[Any, ...]) -> None:
        is_fixed = [each.do_not_specialize for each in self._kernel.params]
        self._tensors = tuple(at for at, each in enumerate(arguments) if isinstance(each, Tensor))
        self._numbers = tuple(at for at, each in enumerate(arguments) if isinstance(each, int) and not is_fixed[at])


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
    if num_rows:
        rows, norm = _norm_of(width, delta is not None)
        norm((-(-num_rows // rows),), x, x if delta is None else delta, weight, out, num_rows, eps)


@cache
def _norm_of(width: int, has_delta: bool) -> tuple[int, Launcher]:
    """How many rows a program takes, and the kernel."""
    columns = next_power_of_two(width)
    rows = max(1, min(_MAX_TILE_ROWS, _TILE_NUMBERS // columns))
    warps = 4 if columns <= _TILE_NUMBERS else 8
    sizes = {"WIDTH": width, "COLUMNS": columns, "ROWS": rows, "HAS_DELTA": has_delta}
    return rows, Launcher(rms_norm, **sizes, num_warps=warps)


def forget_launchers() -> None:
    """For tests that replace what a launcher remembers."""
    launcher.cache_clear()
    _norm_of.cache_clear()
