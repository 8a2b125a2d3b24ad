"""What the compiled library tells of a step's draws: from all logits (contend.h), or from near ones (screen.h).

A head that looks tokens up as well lies there row by row, as the embedding. In 8 bits besides, it is half of what a step of few
rows reads of it in bf16, and nothing of a draw changes. Not here: which steps are drawn so (engine/runner.py).
"""

from __future__ import annotations

from ctypes import pointer
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cpu_library import CContest, CDraws, CScreen, Library, address
from kernels.cpu_linear import CpuLinear
from kernels.int8_weights import Int8Weight, quantized
from kernels.interface import Contenders
from kernels.weight_memory import WeightMemory

MAX_CONTENDERS: Final = 512  # of a row; some dozens are usual
MAX_NEAR_ROWS: Final = 12  # of a step; more compute as long as they read
# A draw that is won by less is left to the sampler: its logarithms may differ from the library's in their last places, 1e-14.
MARGIN: Final = 1e-9
_REST: Final = 64  # steps with the head in full, behind one that near logits could not tell
_ROWS_AT_ONCE: Final = 4096  # of what is widened meanwhile
_SQUARED_AWAY: Final = 2.0**-74  # numbers up to here have no squares in fp32: so much of each a length may lack
_LARGEST: Final = 1e13  # radius: times what a length may lack it is little beside what the library adds to each bound


class Contest:
    """Draws, and what is told of them, for so many rows at most: laid out once, and used again."""

    def __init__(self, num_rows: int) -> None:
        self.max_rows: Final = num_rows
        self.temperatures, self.streams = np.empty(num_rows, np.float32), np.empty(num_rows, np.uint64)
        self._greatest, self._greatest_ids = np.empty(num_rows, np.float32), np.empty(num_rows, np.int32)
        self._ids, self._counts = np.empty((num_rows, MAX_CONTENDERS), np.int32), np.empty(num_rows, np.int32)
        self._values = np.empty((num_rows, MAX_CONTENDERS), np.float32)
        arrays = (
            *(self.temperatures, self.streams, self._greatest, self._greatest_ids),
            *(self._ids, self._values, self._counts),
        )
        self.c: Final = CContest(*(array.ctypes.data for array in arrays), num_rows, 0, MAX_CONTENDERS)

    def set(self, temperatures: NDArray[np.float32], streams: NDArray[np.uint64], vocab_size: int) -> None:
        """What is drawn next."""
        num_rows = len(temperatures)
        self.temperatures[:num_rows], self.streams[:num_rows] = temperatures, streams
        self.c.num_rows, self.c.vocab_size = num_rows, vocab_size

    def found(self) -> Contenders:
        """As of the last call; stays what it is."""
        num_rows = self.c.num_rows
        counts = self._counts[:num_rows].tolist()
        few = [
            (ids[:n].copy(), values[:n].copy()) if n <= MAX_CONTENDERS else None
            for ids, values, n in zip(self._ids, self._values, counts, strict=False)
        ]
        return Contenders(self._greatest[:num_rows].copy(), self._greatest_ids[:num_rows].copy(), few)


class Draws:
    """Room for the draws of one step after the other."""

    def __init__(self) -> None:
        self._contest = Contest(1)
        self.c: Final = CDraws(None, pointer(self._contest.c), None, MARGIN)

    def begin(self, num_rows: int, screen: CScreen | None) -> NDArray[np.int64]:
        """So many rows are drawn next, from near logits where there is a screen: where their token ids will be."""
        if num_rows > self._contest.max_rows:
            self._contest = Contest(1 << (num_rows - 1).bit_length())
            self.c.contest = pointer(self._contest.c)
        token_ids = np.empty(num_rows, np.int64)
        self.c.screen = None if screen is None else pointer(screen)
        self.c.drawn = address(token_ids)
        return token_ids


class CpuNearHead:
    """kernels.interface.NearHead: a head in 8 bits beside the one in full, and how far apart their logits may be."""

    def __init__(self, library: Library, memory: WeightMemory, weight: Tensor) -> None:
        """weight: [vocab_size, hidden_size], the head in full, which stays where it is."""
        rounded = quantized(weight)
        self._weight = weight
        self.linear: Final = CpuLinear(library, memory, weight, rounded=rounded)
        self._radii = _radii(weight, rounded)
        self.num_told = self.num_untold = 0  # steps so far
        self._rest = 0

    def screen(self, normed: Tensor) -> CScreen:
        """normed: [MAX_NEAR_ROWS, hidden_size], where what the head multiplies will lie; the caller keeps it."""
        return CScreen(self._weight.data_ptr(), self._radii.data_ptr(), normed.data_ptr(), normed.shape[1])

    def begins(self, num_rows: int) -> bool:
        """Whether a step of so many rows is worth the try. A model whose draws it cannot tell is left alone for a while."""
        self._rest = max(0, self._rest - 1)
        return 0 < num_rows <= MAX_NEAR_ROWS and not self._rest

    def ends(self, *, is_told: bool) -> None:
        """How it went."""
        if is_told:
            self.num_told += 1
        else:
            self.num_untold, self._rest = self.num_untold + 1, _REST


def _radii(weight: Tensor, rounded: Int8Weight) -> Tensor:
    """How far a near sum may be from the exact one, for an x of length 1: [vocab_size] fp32.

    Rounding to 8 bits loses at most the length of what it loses of the row. A chain of n sums in fp32 loses at most n * 2^-24 of
    the lengths multiplied (Higham, Accuracy and Stability of Numerical Algorithms, 3.1); twice that, for steps of two round twice,
    and twice again for two chains.
    """
    radii = torch.empty(len(weight))
    of_sums = 2.0**-22 * weight.shape[1]
    for begin in range(0, len(weight), _ROWS_AT_ONCE):
        rows = slice(begin, begin + _ROWS_AT_ONCE)
        wide = weight[rows].float()
        lost = (wide - rounded.numbers[rows].float() * rounded.scales[rows, None]).norm(dim=1) * 1.001
        radii[rows] = lost + _SQUARED_AWAY * weight.shape[1] + of_sums * (wide.norm(dim=1) + lost)
    return radii.masked_fill_(radii > _LARGEST, torch.inf)  # nothing can be told
