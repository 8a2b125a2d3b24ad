"""How a row is sampled: what a request asks for, and what that changes of its logits before anything is drawn (sampler.py)."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.plan import SamplingParams
from engine.token_counts import TokenCounts
from engine.truncation import truncates

_COLDEST: Final = 1e-30  # nearer to 0 fp32, and so a back end, may not tell by how much a logit loses


class Draw(NamedTuple):
    """How one row is sampled."""

    sampling: SamplingParams
    token_index: int  # in its completion
    counts: TokenCounts | None = None  # of what comes before it; None where there are no penalties
    # What a grammar allows next, [vocab_size] bool; None: anything. Where it allows nothing the row is broken.
    allowed: NDArray[np.bool_] | None = None


def is_drawn_plainly(draw: Draw) -> bool:
    """Whether any token may be drawn, by its own logit, at a temperature that back ends can divide by."""
    sampling = draw.sampling
    return sampling.temperature >= _COLDEST and not (truncates(sampling) or changes_logits(draw))


def is_raced(draw: Draw) -> bool:
    """Whether it pays to know first who wins among all. Not for top_k and min_p alone: a pass or two tell whom they leave."""
    sampling = draw.sampling
    return sampling.temperature >= _COLDEST and not sampling.top_k and (sampling.top_p < 1 or sampling.min_p == 0)


def is_decided_by_logits(draw: Draw) -> bool:
    """Whether it is greedy or drawn plainly: no more of a request than its temperature and its seed counts."""
    return is_drawn_plainly(draw) or (draw.sampling.temperature == 0 and not changes_logits(draw))


def changes_logits(draw: Draw) -> bool:
    """Whether bias, bans or penalties have anything to do."""
    has_history = draw.counts is not None or draw.allowed is not None
    return has_history or _bans_stops(draw) or bool(draw.sampling.logit_bias)


def _bans_stops(draw: Draw) -> bool:
    return draw.token_index < draw.sampling.min_tokens and bool(draw.sampling.stop_token_ids)


def _is_left_more(draw: Draw, num_tokens: int) -> bool:
    """Whether there is anything to say but stop tokens."""
    stops = draw.sampling.stop_token_ids
    if draw.allowed is None:
        return len(stops) < num_tokens
    return int(draw.allowed[[*stops]].sum()) < int(draw.allowed.sum())


def changed(values: NDArray[np.float64], draw: Draw) -> NDArray[np.float64]:
    """Bias, bans and penalties, done to `values` in place. A ban of stop tokens that would leave nothing to say is none."""
    sampling = draw.sampling
    if sampling.logit_bias:
        token_ids, biases = zip(*sampling.logit_bias, strict=True)
        values[[*token_ids]] += biases
    if draw.allowed is not None:
        values[~draw.allowed] = -np.inf
    if _bans_stops(draw) and _is_left_more(draw, len(values)):
        values[[*sampling.stop_token_ids]] = -np.inf
    if draw.counts is not None:
        said, counts = draw.counts.token_ids, draw.counts.counts
        penalty = sampling.repetition_penalty
        heard = np.where(values[said] > 0, values[said] / penalty, values[said] * penalty)
        values[said] = heard - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
    return values


def touched_ids(draw: Draw) -> list[NDArray[np.int64]]:
    """The ids whose logits bias, a ban of stop tokens, or penalties may change."""
    sampling = draw.sampling
    touched = [np.array([token_id for token_id, _ in sampling.logit_bias], np.int64)]
    if _bans_stops(draw):
        touched.append(np.array([*sampling.stop_token_ids], np.int64))
    if draw.counts is not None:
        touched.append(draw.counts.token_ids)
    return touched
