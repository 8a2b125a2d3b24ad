"""Thoughts and tool calls in the shapes of /v1/chat/completions: a whole message, and a stream's deltas. Pure.

What the model thinks is `reasoning_content`, as DeepSeek, SGLang and vLLM have it; a message without a thought has no such field.

A delta names a call by its index; its id, type and name come once, with its beginning, its arguments in as many pieces as the
model's tokens bring. A whole message of a choice that was handed up ends as far as it had got; one that goes on with it begins
there, so that the arguments of a call in both, under one id, are those of the run without faults one behind the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.answer import Piece
from router.choice_reader import ChoiceReader
from router.events import RESCHEDULED
from router.tool_text import Called, Said, Thought, Told


def told_of(reader: ChoiceReader, piece: Piece) -> list[Told]:
    """What a piece lets be told, and what was held back, if it is the last one and nobody goes on behind it."""
    told = reader.push(piece.text, piece.offsets)
    return told if piece.finish_reason in (None, RESCHEDULED) else [*told, *reader.finish()]


def delta_of(reader: ChoiceReader, told: Sequence[Told]) -> dict[str, Any]:
    """What a chunk says of it; empty: nothing."""
    delta: dict[str, Any] = {}
    if thought := thought_of(told):
        delta["reasoning_content"] = thought
    if content := content_of(told):
        delta["content"] = content
    entries: dict[int, dict[str, Any]] = {}
    for each in told:
        if isinstance(each, Called):
            entry = entries.setdefault(each.index, {"index": each.index, "function": {"arguments": ""}})
            entry["function"]["arguments"] += each.arguments
            if each.name is not None:
                arguments = entry["function"]["arguments"]
                call = reader.calls[each.index]
                function = {"name": call.name, "arguments": arguments}
                entry |= {"id": call.id, "type": "function", "function": function}
    return delta | ({"tool_calls": list(entries.values())} if entries else {})


def message_of(reader: ChoiceReader, told: Sequence[Told]) -> dict[str, Any]:
    """The whole message of an assistant."""
    arguments: dict[int, list[str]] = {}
    for each in told:
        if isinstance(each, Called):
            arguments.setdefault(each.index, []).append(each.arguments)
    content = content_of(told)
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if thought := thought_of(told):
        message["reasoning_content"] = thought
    if not arguments:
        return message
    entries = [
        {
            "id": reader.calls[index].id,
            "type": "function",
            "function": {"name": reader.calls[index].name, "arguments": "".join(parts)},
        }
        for index, parts in arguments.items()
    ]
    return message | {"content": content or None, "tool_calls": entries}


def content_of(told: Sequence[Told]) -> str:
    """What is said, in one."""
    return "".join([each.text for each in told if isinstance(each, Said)])


def thought_of(told: Sequence[Told]) -> str:
    """What is thought, in one."""
    return "".join([each.text for each in told if isinstance(each, Thought)])
