"""Draw tokens from logits: greedy, or Gumbel-max at a temperature with counter-based noise.

What a request asks for is done to its row in this order, which is that of vLLM and Hugging Face:

    1. logit_bias is added; what the grammar does not allow is banned; before min_tokens the stop tokens are, too
    2. repetition_penalty divides the positive and multiplies the negative logits of what prompt or completion have; then
       frequency_penalty times its count in the completion, and presence_penalty, are taken from what the completion has
    3. temperature 0 takes the greatest that is left; any other divides
    4. top_k keeps the k greatest; of those, top_p the fewest that have that share of their probability; of those, min_p the
       ones that are at least that times as likely as the greatest. Of equal logits the lowest token ids are kept, so that
       top_k = 1 is greedy
    5. one of the rest is drawn

The noise of a token is a function of (seed, index of the token in its completion, token id) and of nothing else, and token =
argmax(logit / temperature + noise) is distributed as softmax(logit / temperature) (Gumbel 1954; Maddison et al., 2014). So an
attempt that goes on elsewhere draws what the lost one would have drawn, and a last-bit difference in one logit does not shift
every later token as it would in an inverse CDF.

The counter is SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014): the stream's seed is
mixed from (seed, index), the token id is the position in the stream. Each row is drawn by itself, so its batch cannot matter.

Who wins among all wins among any that it is one of. So where a back end tells the few that can win (a race: kernels/interface.py),
their winner is held against top_p and min_p before anything is sorted; what bias, bans or penalties have changed runs beside those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.plan import BROKEN_ROW, SamplingParams
from engine.token_counts import TokenCounts
from engine.truncation import Row, is_surely_kept, kept, truncates
from kernels.interface import Contenders, Kernels

MASK_64: Final = (1 << 64) - 1
GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
MIX_2: Final = np.uint64(0x94D049BB133111EB)
_COLDEST: Final = 1e-30  # nearer to 0 fp32, and so a back end, may not tell by how much a logit loses
_LIMITS: Final = np.array(
    [-np.inf, np.inf], np.float32
)  # of the logit of a token that is banned, and of one that is not
_ROWS_AT_ONCE: Final = 8  # that are changed; a row in double precision is a megabyte, and so many share a call


class Draw(NamedTuple):
    """How one row is sampled."""

    sampling: SamplingParams
    token_index: int  # in its completion
    counts: TokenCounts | None = None  # of what comes before it; None where there are no penalties
    # What a grammar allows next, [vocab_size] bool; None: anything. Where it allows nothing the row is broken.
    allowed: NDArray[np.bool_] | None = None


def sample(logits: Tensor, draws: Sequence[Draw], kernels: Kernels | None = None) -> list[int]:
    """Draw one token id per row of [num_rows, vocab_size]; BROKEN_ROW, rather than an invented token, where logits are no numbers.

    That row alone is broken: KV that a peer wrote, or a prompt that overflows the model, ends no other sequence. `kernels`
    only make it faster.
    """
    if not draws:
        return []
    contenders = _contenders(logits, draws, kernels)
    token_ids = [BROKEN_ROW] * len(draws)
    raced: list[int] = []  # rows whose winner among all is among a few tokens that are known
    bound: list[int] = []  # rows that are drawn like any other once what their grammars ban is out
    changed: list[int] = []
    for row, draw in enumerate(draws):
        greatest = contenders.greatest[row]
        if not np.isfinite(greatest):
            continue
        if draw.allowed is not None and not changes_logits(draw._replace(allowed=None)):
            bound.append(row)
        elif changes_logits(draw):
            changed.append(row)
        elif draw.sampling.temperature == 0:
            token_ids[row] = int(contenders.greatest_ids[row])
        elif contenders.few[row] is not None and is_raced(draw):
            raced.append(row)
        else:
            token_ids[row] = _draw_one(_below(logits[row], greatest), draw)
    later = (
        (raced, _draw_raced(logits, draws, contenders, raced)),
        (bound, _draw_bound(logits, draws, bound, kernels)),
        (changed, _draw_changed(logits, draws, changed, kernels)),
    )
    for rows, drawn in later:
        for row, token_id in zip(rows, drawn, strict=True):
            token_ids[row] = token_id
    return token_ids


def _draw_bound(logits: Tensor, draws: Sequence[Draw], rows: Sequence[int], kernels: Kernels | None) -> list[int]:
    """Draw in each of these rows among what its grammar allows."""
    if not rows:
        return []
    values = np.empty((len(rows), logits.shape[1]), np.float32)
    for own, row in zip(values, rows, strict=True):
        allowed = draws[row].allowed
        assert allowed is not None
        np.minimum(logits[row].float().numpy(), _LIMITS.take(allowed.view(np.uint8)), out=own)  # faster than to choose
    return sample(torch.from_numpy(values), [draws[row]._replace(allowed=None) for row in rows], kernels)


def _draw_changed(logits: Tensor, draws: Sequence[Draw], rows: Sequence[int], kernels: Kernels | None) -> list[int]:
    """Draw in each of these rows from what bias, bans and penalties make of it."""
    token_ids: list[int] = []
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        some = rows[first : first + _ROWS_AT_ONCE]
        few = _unchanged_few(logits, draws, some, kernels)
        for row, unchanged in zip(some, few, strict=True):
            token_ids.append(_draw_one_changed(logits[row].double().numpy(), draws[row], unchanged))
    return token_ids


def _draw_one_changed(values: NDArray[np.float64], draw: Draw, few: NDArray[np.int64] | None) -> int:
    """Draw from a row, which is changed in place. few: who of those that stay as they are can win; None: it isn't known."""
    values = _changed(values, draw)
    token_id = int(values.argmax())
    if values[token_id] == -np.inf:
        return BROKEN_ROW
    if draw.sampling.temperature == 0:
        return token_id
    values -= values[token_id]
    if few is None:
        return _draw_one(values, draw)
    racers = np.concatenate([few, *_touched_ids(draw)])
    winner = _winner(values[racers] / draw.sampling.temperature, racers, draw)
    return _checked(winner, values, draw)


