"""Gumbel noise by counter: of each token a function of (seed, index of the token in its completion, token id) and nothing else.

The counter is SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014): the stream's seed is
mixed from (seed, index), the token id is the position in the stream.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

MASK_64: Final = (1 << 64) - 1
GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
MIX_2: Final = np.uint64(0x94D049BB133111EB)


def gumbel_noise(seed: int, token_index: int, token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Standard Gumbel noise of these token ids at this index of a completion."""
    return noise_of(noise_stream(seed, token_index), token_ids)


def noise_of(streams: np.uint64 | NDArray[np.uint64], token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """The same where each token id's stream is known."""
    state = streams + (token_ids.astype(np.uint64) + np.uint64(1)) * GOLDEN
    uniform = ((_mix(state) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    noise: NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise


def noise_stream(seed: int, token_index: int) -> np.uint64:
    """Where the noise of this index begins."""
    state = (_mix_one(seed & MASK_64) + token_index) & MASK_64
    return np.uint64(_mix_one(state))


def noise_streams(seeds: NDArray[np.uint64], token_indices: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The same of many."""
    return _mix(_mix(seeds) + token_indices.astype(np.uint64))


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser; array arithmetic wraps at 64 bits, as it must."""
    state = (state ^ (state >> np.uint64(30))) * MIX_1
    state = (state ^ (state >> np.uint64(27))) * MIX_2
    return state ^ (state >> np.uint64(31))


def _mix_one(state: int) -> int:
    """The same of one number."""
    state = (state ^ (state >> 30)) * int(MIX_1) & MASK_64
    state = (state ^ (state >> 27)) * int(MIX_2) & MASK_64
    return state ^ (state >> 31)
