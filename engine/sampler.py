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

Each row is drawn by itself, so its batch cannot matter.

Where a back end tells the few that can win, they alone are drawn from (race.py), beside what bias, bans or penalties have changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.draw import Draw, changed, changes_logits, is_raced, touched_ids
from engine.plan import BROKEN_ROW
from engine.race import ROWS_AT_ONCE, below, draw_one, draw_raced, is_winner_left, warmth, winner_of
from engine.truncation import truncates
from kernels.interface import Contenders, Kernels

_LIMITS: Final = np.array(
    [-np.inf, np.inf], np.float32
)  # of the logit of a token that is banned, and of one that is not


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
    are_changed: list[int] = []
    for row, draw in enumerate(draws):
        greatest = contenders.greatest[row]
        if not np.isfinite(greatest):
            continue
        if draw.allowed is not None and not changes_logits(draw._replace(allowed=None)):
            bound.append(row)
        elif changes_logits(draw):
            are_changed.append(row)
        elif draw.sampling.temperature == 0:
            token_ids[row] = int(contenders.greatest_ids[row])
        elif contenders.few[row] is not None and is_raced(draw):
            raced.append(row)
        else:
            token_ids[row] = draw_one(below(logits[row], greatest), draw)
    drawn: dict[int, int] = {} if kernels is None else draw_raced(logits, draws, contenders, raced, kernels)
    drawn |= _draw_bound(logits, draws, bound, kernels) | _draw_changed(logits, draws, are_changed, kernels)
    for row, token_id in drawn.items():
        token_ids[row] = token_id
    return token_ids


def _draw_bound(logits: Tensor, draws: Sequence[Draw], rows: Sequence[int], kernels: Kernels | None) -> dict[int, int]:
    """Draw in each of these rows among what its grammar allows."""
    if not rows:
        return {}
    values = np.empty((len(rows), logits.shape[1]), np.float32)
    for own, row in zip(values, rows, strict=True):
        allowed = draws[row].allowed
        assert allowed is not None
        np.minimum(logits[row].float().numpy(), _LIMITS.take(allowed.view(np.uint8)), out=own)  # faster than to choose
    drawn = sample(torch.from_numpy(values), [draws[row]._replace(allowed=None) for row in rows], kernels)
    return dict(zip(rows, drawn, strict=True))


def _draw_changed(
    logits: Tensor, draws: Sequence[Draw], rows: Sequence[int], kernels: Kernels | None
) -> dict[int, int]:
    """Draw in each of these rows from what bias, bans and penalties make of it."""
    drawn: dict[int, int] = {}
    for first in range(0, len(rows), ROWS_AT_ONCE):
        some = rows[first : first + ROWS_AT_ONCE]
        few = _unchanged_few(logits, draws, some, kernels)
        for row, unchanged in zip(some, few, strict=True):
            drawn[row] = _draw_one_changed(logits[row].double().numpy(), draws[row], unchanged, kernels)
    return drawn


def _draw_one_changed(
    values: NDArray[np.float64], draw: Draw, few: NDArray[np.int64] | None, kernels: Kernels | None
) -> int:
    """Draw from a row, which is changed in place. few: who of those that stay as they are can win; None: it isn't known."""
    values = changed(values, draw)
    token_id = int(values.argmax())
    if values[token_id] == -np.inf:
        return BROKEN_ROW
    if draw.sampling.temperature == 0:
        return token_id
    greatest = values[token_id]
    if few is not None and kernels is not None:
        racers = np.concatenate([few, *touched_ids(draw)])
        winner = winner_of(racers, (values[racers] - greatest) / draw.sampling.temperature, draw)
        if not truncates(draw.sampling) or is_winner_left(values - greatest, winner, draw, kernels):
            return winner.token_id
    values -= greatest
    return draw_one(values, draw)


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
        for token_ids in touched_ids(draw):
            own[token_ids] = -np.inf
        if draw.allowed is not None:
            np.minimum(own, _LIMITS.take(draw.allowed.view(np.uint8)), out=own)
    raced = [draws[row] if is_raced(draws[row]) else None for row in rows]
    found = kernels.contenders(torch.from_numpy(values), *warmth(raced))
    if found is None:
        return [None] * len(rows)
    return [
        few[0].astype(np.int64) if few is not None and is_raced(draws[row]) else None
        for few, row in zip(found.few, rows, strict=True)
    ]


def _contenders(logits: Tensor, draws: Sequence[Draw], kernels: Kernels | None) -> Contenders:
    """Each row's greatest logit and, where a back end can tell, the few tokens that a plain draw may take."""
    if kernels is not None:
        raced = [draw if is_raced(draw) and not changes_logits(draw) else None for draw in draws]
        found = kernels.contenders(logits, *warmth(raced))
        if found is not None:
            return found
    wide = logits.float()
    greatest_ids = wide.argmax(-1, keepdim=True)  # the first of equals; a NaN counts as the greatest
    greatest = wide.gather(-1, greatest_ids)
    return Contenders(greatest[:, 0].numpy(), greatest_ids[:, 0].int().numpy(), [None] * len(logits))
