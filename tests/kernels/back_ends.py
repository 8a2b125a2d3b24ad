"""Every back end that this machine can run: the reference, each compiled variant whose instructions the CPU has, numba's, Triton's.

Triton's is there where torch sees a CUDA device, and in processes that interpret it: test_triton.py starts one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import torch

from kernels.choice import choose_kernels, has_numba
from kernels.cpu_build import bits_name, build, usable_variants
from kernels.cpu_kernels import CpuKernels
from kernels.cpu_library import Library
from kernels.interface import Kernels
from kernels.torch_reference import TorchKernels
from tests.kernels.on_device import OnDevice
from tests.thorough import IS_THOROUGH, examples

Case = TypeVar("Case")

REFERENCE: Final = TorchKernels()
_LIBRARIES: Final = tuple((Library(build(variant)), bits_name(variant)) for variant in usable_variants())
COMPILED: Final[tuple[CpuKernels, ...]] = tuple(CpuKernels(*library) for library in _LIBRARIES)
NUMBA: Final[tuple[Kernels, ...]] = (choose_kernels("numba").kernels,) if has_numba() else ()
IS_INTERPRETED: Final = os.environ.get("TRITON_INTERPRET") == "1"


def _replace_once() -> None:
    """Have the interpreter put its functions in place of the language's once for each function that kernels call.

    It does so at each call, which is two fifths of its time. What a launch undoes at its end, the next launch does by itself.
    """
    from triton.runtime.interpreter import InterpretedFunction

    replacing: Callable[..., Any] = InterpretedFunction.__call__
    known = set()

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if function.fn in known:
            return function.rewrite()(*args, **kwargs)
        known.add(function.fn)
        return replacing(function, *args, **kwargs)

    setattr(InterpretedFunction, "__call__", call)  # noqa: B010 (mypy forbids the assignment)


def _triton() -> tuple[Kernels, ...]:
    if IS_INTERPRETED:
        _replace_once()
        return (choose_kernels("triton").kernels,)
    if not torch.cuda.is_available():
        return ()
    return (OnDevice(choose_kernels("triton", "cuda").kernels, torch.device("cuda")),)


TRITON: Final = _triton()
COMPARED: Final[tuple[Kernels, ...]] = (*COMPILED, *TRITON)  # with the reference
BACK_ENDS: Final[tuple[Kernels, ...]] = (REFERENCE, *COMPILED, *NUMBA, *TRITON)
INT8_REFERENCE: Final = TorchKernels(is_int8=True)
INT8_COMPILED: Final[tuple[CpuKernels, ...]] = tuple(CpuKernels(*library, is_int8=True) for library in _LIBRARIES)
INT8_BACK_ENDS: Final[tuple[Kernels, ...]] = (INT8_REFERENCE, *INT8_COMPILED)


def few(count: int) -> int:
    """How many examples of a test are drawn where each launch may take milliseconds, since it is interpreted."""
    return examples(count, 20 if IS_INTERPRETED else 2)


def a_few(cases: Sequence[Case]) -> Sequence[Case]:
    """The first two alone, likewise."""
    return cases[:2] if IS_INTERPRETED and not IS_THOROUGH else cases
