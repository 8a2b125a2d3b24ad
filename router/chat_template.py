"""A model's chat template, which comes with the model: a conversation, and the tools that may be called, as one text.

Templates run in jinja2's sandbox (they are strangers') and find there what `transformers` gives them, and so vLLM: today's date,
`tools` and `documents` that are null where there are none, and the tag `generation`, which is for training.
The clock is read once for a conversation, and a conversation is written once: what is retried has the prompt that it had.
A model may have several, of which `default` is for conversations and `tool_use` for those with tools.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.thought_text import CLOSES

NO_KWARGS: Final[Mapping[str, Any]] = MappingProxyType({})
SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
# What a template is told by the request, the model and the router; a client that could say it again would contradict them.
TOLD_BY_OTHERS: Final = frozenset(
    {
        *("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"),
        *("strftime_now", "raise_exception", *SPECIAL_TOKENS),
    }
)
# A macro that calls itself for what is within a schema comes to the end of the stack.
_FAULTS: Final = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError),
    RecursionError,
)


_MARK: Final = "\ue000{}\ue001"  # of private use, with a number that makes it one that nobody has said


class ModelDirectoryError(ValueError):
    """The model directory cannot be used; one line that names the file and what is wrong with it."""


class TemplateRefusal(ValueError):
    """The model's chat template cannot take these messages."""


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` around what an assistant said, by which trainers find its tokens: it is as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 has it so

    def parse(self, parser: Parser) -> nodes.Node:
        """The tag's body; what it sets does not reach what stands behind it."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class ChatTemplate:
    """What writes a conversation the way its model was taught."""

    def __init__(self, source: str, tool_source: str) -> None:
        """`tool_source`: what writes it where there are tools; raises jinja2.TemplateError."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        self._plain = environment.from_string(source)
        self._with_tools = environment.from_string(tool_source)
        takes_tools = "tools" in find_undeclared_variables(environment.parse(tool_source))
        self.tool_source = tool_source if takes_tools else None  # None: it never mentions them
        self.thinks = CLOSES in source or CLOSES in tool_source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any] = NO_KWARGS,
        **more: object,
    ) -> str:
        """The text; raises TemplateRefusal, also where it would silently say nothing of calls and what they have brought.

        Nor of what a developer says: that is told by the system where the template has no word for the role.
        `kwargs`: what the client tells the template besides; one that has no word for it says nothing of it.
        """
        template = self._with_tools if tools or any(map(_is_of_tools, messages)) else self._plain
        told: dict[str, Any] = {"documents": None, **kwargs, "tools": tools or None, **_now(), **more}
        messages, text = _with_developers(template, messages, told)
        for name, others in (
            ("tool_calls", _without_calls(messages)),
            ("messages of role tool", _without_results(messages)),
        ):
            if others != messages and _is(text, template, others, told):
                raise TemplateRefusal(
                    f"this model's chat template leaves {name} out, and the model would not hear of them"
                )
        return text

    def render_open(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any] = NO_KWARGS,
        **more: object,
    ) -> str:
        """The text up to the end of the last message's, which is to go on; raises TemplateRefusal, also where that is not found.

        As transformers' `continue_final_message`. A mark behind the message says where it ends, since the same words may come again
        behind it, and what stands before the mark must be the text without it: but for white space that the template strips.
        """
        more = {**more, **_now(), "add_generation_prompt": False}
        text = self.render(messages, tools, kwargs, **more)
        mark = next(each for each in map(_MARK.format, itertools.count()) if each not in text)
        marked = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + mark}]
        before, *behind = self.render(marked, tools, kwargs, **more).split(mark)
        for begin in (before, before.rstrip()):
            if len(behind) == 1 and text.startswith(begin):
                return begin
        raise TemplateRefusal("this model's chat template does not write the last message as it is, to go on behind it")


def read_template(directory: Path, settings: Mapping[str, Any]) -> ChatTemplate | None:
    """The chat template of files of its own, else of the tokenizer's config: one text, or several with names."""
    named = _files(directory) or _named(directory, settings.get("chat_template"))
    source = named.get("default")
    if source is None:
        return None
    try:
        return ChatTemplate(source, named.get("tool_use") or source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise ModelDirectoryError(f"{directory}: the chat template is not valid: {error}") from error


def _files(directory: Path) -> dict[str, str]:
    """Templates by name, as transformers writes several: `default` in the one file, each other in a file of its own."""
    found = {"default": directory / "chat_template.jinja"}
    found |= {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    return {name: _read_text(path) for name, path in found.items() if path.is_file()}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelDirectoryError(f"{path}: {error.strerror}") from error
    except UnicodeError as error:
        raise ModelDirectoryError(f"{path}: is not UTF-8: {error}") from error


def _named(directory: Path, said: object) -> dict[str, str]:
    """The same of what tokenizer_config.json says: a text, or several with names."""
    named = {"default": said} if said is None or isinstance(said, str) else said
    if isinstance(said, list) and all(isinstance(each, dict) for each in said):
        named = {str(each.get("name")): each.get("template") for each in said}
    if not isinstance(named, dict) or not all(isinstance(each, str | None) for each in named.values()):
        raise ModelDirectoryError(
            f"{directory / 'tokenizer_config.json'}: chat_template is neither a text nor texts with names"
        )
    return {name: source for name, source in named.items() if source is not None}


def _with_developers(
    template: jinja2.Template, messages: Sequence[Mapping[str, Any]], told: Mapping[str, Any]
) -> tuple[Sequence[Mapping[str, Any]], str]:
    """The messages, with roles that the template knows, and their text; raises TemplateRefusal.

    `developer` is OpenAI's newer name for `system` (Model Spec); the templates of most models know the older one alone.
    """
    silent = _without_instructions(messages)
    if silent == messages:
        return messages, _write(template, messages, told)
    with suppress(TemplateRefusal):  # the system may still say it
        text = _write(template, messages, told)
        if not _is(text, template, silent, told):
            return messages, text
    messages, silent = _as_system(messages), _as_system(silent)
    text = _write(template, messages, told)
    if _is(text, template, silent, told):
        raise TemplateRefusal(
            "this model's chat template leaves messages of role developer out, of role system too,"
            " and the model would not hear of them"
        )
    return messages, text


def _write(template: jinja2.Template, messages: Sequence[Mapping[str, Any]], told: Mapping[str, Any]) -> str:
    try:
        return template.render({**told, "messages": messages})
    except _FAULTS as fault:
        raise TemplateRefusal(f"the chat template refuses the messages: {fault}") from fault


def _without_instructions(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Without what developers say; white space says nothing, and templates may strip it."""
    return [
        {**each, "content": ""} if each["role"] == "developer" and each["content"].strip() else each
        for each in messages
    ]


def _as_system(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    return [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]


def _is_of_tools(message: Mapping[str, Any]) -> bool:
    """Whether a tool is called there, or answers: where the model has a template for that, it is the one that knows the words."""
    return message["role"] == "tool" or bool(message.get("tool_calls"))


def _without_calls(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    return [{name: value for name, value in each.items() if name != "tool_calls"} for each in messages]


def _without_results(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    return [each for each in messages if each["role"] != "tool"]


def _is(text: str, template: jinja2.Template, messages: Sequence[Mapping[str, Any]], told: Mapping[str, Any]) -> bool:
    """Whether the template writes these messages as the very same text; no, if it cannot write them.

    They are written only up to the first piece that is another.
    """
    at = 0
    try:
        for piece in template.generate({**told, "messages": messages}):
            if not text.startswith(piece, at):
                return False
            at += len(piece)
    except _FAULTS:
        return False
    return at == len(text)


def _now() -> dict[str, Any]:
    """One instant: what is written twice is to be the same text."""
    return {"strftime_now": datetime.now().strftime}


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As `transformers` does it, in its order: no HTML escapes, and ASCII escapes only if asked for."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    """What templates call `raise_exception`."""
    raise jinja2.TemplateError(message)
