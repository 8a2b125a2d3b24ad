"""Logprobs in the two shapes of the OpenAI API. Pure.

There is one entry per completion token, a stop token and the tokens of a stop string included although they are no text; with
`echo`, one per prompt token before them, of which the first has none: nothing precedes it. A logprob that JSON cannot hold
(of a token that cannot be drawn) reads -9999. Tokens are named as spelling.py says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from proto import baton_pb2 as pb
from router.json_parts import ENTRIES_PER_SLICE, Sliced
from router.spelling import Spelling

LOWEST: Final = -9999.0


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of the answer."""

    token_id: int
    offset: int  # characters of the choice's text before it
    logprobs: pb.TokenLogprobs | None  # None: the prompt's first


def completion_logprobs(tokens: Sequence[ScoredToken], num_top: int, spelling: Spelling) -> dict[str, Sliced]:
    """The shape of /v1/completions; `top_logprobs` names the token itself too if it is not among the most likely."""

    def name(token: ScoredToken) -> str:
        return spelling.name_of(token.token_id)

    def own(token: ScoredToken) -> float | None:
        return None if token.logprobs is None else _number(token.logprobs.logprob)

    def top(token: ScoredToken) -> dict[str, float] | None:
        return None if token.logprobs is None else _by_name(token.token_id, token.logprobs, num_top, spelling)

    return {
        "tokens": _sliced(name, tokens, 0),
        "token_logprobs": _sliced(own, tokens, 0),
        "top_logprobs": _sliced(top, tokens, num_top),
        "text_offset": _sliced(lambda token: token.offset, tokens, 0),
    }


def chat_logprobs(tokens: Sequence[ScoredToken], num_top: int, spelling: Spelling) -> dict[str, Sliced | None]:
    """The shape of /v1/chat/completions."""

    def entry(token: ScoredToken) -> dict[str, Any]:
        assert token.logprobs is not None
        top = [_chat_entry(each.token_id, each.logprob, spelling) for each in token.logprobs.top[:num_top]]
        return _chat_entry(token.token_id, token.logprobs.logprob, spelling) | {"top_logprobs": top}

    scored = [token for token in tokens if token.logprobs is not None]
    return {"content": _sliced(entry, scored, num_top), "refusal": None}


def _sliced(value_of: Callable[[ScoredToken], object], tokens: Sequence[ScoredToken], num_top: int) -> Sliced:
    size = ENTRIES_PER_SLICE // (num_top + 1)
    return Sliced([value_of(each) for each in tokens[at : at + size]] for at in range(0, len(tokens), size))


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
