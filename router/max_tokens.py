"""How many tokens an answer may have, by the fields of a body that say so, and what contradicts them. Pure."""

from __future__ import annotations

from router.chat_types import ChatBody
from router.openai_types import CompletionBody, bad_request
from router.wrong_values import shown


def chat_max_tokens(body: ChatBody) -> int | None:
    """A chat's; None: what the prompt leaves. Raises ApiError."""
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs", "needs logprobs to be true")
    if body.max_tokens == 0:
        raise bad_request("max_tokens", "must be greater than or equal to 1, not 0")
    if body.max_completion_tokens is None:
        return body.max_tokens
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise bad_request("max_completion_tokens", "contradicts max_tokens; give one of them")
    return body.max_completion_tokens


def completion_max_tokens(body: CompletionBody) -> int | None:
    """A completion's; None: the default. 1 for 0 with echo, of which nobody sees the token. Raises ApiError."""
    if body.best_of not in (None, body.n):
        raise bad_request("best_of", f"must equal n, {body.n}, not {shown(body.best_of)}")
    if body.max_tokens == 0:
        if not body.echo:
            raise bad_request("max_tokens", "must be greater than or equal to 1, not 0, without echo")
        if body.min_tokens > 0:
            raise bad_request("min_tokens", f"must be at most max_tokens, 0, not {shown(body.min_tokens)}")
        return 1
    return body.max_tokens
