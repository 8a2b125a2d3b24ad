"""Tool calls in the shapes of /v1/chat/completions: a whole message, and a stream's deltas. Pure.

A delta names a call by its index; its id, type and name come once, with its beginning, its arguments in as many pieces as the
model's tokens bring. A whole message of a choice that was handed up ends as far as it had got; one that goes on with it begins
there, so that the arguments of a call in both, under one id, are those of the run without faults one behind the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.events import RESCHEDULED
from router.tool_calls import ChoiceCalls, content_of
from router.tool_text import Called, Told


def told_of(calls: ChoiceCalls, text: str, finish_reason: str | None) -> list[Told]:
    """What a piece of text lets be told, and what was held back, if it is the last one and nobody goes on behind it."""
    told = calls.push(text)
    return told if finish_reason in (None, RESCHEDULED) else [*told, *calls.finish()]


def delta_of(calls: ChoiceCalls, told: Sequence[Told]) -> dict[str, Any]:
    """What a chunk says of it; empty: nothing."""
    delta: dict[str, Any] = {}
    if content := content_of(told):
        delta["content"] = content
    entries: dict[int, dict[str, Any]] = {}
    for each in told:
        if isinstance(each, Called):
            entry = entries.setdefault(each.index, {"index": each.index, "function": {"arguments": ""}})
            entry["function"]["arguments"] += each.arguments
            if each.name is not None:
                arguments = entry["function"]["arguments"]
                call = calls.calls[each.index]
                function = {"name": call.name, "arguments": arguments}
                entry |= {"id": call.id, "type": "function", "function": function}
    return delta | ({"tool_calls": list(entries.values())} if entries else {})


def message_of(calls: ChoiceCalls, told: Sequence[Told]) -> dict[str, Any]:
    """The whole message of an assistant."""
    arguments: dict[int, list[str]] = {}
    for each in told:
        if isinstance(each, Called):
            arguments.setdefault(each.index, []).append(each.arguments)
    content = content_of(told)
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if not arguments:
        return message
    entries = [
        {
            "id": calls.calls[index].id,
            "type": "function",
            "function": {"name": calls.calls[index].name, "arguments": "".join(parts)},
        }
        for index, parts in arguments.items()
    ]
    return message | {"content": content or None, "tool_calls": entries}
