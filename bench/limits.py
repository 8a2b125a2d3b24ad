"""What this machine could do at best: R, the bytes a second that it reads, and F, the operations a second that it multiplies.

Measured by torch with the same threads as what is compared with them, and again beside every measurement: on a machine that
others use too, only ratios of neighbours in time mean anything (design, section 10). R is of reading alone, a CPU's and a device's:
kernels mostly read (weights, KV), and a copy is slower even where its bytes count twice (an H200: 4.3 TB/s and 2.75).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol

import torch

from kernels.interface import Linear
from kernels.torch_reference import PackedLinear, can_pack

_READ_BYTES: Final = 1 << 30
_SIZE: Final = 4096

Timer = Callable[[Callable[[], object]], float]  # seconds of one call


def seconds_of(run: Callable[[], object]) -> float:
    """How long one call takes."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


class Limits(Protocol):
    """R and F, measured whenever they are asked for."""

    def bytes_per_s(self) -> float:
        """R."""

    def operations_per_s(self) -> float:
        """F; an addition is an operation too."""


class CpuLimits:
    """Limits of a CPU, by its threads."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._numbers = torch.ones(_READ_BYTES // 4)
        # fp16 that oneDNN does not pack is no limit of the machine: bf16 or fp32 is.
        dtype = dtype if can_pack(dtype) else torch.float32
        self._rows = torch.ones(_SIZE, _SIZE, dtype=dtype)
        self._linear: Linear = PackedLinear(torch.ones(_SIZE, _SIZE, dtype=dtype))
        self._numbers.sum(), self._linear(self._rows)

    def bytes_per_s(self) -> float:
        """R: `torch.sum` over 1 GiB."""
        return _READ_BYTES / seconds_of(self._numbers.sum)

    def operations_per_s(self) -> float:
        """F: one product of 4096 x 4096 matrices, the second one packed."""
        return 2 * _SIZE**3 / seconds_of(lambda: self._linear(self._rows))


class DeviceLimits:
    """Limits of a device, by torch's own sum and product."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seconds: Timer) -> None:
        """Takes 1 GiB of its memory."""
        self._seconds = seconds
        size = 8192 if device.type == "cuda" else 2048
        self._num_operations: Final = 2 * size**3
        self._numbers = torch.ones(_READ_BYTES // 4, device=device)
        # Random, for a GPU that multiplies ones draws less power and runs faster than it does over anybody's numbers.
        self._square = torch.randn((size, size), dtype=dtype, device=device)
        self._numbers.sum(), self._multiply()

    def bytes_per_s(self) -> float:
        """R: `torch.sum` over 1 GiB."""
        return _READ_BYTES / self._seconds(self._numbers.sum)

    def operations_per_s(self) -> float:
        """F: one product of two large square matrices."""
        return self._num_operations / self._seconds(self._multiply)

    def _multiply(self) -> object:
        return self._square @ self._square