def _unchanged_few(
    logits: Tensor, draws: Sequence[Draw], rows: Sequence[int], kernels: Kernels | None
) -> list[NDArray[np.int64] | None]:
    """Of each of these rows the ids that can win among those that nothing changes, where a back end can tell."""
    if kernels is None or not any(is_raced(draws[row]) for row in rows):
        return [None] * len(rows)
    values = np.empty((len(rows), logits.shape[1]), np.float32)
    for own, row in zip(values, rows, strict=True):
        draw = draws[row]
        own[:] = logits[row].float().numpy()
        for token_ids in _touched_ids(draw):
            own[token_ids] = -np.inf
        if draw.allowed is not None:
            np.minimum(own, _LIMITS.take(draw.allowed.view(np.uint8)), out=own)
    warmth = _warmth([draws[row] if is_raced(draws[row]) else None for row in rows])
    found = kernels.contenders(torch.from_numpy(values), *warmth)
    if found is None:
        return [None] * len(rows)
    return [
        few[0].astype(np.int64) if few is not None and is_raced(draws[row]) else None
        for few, row in zip(found.few, rows, strict=True)
    ]


def _touched_ids(draw: Draw) -> list[NDArray[np.int64]]:
    """The ids whose logits bias, a ban of stop tokens, or penalties may change."""
    sampling = draw.sampling
    changed = [np.array([token_id for token_id, _ in sampling.logit_bias], np.int64)]
    if _bans_stops(draw):
        changed.append(np.array([*sampling.stop_token_ids], np.int64))
    if draw.counts is not None:
        changed.append(draw.counts.token_ids)
    return changed


