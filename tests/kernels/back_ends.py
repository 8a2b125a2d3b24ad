"""Every back end that this machine can run: the reference, and each compiled variant whose instructions the CPU has."""

from __future__ import annotations

from typing import Final

from kernels.cpu_build import build, usable_variants
from kernels.cpu_kernels import CpuKernels
from kernels.cpu_library import Library
from kernels.interface import Kernels
from kernels.torch_reference import TorchKernels

REFERENCE: Final = TorchKernels()
COMPILED: Final[tuple[CpuKernels, ...]] = tuple(
    CpuKernels(Library(build(variant)), variant.name) for variant in usable_variants()
)
BACK_ENDS: Final[tuple[Kernels, ...]] = (REFERENCE, *COMPILED)
