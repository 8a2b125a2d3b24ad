"""What this machine could do at best: R, the bytes a second that it reads, and F, the operations a second that it multiplies.

Measured by torch with the same threads as what is compared with them, and again beside every measurement: on a machine that
others use too, only ratios of neighbours in time mean anything (design, section 10).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch

from kernels.interface import Linear
from kernels.torch_reference import PackedLinear, can_pack

_READ_BYTES: Final = 1 << 30
_SIZE: Final = 4096


def seconds_of(run: Callable[[], object]) -> float:
    """How long one call takes."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


class Limits:
    """R and F, measured whenever they are asked for."""

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
        """F: one product of 4096 x 4096 matrices, the second one packed; an addition is an operation too."""
        return 2 * _SIZE**3 / seconds_of(lambda: self._linear(self._rows))
