"""Takes a model's tensors out of its files, one matrix at a time, and packs them for a back end: all of them, or one rank's part.

Not here: what they are for (engine/model.py), files (engine/weights.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.split import WHOLE, Split
from kernels.interface import Kernels, Linear


class Tensors(Protocol):
    """Where weights come from: engine/weights.py's files, as a rule."""

    def read(self, name: str, dtype: torch.dtype, split: Split = WHOLE) -> Tensor:
        """One tensor, or a rank's part of its rows, in memory of its own."""


class WeightReader:
    """One rank's weights. Dense copies are dropped one by one."""

    def __init__(
        self, files: Tensors, kernels: Kernels, dtype: torch.dtype, device: torch.device, split: Split
    ) -> None:
        self._files = files
        self._kernels = kernels
        self._dtype = dtype
        self._device = device
        self._split = split

    def whole(self, name: str) -> Tensor:
        """What every rank has all of: norms, the embedding."""
        return self._files.read(name, self._dtype).to(self._device)

    def linear(self, has_bias: bool, *names: str) -> Linear:
        """The rank's columns of these products, side by side."""
        return self._kernels.pack_linear(*self._joined(names, has_bias))

    def gate_up(self, has_bias: bool, gate: str, up: str) -> Linear:
        """The same of a gate and what it lets through."""
        return self._kernels.pack_gate_up(*self._joined((gate, up), has_bias))

    def head(self, name: str, vocab_size: int) -> Linear:
        """Equal parts of the vocabulary: where it does not divide, the last ones are filled up with columns of zeros."""
        weight = self._part(f"{name}.weight")
        num_lacking = self._split.width(vocab_size) - len(weight)
        return self._kernels.pack_linear(torch.nn.functional.pad(weight, (0, 0, 0, num_lacking)))

    def _joined(self, names: Sequence[str], has_bias: bool) -> tuple[Tensor, Tensor | None]:
        weight = torch.cat([self._part(f"{name}.weight") for name in names])
        return weight, torch.cat([self._part(f"{name}.bias") for name in names]) if has_bias else None

    def _part(self, name: str) -> Tensor:
        return self._files.read(name, self._dtype, self._split).to(self._device)
