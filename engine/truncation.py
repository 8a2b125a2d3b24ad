"""Which tokens top_k, top_p and min_p leave of a row, for who draws one of them (sampler.py).

A row is told as how far its logits are below their greatest, in the precision in which that was taken: at most 0, none of them a
NaN. Scores are those over the temperature, in double precision. No more of a row is sorted than it takes.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.plan import SamplingParams

# A uniform of 52 bits in (0, 1) bounds the noise to (-3.6, 36.8): no score this far below the greatest can win.
_NOISE_SPAN: Final = 41.0
# top_p sorts so many of the likeliest tokens first, and all where they have too little of the probability.
_FIRST_SORTED: Final = 256
_GROUPS_EACH: Final = 3  # of a row, whose greatest values bound the largest ones, for each that is looked for
_LOSS: Final = 1e-4  # tenfold what a back end's shares are off by
_LOGARITHM_LOSS: Final = 1e-4  # of a score at min_p's bound, in single precision; thousandfold

Row = NDArray[np.float32] | NDArray[np.float64]


class Kept(NamedTuple):
    """What is left of a row: [n] each, in no order that counts."""

    token_ids: NDArray[np.int64]
    scores: NDArray[np.float64]


def truncates(sampling: SamplingParams) -> bool:
    """Whether it leaves anything out."""
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0


def kept(below: Row, sampling: SamplingParams) -> Kept:
    """What top_k, top_p and min_p leave, but for what cannot win; of equals the lowest ids."""
    with np.errstate(over="ignore"):  # a temperature next to zero: -inf is the right distance
        if 0 < sampling.top_k < len(below):
            token_ids = largest_ids(below, sampling.top_k)
            scores = _scores(below[token_ids], sampling)
            if sampling.top_p < 1:
                weights = np.exp(scores)
                left = _nucleus_size(weights, sampling.top_p * weights.sum())
                token_ids, scores = token_ids[:left], scores[:left]
        elif sampling.top_p < 1:
            token_ids = _nucleus(below, sampling)
            scores = _scores(below[token_ids], sampling)
        else:
            floor = -_NOISE_SPAN if sampling.min_p == 0 else float(np.log(sampling.min_p))
            token_ids = np.flatnonzero(below >= (floor - _LOGARITHM_LOSS) * sampling.temperature)
            scores = _scores(below[token_ids], sampling)
    if sampling.min_p > 0:
        is_likely = scores >= np.log(sampling.min_p)
        token_ids, scores = token_ids[is_likely], scores[is_likely]
    return Kept(token_ids, scores)


def is_left(above: float, beside: float, score: float, sampling: SamplingParams) -> bool | None:
    """Whether top_p and min_p leave a token of this score. None: too close to tell. Where it is out, so is what is no likelier.

    above: which share of the row's probability the likelier tokens have; beside: the others that are as likely.
    """
    if sampling.min_p > 0 and score < np.log(sampling.min_p):
        return False
    if above + beside < sampling.top_p - _LOSS:
        return True
    return False if above > sampling.top_p + _LOSS else None


def largest_ids(values: Row, count: int) -> NDArray[np.int64]:
    """Indices of the `count` >= 1 largest values, largest first, of equal ones the lowest index. Sorts no more than those."""
    candidates = _leading_ids(values, count)
    few = values[candidates]
    if count < len(few):
        bound = np.partition(few, len(few) - count)[len(few) - count]
        candidates, few = candidates[few >= bound], few[few >= bound]
    return candidates[np.argsort(-few, kind="stable")[:count]]


def _leading_ids(values: Row, count: int) -> NDArray[np.int64]:
    """Indices, ascending, of the `count` largest values, of what equals the least of them, and mostly of few others.

    The `count`-th largest of groups' greatest values is none above the `count`-th largest of all: two quick passes find a bound.
    """
    group_size = len(values) // (_GROUPS_EACH * count)
    if group_size < 2:
        return np.arange(len(values))
    num_groups = len(values) // group_size
    greatest = values[: group_size * num_groups].reshape(group_size, num_groups).max(0)
    return np.flatnonzero(values >= np.partition(greatest, num_groups - count)[num_groups - count])


def _scores(below: Row, sampling: SamplingParams) -> NDArray[np.float64]:
    return below.astype(np.float64) / sampling.temperature


def _nucleus(below: Row, sampling: SamplingParams) -> NDArray[np.int64]:
    """The fewest ids with a share of `top_p`, of equal ones the lowest."""
    wanted = sampling.top_p * np.exp(_scores(below, sampling)).sum()
    ids = largest_ids(below, _FIRST_SORTED)
    weights = np.exp(_scores(below[ids], sampling))
    if weights.sum() >= wanted:
        return ids[: _nucleus_size(weights, wanted)]
    ordered = below.copy()
    ordered.sort()  # numbers alone are sorted ten times as fast as their places
    ordered = ordered[::-1]
    size = _nucleus_size(np.exp(_scores(ordered, sampling)), wanted)
    bound = ordered[size - 1]
    above = np.flatnonzero(below > bound)
    return np.concatenate([above, np.flatnonzero(below == bound)[: size - len(above)]])


def _nucleus_size(weights: NDArray[np.float64], wanted: float) -> int:
    """How many of the leading weights together reach `wanted`; all, where rounding lets none."""
    return min(int(np.searchsorted(weights.cumsum(), wanted)) + 1, len(weights))
