"""Logprobs in the two shapes of the OpenAI API. Pure.

There is one entry per completion token, a stop token and the tokens of a stop string included although they are no text; with
`echo`, one per prompt token before them, of which the first has none: nothing precedes it. A logprob that JSON cannot hold
(of a token that cannot be drawn) reads -9999. Tokens are named as spelling.py says.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from proto import baton_pb2 as pb
from router.spelling import Spelling

LOWEST: Final = -9999.0


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of the answer."""

    token_id: int
    offset: int  # characters of the choice's text before it
    logprobs: pb.TokenLogprobs | None  # None: the prompt's first


def completion_logprobs(tokens: Sequence[ScoredToken], num_top: int, spelling: Spelling) -> dict[str, Any]:
    """The shape of /v1/completions; `top_logprobs` names the token itself too if it is not among the most likely."""
    return {
        "tokens": [spelling.name_of(token.token_id) for token in tokens],
        "token_logprobs": [None if token.logprobs is None else _number(token.logprobs.logprob) for token in tokens],
        "top_logprobs": [
            None if token.logprobs is None else _by_name(token.token_id, token.logprobs, num_top, spelling)
            for token in tokens
        ],
        "text_offset": [token.offset for token in tokens],
    }


def chat_logprobs(tokens: Sequence[ScoredToken], num_top: int, spelling: Spelling) -> dict[str, Any]:
    """The shape of /v1/chat/completions."""
    content = [
        _chat_entry(token.token_id, token.logprobs.logprob, spelling)
        | {"top_logprobs": [_chat_entry(top.token_id, top.logprob, spelling) for top in token.logprobs.top[:num_top]]}
        for token in tokens
        if token.logprobs is not None
    ]
    return {"content": content, "refusal": None}


def _chat_entry(token_id: int, logprob: float, spelling: Spelling) -> dict[str, Any]:
    return {
        "token": spelling.name_of(token_id),
        "logprob": _number(logprob),
        "bytes": list(spelling.bytes_of(token_id)),
    }


def _by_name(token_id: int, logprobs: pb.TokenLogprobs, num_top: int, spelling: Spelling) -> dict[str, float]:
    """Name -> logprob, most likely first; of tokens with equal names the likeliest counts."""
    named: dict[str, float] = {}
    top = logprobs.top[:num_top]
    for each_id, logprob in _with_own([(each.token_id, each.logprob) for each in top], token_id, logprobs.logprob):
        named.setdefault(spelling.name_of(each_id), _number(logprob))
    return named


def _with_own(top: list[tuple[int, float]], token_id: int, logprob: float) -> Iterable[tuple[int, float]]:
    return top if any(each_id == token_id for each_id, _ in top) else [*top, (token_id, logprob)]


def _number(logprob: float) -> float:
    return logprob if LOWEST < logprob < math.inf else LOWEST