def _draw_raced(logits: Tensor, draws: Sequence[Draw], contenders: Contenders, rows: Sequence[int]) -> list[int]:
    """Draw in each of these rows among its contenders; at once, because calls cost more than the numbers do."""
    if not rows:
        return []
    few = [found for row in rows if (found := contenders.few[row]) is not None]
    counts = [len(ids) for ids, _ in few]
    token_ids = np.concatenate([ids for ids, _ in few]).astype(np.int64)
    values = np.concatenate([values for _, values in few])
    scores = (values - np.repeat(contenders.greatest[[*rows]], counts)).astype(np.float64)
    with np.errstate(over="ignore"):
        scores /= np.repeat([draws[row].sampling.temperature for row in rows], counts)
    streams = np.array([noise_stream(draws[row].sampling.seed, draws[row].token_index) for row in rows], np.uint64)
    scores += _noise(np.repeat(streams, counts), token_ids)
    ends = np.cumsum(counts).tolist()
    firsts = [0, *ends[:-1]]
    winners = [int(token_ids[begin + scores[begin:end].argmax()]) for begin, end in zip(firsts, ends, strict=True)]
    return [
        _checked(winner, _below(logits[row], contenders.greatest[row]), draws[row])
        if truncates(draws[row].sampling)
        else winner
        for winner, row in zip(winners, rows, strict=True)
    ]


def _contenders(logits: Tensor, draws: Sequence[Draw], kernels: Kernels | None) -> Contenders:
    """Each row's greatest logit and, where a back end can tell, the few tokens that a plain draw may take."""
    if kernels is not None:
        raced = [draw if is_raced(draw) and not changes_logits(draw) else None for draw in draws]
        found = kernels.contenders(logits, *_warmth(raced))
        if found is not None:
            return found
    wide = logits.float()
    greatest_ids = wide.argmax(-1, keepdim=True)  # the first of equals; a NaN counts as the greatest
    greatest = wide.gather(-1, greatest_ids)
    return Contenders(greatest[:, 0].numpy(), greatest_ids[:, 0].int().numpy(), [None] * len(logits))


def _warmth(raced: Sequence[Draw | None]) -> tuple[NDArray[np.float32], NDArray[np.uint64]]:
    """Of each row its temperature, 0 where it has no race, and where its noise begins."""
    temperatures = [0.0 if draw is None else draw.sampling.temperature for draw in raced]
    streams = [0 if draw is None else noise_stream(draw.sampling.seed, draw.token_index) for draw in raced]
    return np.array(temperatures, np.float32), np.array(streams, np.uint64)


def _below(logits: Tensor, greatest: np.float32) -> NDArray[np.float32]:
    """How far below the greatest."""
    values: NDArray[np.float32] = logits.float().numpy()
    return values - greatest


def gumbel_noise(seed: int, token_index: int, token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Standard Gumbel noise of these token ids at this index of a completion."""
    return _noise(noise_stream(seed, token_index), token_ids)


def _noise(streams: np.uint64 | NDArray[np.uint64], token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
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


def _changed(values: NDArray[np.float64], draw: Draw) -> NDArray[np.float64]:
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


def _draw_one(below: Row, draw: Draw) -> int:
    """Draw from logits given relative to their greatest, all <= 0."""
    token_ids, scores = kept(below, draw.sampling)
    return _winner(scores, token_ids, draw)


def _checked(winner: int, below: Row, draw: Draw) -> int:
    """Who wins among all, where top_p and min_p leave it; else who wins among those that they leave."""
    if not truncates(draw.sampling) or is_surely_kept(below, winner, draw.sampling):
        return winner
    return _draw_one(below, draw)


def _winner(scores: NDArray[np.float64], token_ids: NDArray[np.int64], draw: Draw) -> int:
    noisy = scores + gumbel_noise(draw.sampling.seed, draw.token_index, token_ids)
    return int(token_ids[noisy.argmax()])


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
