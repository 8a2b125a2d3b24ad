"""Seconds of what a device computes, by its own events; on a CPU, by the host's clock.

A device that has nothing to do begins with the first launch while the host still makes the others, and its events would then tell
how long the host took. So it is kept busy first, for as long as the host may need. Not here: what is timed.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Final

import torch

_FILLED_BYTES: Final = 1 << 30
_FILL_S: Final = 0.0002  # that no device takes less for: 5 TB/s
_BEHIND_S: Final = 0.001  # of one launch
_NUM_TIMES: Final = 5


class DeviceClock:
    """Of one device."""

    def __init__(self, device: torch.device) -> None:
        """Takes 1 GiB of a CUDA device's memory."""
        self._is_cuda: Final = device.type == "cuda"
        self._filled = torch.empty(_FILLED_BYTES if self._is_cuda else 0, dtype=torch.int8, device=device)

    def synchronize(self) -> None:
        """Wait for all that the device was told."""
        if self._is_cuda:
            torch.cuda.synchronize(self._filled.device)

    def seconds_of(self, run: Callable[[], object], behind_s: float = _BEHIND_S) -> float:
        """What the device takes for what `run` tells it, which takes the host no longer than `behind_s`, and waits for nothing."""
        if not self._is_cuda:
            begin = time.perf_counter()
            run()
            return time.perf_counter() - begin
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        for _ in range(math.ceil(behind_s / _FILL_S)):
            self._filled.zero_()
        first.record()
        run()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1000

    def median_of(self, run: Callable[[], object]) -> float:
        """The median of some times of one launch."""
        return statistics.median(self.seconds_of(run) for _ in range(_NUM_TIMES))
