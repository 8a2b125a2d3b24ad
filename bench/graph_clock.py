"""Seconds of a call as a node makes it on a GPU: inside a CUDA graph, over inputs that no cache holds any more.

A call by itself takes the host longer than the device: what a node runs are graphs, in which a launch costs next to nothing. So
calls are captured, one on each copy of a case's inputs, and replayed; the device's own events tell the time. What lies in the L2
cache after one copy's turn is gone when that copy has its next one (`copies_for`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from kernels.triton_graphs import Capture

Call = Callable[[], object]
_L2_TIMES: Final = 4  # that the bytes of all copies exceed the L2 cache
_MAX_COPIES: Final = 16
_LEAST_CALLS: Final = 8  # of a graph, so that what is between two graphs does not count
_LEAST_S: Final = 0.002  # of one time
_MAX_REPLAYS: Final = 100


def copies_for(num_bytes: int, l2_bytes: int) -> int:
    """How many inputs of so many bytes exceed the L2 cache often enough."""
    return max(1, min(_MAX_COPIES, _L2_TIMES * l2_bytes // max(1, num_bytes) + 1))


class CapturedCalls:
    """Some calls as one CUDA graph; keeps what they read and write."""

    def __init__(self, calls: Sequence[Call], capture: Capture, least_s: float = _LEAST_S) -> None:
        """Runs each once, and as a graph; `least_s`: how long a time shall last. `capture`: one that has captured nothing."""
        self._calls = calls
        for call in calls:
            call()  # compiles, and sets up libraries, which cannot be captured
        torch.cuda.synchronize()
        self._num_calls = len(calls) * math.ceil(_LEAST_CALLS / len(calls))
        self._replay = capture(self._run)
        self._num_replays = 1
        once_s = self._num_calls * self.seconds()
        self._num_replays = max(1, min(_MAX_REPLAYS, math.ceil(least_s / once_s)))

    def _run(self) -> None:
        for index in range(self._num_calls):
            self._calls[index % len(self._calls)]()

    def seconds(self) -> float:
        """Of one call, by the device's events; a replay before keeps the device busy until the host has launched the others."""
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._replay()
        first.record()
        for _ in range(self._num_replays):
            self._replay()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1000 / self._num_replays / self._num_calls
