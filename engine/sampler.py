"""Draw tokens from logits: greedy, or Gumbel-max at a temperature with counter-based noise.

The noise of a token is a function of (seed, index of the token in its completion, token id) and of nothing else, and token =
argmax(logit / temperature + noise) is distributed as softmax(logit / temperature) (Gumbel 1954; Maddison et al., 2014). So an
attempt that goes on elsewhere draws what the lost one would have drawn, and a last-bit difference in one logit does not shift
every later token as it would in an inverse CDF.

The counter is SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014): the stream's seed is
mixed from (seed, index), the token id is the position in the stream. Each row is drawn by itself, so its batch cannot matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.plan import BROKEN_ROW

_MASK_64: Final = (1 << 64) - 1
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
# A uniform of 52 bits in (0, 1) bounds the noise to (-3.6, 36.8): no logit this far below the greatest can win.
_NOISE_SPAN: Final = 41.0


class Draw(NamedTuple):
    """How one row is sampled."""

    temperature: float  # 0 is greedy
    seed: int  # 64 bits
    token_index: int  # in its completion


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Draw one token id per row of [num_rows, vocab_size]; BROKEN_ROW, rather than an invented token, where logits are no numbers.

    That row alone is broken: KV that a peer wrote, or a prompt that overflows the model, ends no other sequence.
    """
    logits = logits.float()
    greatest_ids = logits.argmax(-1, keepdim=True)  # the first of equals; a NaN counts as the greatest
    greatest = logits.gather(-1, greatest_ids)
    is_number: list[bool] = greatest[:, 0].isfinite().tolist()
    token_ids: list[int] = greatest_ids[:, 0].tolist()
    for row, draw in enumerate(draws):
        if not is_number[row]:
            token_ids[row] = BROKEN_ROW
        elif draw.temperature > 0:
            below = (logits[row] - greatest[row]).numpy()
            token_ids[row] = _draw_one(below, draw)
    return token_ids


def gumbel_noise(seed: int, token_index: int, token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Standard Gumbel noise of these token ids at this index of a completion."""
    stream = _mix(_mix(np.array([seed & _MASK_64], np.uint64)) + np.uint64(token_index))
    state = stream + (token_ids.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    uniform = ((_mix(state) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    noise: NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise


def _draw_one(below: NDArray[np.float32], draw: Draw) -> int:
    """Draw from logits given relative to their greatest, all <= 0. Of equal scores the lowest token id wins."""
    with np.errstate(over="ignore"):  # a temperature next to zero: -inf is the right distance
        scores = below.astype(np.float64) / draw.temperature
    candidates = np.flatnonzero(scores > -_NOISE_SPAN)
    noisy = scores[candidates] + gumbel_noise(draw.seed, draw.token_index, candidates)
    return int(candidates[noisy.argmax()])


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser; array arithmetic wraps at 64 bits, as it must."""
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))
