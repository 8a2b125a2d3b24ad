"""How likely the model itself finds tokens: log-probabilities of its unchanged logits.

Each row is reduced by itself, in double precision and in one thread, so its bits depend on neither batch nor threads. Not
here: what is done to logits before a token is drawn from them (sampler.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from engine.plan import TokenLogprobs
from engine.truncation import largest_ids


class LogitsError(ArithmeticError):
    """A row has no greatest logit that is a number: the weights or the KV behind it are broken."""


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: int) -> tuple[TokenLogprobs, ...]:
    """Of one token per row of [num_rows, vocab_size]: its own logprob, and those of the row's `num_top` most likely tokens.

    Raises LogitsError where a row's probabilities are not numbers.
    """
    return tuple(_row_logprobs(row, token_id, num_top) for row, token_id in zip(logits, token_ids, strict=True))


def _row_logprobs(logits: Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    values = logits.double().numpy()
    greatest = values.max()
    if not np.isfinite(greatest):
        raise LogitsError(f"a row with logprobs: the greatest logit is {greatest}")
    normalizer = greatest + np.log(np.exp(values - greatest).sum())
    top_ids = largest_ids(values, num_top) if num_top else np.empty(0, np.int64)
    top = (values[top_ids] - normalizer).astype(np.float32)
    own = np.float32(values[token_id] - normalizer)
    return TokenLogprobs(float(own), tuple(zip(top_ids.tolist(), top.tolist(), strict=True)))
