"""What a simulated cluster is made of, what is asked of it, and what became of a load on it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.plan_engine import Sizes
from bench.plan_rates import Rates
from router.placement import CACHE_AWARE


@dataclass(frozen=True, slots=True)
class Counts:
    """Nodes by role."""

    prefill: int
    decode: int
    mixed: int = 0

    @property
    def total(self) -> int:
        """All."""
        return self.prefill + self.decode + self.mixed

    def __str__(self) -> str:
        return f"{self.mixed} mixed" if self.mixed else f"{self.prefill} prefill + {self.decode} decode"


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request is to keep, in seconds."""

    ttft_s: float
    tpot_s: float
    attainment: float  # share of requests that are to keep both


@dataclass(frozen=True, slots=True)
class Setup:
    """What is the same for every cluster that is tried."""

    sizes: Sizes
    rates: Rates
    placement_prefill: str = CACHE_AWARE
    placement_decode: str = "least_loaded"
    max_queue: int = 1024
    is_exact: bool = False
    spells: bool = False  # prompts have tokens, and their keys are of these: what an exact run has


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a cluster made of a load. Times in seconds, NaN of requests that did not come so far."""

    counts: Counts
    num_requests: int
    num_refused: int
    ttft_s: NDArray[np.float64]
    tpot_s: NDArray[np.float64]  # NaN of answers with one token
    alone_s: NDArray[np.float64]  # to the first token, at least, had nobody else been there
    end_s: NDArray[np.float64]  # instants
    num_kept: int  # requests that kept the objective
    duration_s: float  # of virtual time, to the last end
    use: dict[str, float]  # by role: share of the time in which nodes had a step
    blocks: dict[str, float]  # by role: mean share of blocks in use or leased
    num_preempted: int
    num_steps: int
    num_computed: int  # prompt positions
    num_prompt: int  # the same, had nothing been cached
    is_whole: bool  # False: it was given up, since the objective could not be kept any more

    @property
    def attainment(self) -> float:
        """Share of all requests that kept the objective."""
        return self.num_kept / self.num_requests
