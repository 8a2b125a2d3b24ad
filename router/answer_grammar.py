"""Which grammar binds the answers of a body: a format's, that of calls, or one of either. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from router.chat_types import ChatBody
from router.either_grammar import either_grammar
from router.events import Grammar
from router.forced_calls import forced_grammar, is_forced
from router.openai_types import CompletionBody
from router.structured import grammar_of
from router.thought_grammar import behind_thought
from router.thought_text import TAGS, Thinking
from router.tool_calls import ToolUse


class TokenText(Protocol):
    """What must be known of a model's text."""

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """Its own."""

    def spelled(self, tokens: Collection[str]) -> Mapping[int, str]:
        """Those of the tokens that are special, and so without text, by id."""


def is_bound(body: CompletionBody | ChatBody) -> bool:
    """Whether it may ask for a grammar."""
    has_rules = body.response_format is not None or body.structured_outputs is not None
    return has_rules or (isinstance(body, ChatBody) and is_forced(body))


def answer_grammar(
    body: CompletionBody | ChatBody, tools: ToolUse | None, thinking: Thinking | None, text: TokenText
) -> Grammar | None:
    """What its answers must fit; None: any text. Raises ApiError.

    Where the prompt has begun a thought that comes first, and else nothing does: who binds an answer wants it at once.
    """
    grammar = _bare(body, tools, text)
    if grammar is None or thinking is not Thinking.BEGUN:
        return grammar
    return behind_thought(grammar, text.spelled(TAGS))


def _bare(body: CompletionBody | ChatBody, tools: ToolUse | None, text: TokenText) -> Grammar | None:
    ends = text.stop_token_ids
    if isinstance(body, ChatBody) and is_forced(body):
        return forced_grammar(body, ends)
    if isinstance(body, ChatBody) and tools is not None and tools.is_either:
        return either_grammar(body, tools.syntax, text.spelled(tools.syntax.tokens), ends)
    return grammar_of(body.response_format, body.structured_outputs, ends, ignores_end=body.ignore_eos)
