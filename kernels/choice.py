"""Which back end computes: the one asked for, or the best that there is.

Imports torch. Not here: what a user is told about it (the node says which, and why not a faster one).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal, NamedTuple

from kernels.cpu_build import bits_name, library_path, usable_variants
from kernels.cpu_kernels import CpuKernels
from kernels.cpu_library import Library
from kernels.interface import Kernels
from kernels.torch_reference import TorchKernels

WeightDtype = Literal["auto", "int8"]  # "auto": the dtype of everything else


class Choice(NamedTuple):
    """A back end, and why it is not the one that was asked for ("" where it is)."""

    kernels: Kernels
    shortfall: str


class NoKernels(ValueError):
    """No back end here computes this; the message is one sentence."""


def choose_kernels(
    name: str,
    device_type: str = "cpu",
    weight_dtype: WeightDtype = "auto",
    num_ranks: int = 1,
) -> Choice:
    """Take "cpu" (compiled from C++), "numba" or "torch"; each falls back to the next where it is not there.

    On a CUDA device "torch" means torch there, and every other name Triton, which falls back to torch. Asked for by name on a
    CPU, Triton computes in its interpreter, for tests, or not at all. weight_dtype "int8": linears keep their weights in 8 bits.
    num_ranks: among how many a model's heads are divided. Raises NoKernels where none computes this.
    """
    is_tritons = name == "triton" or (device_type != "cpu" and name != "torch")
    if num_ranks > 1 and is_tritons:
        raise NoKernels(
            f"--tp {num_ranks}: Triton does not compute a part of the heads: --kernels torch, or leave it out"
        )
    is_int8 = weight_dtype == "int8"
    if is_int8 and (name == "triton" or device_type != "cpu"):
        raise NoKernels(
            "--weight-dtype int8: only a CPU computes with it, and Triton does not: --device cpu, or leave it out"
        )
    if is_tritons:
        found, reason = _triton_kernels(device_type)
        if found is not None:
            return Choice(found, "")
        if device_type == "cpu":
            raise NoKernels(reason)
        return Choice(TorchKernels(device_type), reason)
    if device_type != "cpu":
        return Choice(TorchKernels(device_type), "")
    shortfall = ""
    if name == "cpu":
        for variant in usable_variants():
            path = library_path(variant)
            if not path.exists():
                continue
            try:
                return Choice(CpuKernels(Library(path), bits_name(variant), is_int8=is_int8), "")
            except OSError as error:
                shortfall = f"{path.name} cannot be loaded: {error}"
        hint = "`make setup`, or `python -m kernels.cpu_build --here`, does it where there is a C++ compiler"
        shortfall = shortfall or f"nothing was compiled for this CPU: {hint}"
    if name != "torch":
        found, reason = _numba_kernels(is_int8)
        if found is not None:
            return Choice(
                found,
                shortfall and f"{shortfall}; numba computes, and where it never did, compiles first, half a minute",
            )
        shortfall = f"{shortfall}; {reason}" if shortfall else reason
    return Choice(TorchKernels(is_int8=is_int8), shortfall)


def has_numba() -> bool:
    """Whether numba is installed; says nothing about whether it works."""
    return find_spec("numba") is not None


def has_triton() -> bool:
    """Whether Triton is installed; says nothing about whether it works."""
    return find_spec("triton") is not None


def _triton_kernels(device_type: str) -> tuple[Kernels | None, str]:
    """Or why there are none."""
    if not has_triton():
        return None, "Triton is not installed (pip install -c constraints.txt -e '.[triton]')"
    try:
        # Imported where it is needed, as numba is below.
        from kernels.triton_kernels import triton_kernels

        return triton_kernels(device_type), ""
    except (ImportError, OSError, RuntimeError, ValueError) as error:  # ValueError: a device that is too old
        return None, f"Triton cannot be used: {error}"


def _numba_kernels(is_int8: bool) -> tuple[Kernels | None, str]:
    """Or why there are none."""
    if not has_numba():
        return None, "numba is not installed (pip install -c constraints.txt -e '.[numba]')"
    try:
        # Imported where it is needed: it takes a second, and is only there where somebody installed it.
        from kernels.numba_kernels import NumbaKernels

        return NumbaKernels(is_int8=is_int8), ""
    except (ImportError, OSError, RuntimeError) as error:  # RuntimeError: no directory to keep machine code in
        return None, f"numba cannot be used: {error}"
