"""A model's chat template, which comes with the model: a conversation, and the tools that may be called, as one text.

Templates run in jinja2's sandbox (they are strangers'), and without a clock: one that writes today's date falls back to its own.
A model may have several, of which `default` is for conversations and `tool_use` for those with tools.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

_FAULTS: Final = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError)


class ModelDirectoryError(ValueError):
    """The model directory cannot be used; one line that names the file and what is wrong with it."""


class TemplateRefusal(ValueError):
    """The model's chat template cannot take these messages."""


class ChatTemplate:
    """What writes a conversation the way its model was taught."""

    def __init__(self, source: str, tool_source: str) -> None:
        """`tool_source`: what writes it where there are tools; raises jinja2.TemplateError."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        self._plain = environment.from_string(source)
        self._with_tools = environment.from_string(tool_source)
        takes_tools = "tools" in find_undeclared_variables(environment.parse(tool_source))
        self.tool_source = tool_source if takes_tools else None  # None: it never mentions them

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], **more: object) -> str:
        """The text; raises TemplateRefusal, also where it would silently say nothing of calls and what they have brought."""
        template = self._with_tools if tools else self._plain
        told: dict[str, Any] = {"tools": tools} if tools else {}  # templates ask whether there are any, in many ways
        try:
            text = template.render(messages=messages, **told, **more)
        except _FAULTS as fault:
            raise TemplateRefusal(f"the chat template refuses the messages: {fault}") from fault
        for name, others in (
            ("tool_calls", _without_calls(messages)),
            ("messages of role tool", _without_results(messages)),
        ):
            if others != messages and _is(text, template, others, told | more):
                raise TemplateRefusal(
                    f"this model's chat template leaves {name} out, and the model would not hear of them"
                )
        return text


def read_template(directory: Path, settings: Mapping[str, Any]) -> ChatTemplate | None:
    """The chat template of its own file, else of the tokenizer's config: one text, or several with names."""
    own_file = directory / "chat_template.jinja"
    source: object = own_file.read_text(encoding="utf-8") if own_file.is_file() else settings.get("chat_template")
    named = {each.get("name"): each.get("template") for each in source} if isinstance(source, list) else {}
    if isinstance(source, list):
        source = named.get("default")
    if source is None:
        return None
    try:
        return ChatTemplate(str(source), str(named.get("tool_use") or source))
    except jinja2.TemplateError as error:
        raise ModelDirectoryError(f"{directory}: the chat template is not valid: {error}") from error


def _without_calls(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    return [{name: value for name, value in each.items() if name != "tool_calls"} for each in messages]


def _without_results(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    return [each for each in messages if each["role"] != "tool"]


def _is(text: str, template: jinja2.Template, messages: Sequence[Mapping[str, Any]], more: Mapping[str, Any]) -> bool:
    """Whether the template writes these messages as the very same text; no, if it cannot write them."""
    try:
        return template.render(messages=messages, **more) == text
    except _FAULTS:
        return False


def _to_json(value: object, indent: int | None = None, separators: tuple[str, str] | None = None) -> str:
    """As `transformers` does it: no HTML escapes, no ASCII escapes."""
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators)


def _refuse(message: str) -> NoReturn:
    """What templates call `raise_exception`."""
    raise jinja2.TemplateError(message)
