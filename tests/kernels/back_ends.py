"""Every back end that this machine can run: the reference, each compiled variant whose instructions the CPU has, and numba's."""

from __future__ import annotations

from typing import Final

import torch

from kernels.choice import choose_kernels, has_numba
from kernels.cpu_build import bits_name, build, usable_variants
from kernels.cpu_kernels import CpuKernels
from kernels.cpu_library import Library
from kernels.interface import Kernels
from kernels.torch_reference import TorchKernels

REFERENCE: Final = TorchKernels()
_LIBRARIES: Final = tuple((Library(build(variant)), bits_name(variant)) for variant in usable_variants())
COMPILED: Final[tuple[CpuKernels, ...]] = tuple(CpuKernels(*library) for library in _LIBRARIES)
NUMBA: Final[tuple[Kernels, ...]] = (choose_kernels("numba", torch.float32).kernels,) if has_numba() else ()
BACK_ENDS: Final[tuple[Kernels, ...]] = (REFERENCE, *COMPILED, *NUMBA)
INT8_REFERENCE: Final = TorchKernels(is_int8=True)
INT8_COMPILED: Final[tuple[CpuKernels, ...]] = tuple(CpuKernels(*library, is_int8=True) for library in _LIBRARIES)
INT8_BACK_ENDS: Final[tuple[Kernels, ...]] = (INT8_REFERENCE, *INT8_COMPILED)
