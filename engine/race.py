"""Draw from rows of which a back end tells the few tokens that can win at all, without sorting them.

Who wins among all wins among any that it is one of. So the winner of a row is held against top_p and min_p: how much of the
probability comes before it takes one pass. Mostly it is left: by top_p as often as top_p says. Where it is out, so is whatever
is no likelier, and those before it run once more; where that is too close to tell, the row is truncated in full.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.draw import Draw
from engine.gumbel import gumbel_noise, noise_of, noise_stream
from engine.truncation import Row, is_left, kept, truncates
from kernels.interface import Contenders, Few, Kernels

ROWS_AT_ONCE: Final = 8  # that are copied; a row of a large vocabulary is a megabyte, and so many share a call


class Winner(NamedTuple):
    """Of a row."""

    token_id: int
    score: float


def draw_raced(
    logits: Tensor, draws: Sequence[Draw], contenders: Contenders, rows: Iterable[int], kernels: Kernels
) -> dict[int, int]:
    """Draw in each of these rows of [num_rows, vocab_size], whose contenders are known."""
    drawn: dict[int, int] = {}
    few = {row: contenders.few[row] for row in rows}
    while few:
        known = {row: found for row, found in few.items() if found is not None}
        winners = _winners(draws, contenders.greatest, known)
        verdicts = _verdicts(logits, draws, contenders.greatest, winners, kernels)
        for row in few:
            if row not in known or verdicts[row] is None:
                drawn[row] = draw_one(below(logits[row], contenders.greatest[row]), draws[row])
            elif verdicts[row]:
                drawn[row] = winners[row].token_id
        out = {row: winner.token_id for row, winner in winners.items() if row not in drawn}
        few = _those_before(logits, draws, contenders.greatest, out, kernels)
    return drawn


def draw_one(row: Row, draw: Draw) -> int:
    """Draw from logits given relative to their greatest, all <= 0, looking at each."""
    token_ids, scores = kept(row, draw.sampling)
    return winner_of(token_ids, scores, draw).token_id


def winner_of(token_ids: NDArray[np.int64], scores: NDArray[np.float64], draw: Draw) -> Winner:
    """Whose score and noise are the greatest."""
    best = int((scores + gumbel_noise(draw.sampling.seed, draw.token_index, token_ids)).argmax())
    return Winner(int(token_ids[best]), float(scores[best]))


def below(logits: Tensor, greatest: np.float32) -> NDArray[np.float32]:
    """How far below the greatest."""
    values: NDArray[np.float32] = logits.float().numpy()
    return values - greatest


def is_winner_left(row: NDArray[np.float64], winner: Winner, draw: Draw, kernels: Kernels) -> bool | None:
    """Whether top_p and min_p leave who has won among all of a row that is told relative to its greatest. None: too close."""
    logits = torch.from_numpy(row.astype(np.float32))[None]
    return _verdicts(logits, [draw], np.zeros(1, np.float32), {0: winner}, kernels)[0]


def _winners(draws: Sequence[Draw], greatest: NDArray[np.float32], few: Mapping[int, Few]) -> dict[int, Winner]:
    """Of each of these rows; at once, because calls cost more than the numbers do."""
    if not few:
        return {}
    rows = [*few]
    counts = [len(ids) for ids, _ in few.values()]
    token_ids = np.concatenate([ids for ids, _ in few.values()]).astype(np.int64)
    values = np.concatenate([values for _, values in few.values()])
    scores = (values - np.repeat(greatest[rows], counts)).astype(np.float64)
    with np.errstate(over="ignore"):
        scores /= np.repeat([draws[row].sampling.temperature for row in rows], counts)
    streams = np.array([noise_stream(draws[row].sampling.seed, draws[row].token_index) for row in rows], np.uint64)
    noisy = scores + noise_of(np.repeat(streams, counts), token_ids)
    ends = np.cumsum(counts).tolist()
    firsts = [0, *ends[:-1]]
    best = [begin + int(noisy[begin:end].argmax()) for begin, end in zip(firsts, ends, strict=True)]
    return {row: Winner(int(token_ids[at]), float(scores[at])) for row, at in zip(rows, best, strict=True)}


def _verdicts(
    logits: Tensor,
    draws: Sequence[Draw],
    greatest: NDArray[np.float32],
    winners: Mapping[int, Winner],
    kernels: Kernels,
) -> dict[int, bool | None]:
    """Whether top_p and min_p leave these rows' winners. None: too close to tell."""
    verdicts: dict[int, bool | None] = dict.fromkeys(winners, True)
    asked = [row for row in winners if truncates(draws[row].sampling)]
    if not asked:
        return verdicts
    temperatures, token_ids = np.zeros(len(draws), np.float32), np.zeros(len(draws), np.int32)
    for row in asked:
        temperatures[row], token_ids[row] = draws[row].sampling.temperature, winners[row].token_id
    shares = kernels.shares(logits, temperatures, greatest, token_ids)
    for row in asked:
        if shares is None:
            verdicts[row] = None
        else:
            above, beside = float(shares.above[row]), float(shares.beside[row])
            verdicts[row] = is_left(above, beside, winners[row].score, draws[row].sampling)
    return verdicts


def _those_before(
    logits: Tensor,
    draws: Sequence[Draw],
    greatest: NDArray[np.float32],
    out: Mapping[int, int],
    kernels: Kernels,
) -> dict[int, Few | None]:
    """Of each of these rows who can win among those that are likelier than this token. None: too many to tell."""
    few: dict[int, Few | None] = {}
    for first in range(0, len(out), ROWS_AT_ONCE):
        few |= _some_before(logits, draws, greatest, dict([*out.items()][first : first + ROWS_AT_ONCE]), kernels)
    return few


def _some_before(
    logits: Tensor, draws: Sequence[Draw], greatest: NDArray[np.float32], out: Mapping[int, int], kernels: Kernels
) -> dict[int, Few | None]:
    values = np.empty((len(out), logits.shape[1]), np.float32)
    for own, (row, token_id) in zip(values, out.items(), strict=True):
        heights = below(logits[row], greatest[row])
        own[:] = np.where(heights > heights[token_id], logits[row].float().numpy(), np.float32(-np.inf))
    found = kernels.contenders(torch.from_numpy(values), *warmth([draws[row] for row in out]))
    few = [None] * len(out) if found is None else found.few
    return dict(zip(out, few, strict=True))


def warmth(raced: Sequence[Draw | None]) -> tuple[NDArray[np.float32], NDArray[np.uint64]]:
    """Of each row its temperature, 0 where it has no race, and where its noise begins."""
    temperatures = [0.0 if draw is None else draw.sampling.temperature for draw in raced]
    streams = [0 if draw is None else noise_stream(draw.sampling.seed, draw.token_index) for draw in raced]
    return np.array(temperatures, np.float32), np.array(streams, np.uint64)
