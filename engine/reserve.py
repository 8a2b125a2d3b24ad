"""How much room admission leaves to what is running, so that it need not be preempted for what comes. Pure.

    full    nobody is admitted who cannot grow to the limit: what a sequence does not take at once is promised, nothing is ever
            preempted, and most of the pool stays idle
    ratio   of what every running sequence may still say, the share that sequences of late really said: it decays while all
            goes well and is taken anew from what runs at each preemption (as SGLang's new_token_ratio)
    fixed   nothing until a preemption happens, then some blocks per running sequence, fewer with each step (as FastDeploy's
            older rule)
    none    nothing

A step is one that scheduled something. Tokens are completion tokens; a limit is max_tokens, or what max_model_len leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

ReservePolicy = Literal["full", "ratio", "fixed", "none"]

FIXED_BLOCKS = 16.0  # per running sequence, after a preemption
FIXED_DECAY = 0.025  # less with each step
MARGIN_BLOCKS = 16  # per decoding sequence, that a ratio taken at a preemption has on top of what was said


@dataclass(frozen=True, slots=True)
class ReserveConfig:
    """The policy and its numbers."""

    policy: ReservePolicy = "ratio"
    init_ratio: float = 0.7  # of a node that has seen nothing yet, and the most that a preemption brings back
    min_ratio: float = 0.098
    decay_steps: int = 600  # from init to min
    clip_max_new_tokens: int = 4096  # what is left of a limit counts as no more than this

    def __post_init__(self) -> None:
        if not 0 <= self.min_ratio <= self.init_ratio <= 1:
            raise ValueError(f"a ratio from {self.init_ratio} down to {self.min_ratio}: must be 0 <= min <= init <= 1")
        if self.decay_steps < 1 or self.clip_max_new_tokens < 1:
            raise ValueError(f"{self.decay_steps} decay steps, clip {self.clip_max_new_tokens}: at least 1 each")


class Reserve(Protocol):
    """Decides with numbers only."""

    @property
    def value(self) -> float:
        """The policy's own number: the ratio, or blocks per running sequence."""

    def num_blocks(self, remaining: NDArray[np.int64]) -> int:
        """To leave to sequences that may say so many more tokens each; a negative one, beyond its limit, needs none."""

    def stepped(self) -> None:
        """A step scheduled something."""

    def preempted(self, num_generated: int, num_limit: int, num_decoding: int) -> None:
        """Sums over what decodes, the victim included: tokens said, limits, and how many they are."""


class RatioReserve:
    """A share of what may still come."""

    def __init__(self, config: ReserveConfig, block_size: int) -> None:
        self._config = config
        self._block_size = block_size
        self._ratio = config.init_ratio

    @property
    def value(self) -> float:
        """See Reserve."""
        return self._ratio

    def num_blocks(self, remaining: NDArray[np.int64]) -> int:
        """See Reserve."""
        share, clip = self._ratio / self._block_size, self._config.clip_max_new_tokens
        return int(np.ceil(np.minimum(np.maximum(remaining, 0), clip) * share).sum())

    def stepped(self) -> None:
        """See Reserve: linear, to the floor; a ratio that a preemption put below it stays."""
        config = self._config
        if self._ratio > config.min_ratio:
            decay = (config.init_ratio - config.min_ratio) / config.decay_steps
            self._ratio = max(config.min_ratio, self._ratio - decay)

    def preempted(self, num_generated: int, num_limit: int, num_decoding: int) -> None:
        """See Reserve."""
        margin = MARGIN_BLOCKS * self._block_size * num_decoding
        self._ratio = min(self._config.init_ratio, (num_generated + margin) / (num_limit + 1))


class FixedReserve:
    """Blocks per running sequence."""

    def __init__(self) -> None:
        self._blocks = 0.0

    @property
    def value(self) -> float:
        """See Reserve."""
        return self._blocks

    def num_blocks(self, remaining: NDArray[np.int64]) -> int:
        """See Reserve; nobody is left more than a clip of one sequence."""
        return ceil(self._blocks * np.count_nonzero(remaining > 0))

    def stepped(self) -> None:
        """See Reserve."""
        self._blocks = max(0.0, self._blocks - FIXED_DECAY)

    def preempted(self, num_generated: int, num_limit: int, num_decoding: int) -> None:
        """See Reserve."""
        self._blocks = FIXED_BLOCKS


class NoReserve:
    """Nothing is left to anybody; also beside promises, which leave enough."""

    @property
    def value(self) -> float:
        """See Reserve."""
        return 0.0

    def num_blocks(self, remaining: NDArray[np.int64]) -> int:
        """See Reserve."""
        return 0

    def stepped(self) -> None:
        """See Reserve."""

    def preempted(self, num_generated: int, num_limit: int, num_decoding: int) -> None:
        """See Reserve."""


def make_reserve(config: ReserveConfig, block_size: int) -> Reserve:
    """The policy, as it is before the first step."""
    match config.policy:
        case "ratio":
            return RatioReserve(config, block_size)
        case "fixed":
            return FixedReserve()
        case "full" | "none":
            return NoReserve()
