"""Weights in 8 bits: a whole number of -127 .. 127 per weight and one fp32 scale per output channel, symmetric.

Activations, sums and KV stay what they are without. Every back end multiplies by the whole numbers, which all dtypes of
activations hold exactly, and scales the sum: so back ends agree as closely as they do on weights in full, and rounding to
8 bits is the only thing that is lost (measured by `python -m bench.int8`). Imports torch only.
Source: the weight-only scheme of https://arxiv.org/abs/2208.07339 (LLM.int8), without its outliers.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

# Of a back end's name, and with it part of the fingerprint: its KV is not that of weights in full.
INT8_SUFFIX: Final = "-int8"
GREATEST: Final = 127
_ROWS_AT_ONCE: Final = 4096  # of what is widened meanwhile


class Int8Weight(NamedTuple):
    """weight[row, column] is about numbers[row, column] * scales[row]."""

    numbers: Tensor  # [out_features, in_features] int8
    scales: Tensor  # [out_features] fp32


def quantized(weight: Tensor) -> Int8Weight:
    """Round [out_features, in_features] to the nearest of each row's multiples. A row with a NaN has a NaN for its scale."""
    numbers = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0])
    for begin in range(0, weight.shape[0], _ROWS_AT_ONCE):
        rows = slice(begin, begin + _ROWS_AT_ONCE)
        wide = weight[rows].float()
        scales[rows] = wide.abs().amax(1) / GREATEST
        steps = torch.where(scales[rows] == 0, 1, scales[rows])[:, None]
        numbers[rows] = (wide / steps).round_().clamp_(-GREATEST, GREATEST).nan_to_num_().to(torch.int8)
    return Int8Weight(numbers, scales)
