"""The rotary frequencies of a model, scaled as it was trained, in the arithmetic of transformers' modeling_rope_utils; and
each position's angles.

Not here: applying them (kernels), reading the settings (engine/rope_config.py).
"""

from __future__ import annotations

import hashlib
import math
from typing import Final

import torch
from torch import Tensor

from engine.rope_config import RopeConfig

_FIRST_POSITIONS: Final = 1024


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Give the angle per position of each pair of dimensions, [head_dim / 2] fp32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    if rope.kind == "yarn":
        return _yarn(rope, head_dim, frequencies)
    return frequencies


class Angles:
    """cos and sin of every position so far, in memory that doubles: a step takes them from there."""

    def __init__(self, frequencies: Tensor, factor: float) -> None:
        """`frequencies` [head_dim / 2] fp32: angle per position; `factor`: what cos and sin are multiplied by."""
        self._frequencies, self._factor = frequencies, factor
        self._cos = self._sin = frequencies.new_empty((0, len(frequencies)))

    @classmethod
    def of(cls, rope: RopeConfig, head_dim: int, device: torch.device) -> Angles:
        """A model's, on its device."""
        return cls(inverse_frequencies(rope, head_dim).to(device), attention_factor(rope))

    @property
    def digest(self) -> str:
        """Eight hex digits that tell these angles from those whose last bits differ: another CPU's, device's or torch's may."""
        tables = (self._frequencies, *(each[:_FIRST_POSITIONS] for each in self.up_to(_FIRST_POSITIONS)))
        return hashlib.sha256(b"".join(each.cpu().numpy().tobytes() for each in tables)).hexdigest()[:8]

    def up_to(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """cos and sin of at least positions 0 .. num_positions - 1, each [positions, head_dim / 2] fp32."""
        if len(self._cos) < num_positions:
            size = max(_FIRST_POSITIONS, 1 << (num_positions - 1).bit_length())
            turns = torch.arange(size, device=self._frequencies.device).float()[:, None] * self._frequencies
            self._cos, self._sin = turns.cos().mul_(self._factor), turns.sin().mul_(self._factor)
        return self._cos, self._sin


def attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by: 1 for all kinds but yarn (arXiv 2309.00071, section 3.4)."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_scale(rope.factor, rope.mscale) / _yarn_scale(rope.factor, rope.mscale_all_dim)
    return _yarn_scale(rope.factor, 1.0)


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Slow what turns slowly, keep what turns fast, and glide between (Llama 3.1's reference code)."""
    wavelengths = 2 * math.pi / frequencies
    longest, shortest = (rope.original_positions / f for f in (rope.low_freq_factor, rope.high_freq_factor))
    glide = (rope.original_positions / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - glide) * frequencies / rope.factor + glide * frequencies
    scaled = torch.where(wavelengths > longest, frequencies / rope.factor, between)
    return torch.where(wavelengths < shortest, frequencies, scaled)


def _yarn(rope: RopeConfig, head_dim: int, frequencies: Tensor) -> Tensor:
    """Interpolate dimensions that turn less than beta_slow times over the trained length, keep those above beta_fast."""

    def dimension(num_turns: float) -> float:
        return head_dim * math.log(rope.original_positions / (num_turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncates:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    kept = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    interpolated = 1.0 / (rope.factor * (1.0 / frequencies))
    return interpolated * (1 - kept) + frequencies * kept


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
