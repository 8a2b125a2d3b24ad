"""Memory that outlives a step: it grows to what the largest step needs and is then used again.

A step that is like earlier ones takes nothing from the allocator for what is kept here. What has been taken is overwritten when
the same name is taken again; whoever runs steps knows when that is. Not here: what the numbers mean.
"""

from __future__ import annotations

import math
from typing import Final, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Number = TypeVar("Number", np.int32, np.int64)


class StepTensors:
    """Tensors by name. `max_logits`: rows of logits that are worth keeping; a prompt's logprobs may want many more, once."""

    def __init__(self, max_logits: int = 0) -> None:
        self.max_logits: Final = max_logits
        self._kept: dict[str, Tensor] = {}
        self._taken: dict[str, tuple[tuple[int, ...], Tensor]] = {}  # last, of each: steps of the same size are usual

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A contiguous tensor of this shape, with `like`'s dtype and on its device; what is in it is anything."""
        last = self._taken.get(name)
        if last is not None and last[0] == shape and _is_alike(last[1], like):
            return last[1]
        size = math.prod(shape)
        kept = self._kept.get(name)
        if kept is None or kept.numel() < size or not _is_alike(kept, like):
            kept = self._kept[name] = like.new_empty(_room(size))
        taken = kept[:size].view(shape)
        self._taken[name] = shape, taken
        return taken


def _is_alike(kept: Tensor, like: Tensor) -> bool:
    return kept.dtype is like.dtype and kept.device == like.device


class SharedNumbers(Generic[Number]):
    """Integers that numpy fills in and torch, or C, reads: one piece of memory, two views."""

    def __init__(self, dtype: type[Number]) -> None:
        self._array: NDArray[Number] = np.empty(0, dtype)
        self._tensor = torch.from_numpy(self._array)

    def array(self, *shape: int) -> NDArray[Number]:
        """So many numbers for numpy; what is in them is anything."""
        size = math.prod(shape)
        if self._array.size < size:
            self._array = np.zeros(_room(size), self._array.dtype)
            self._tensor = torch.from_numpy(self._array)
        return self._array[:size].reshape(shape)

    def tensor(self, *shape: int) -> Tensor:
        """The same numbers for torch; behind array() of this size."""
        return self._tensor[: math.prod(shape)].view(shape)


def _room(size: int) -> int:
    """Room that need not grow at every step of sequences that do: the next power of two."""
    return 1 << max(0, size - 1).bit_length()
