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
COMPILED: Final[tuple[CpuKernels, ...]] = tuple(
    CpuKernels(Library(build(variant)), bits_name(variant)) for variant in usable_variants()
)
NUMBA: Final[tuple[Kernels, ...]] = (choose_kernels("numba", torch.float32).kernels,) if has_numba() else ()
BACK_ENDS: Final[tuple[Kernels, ...]] = (REFERENCE, *COMPILED, *NUMBA)
