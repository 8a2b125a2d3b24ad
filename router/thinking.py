"""Whether the model thinks before it answers a chat, and whether its prompt has begun the thought. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal

from router.chat_types import ChatBody
from router.thought_text import CLOSES, OPENS, Thinking

ReasoningParser = Literal["auto", "think", "none"]
_END_TOKENS: Final = 16  # of a prompt, in which a tag of several tokens and line breaks have room


def thinking_of(
    body: ChatBody, prompt_token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> Thinking | None:
    """Of a model that may think. None: all of its text is said, since the prompt has ended the thought.

    `decode`: the text of tokens, special ones too.
    """
    if body.continue_final_message:
        _, opened, thought = str(body.messages[-1].for_template()["content"]).rpartition(OPENS)
        return Thinking.BEGUN if opened and CLOSES not in thought else None
    end = decode(prompt_token_ids[-_END_TOKENS:]).rstrip()
    if end.endswith(CLOSES):
        return None
    return Thinking.BEGUN if end.endswith(OPENS) else Thinking.MAYBE
