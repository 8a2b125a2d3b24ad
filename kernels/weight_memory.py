"""Memory for packed weights, on huge pages where the kernel gives them.

A decode step reads every weight once, in order. Where pages are small, hardware prefetchers stop at the end of each, for the
next one lies elsewhere; on pages of 2 MiB the same reads take less time. Weights are cut off
the front of large pieces, one behind the other, as the layers want them. Imports torch only. Not here: KV (engine/shared_bytes.py).
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Final

import torch
from torch import Tensor

HUGE_PAGE: Final = 2 << 20
_PIECE: Final = 64 << 20  # address space; what nobody writes to is no memory
_LINE: Final = 64


class WeightMemory:
    """Hands out memory for good: a piece is given back when the last tensor in it is gone."""

    def __init__(self) -> None:
        self._piece = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """So many numbers, zeroed, on a cache line of their own."""
        num_bytes = count * dtype.itemsize
        if self._used + num_bytes > self._piece.numel():
            self._piece, self._used = _huge_pages(max(_PIECE, num_bytes)), 0
        taken = self._piece[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // _LINE) * _LINE
        return taken.view(dtype)


def _huge_pages(num_bytes: int) -> Tensor:
    """At least so many bytes from the beginning of a huge page on; ordinary ones where there are no huge ones."""
    mapping = mmap.mmap(-1, num_bytes + 2 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    begin = -whole.data_ptr() % HUGE_PAGE
    return whole[begin : begin + -(-num_bytes // HUGE_PAGE) * HUGE_PAGE]
