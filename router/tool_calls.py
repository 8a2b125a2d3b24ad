"""How the tools of one chat are called: whether this model can, in which syntax, and what of its answer is a call. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from router.chat_types import ChatBody
from router.forced_calls import is_forced
from router.openai_types import bad_request
from router.tool_syntax import LIST, SYNTAXES, ToolSyntax, call_id, digest_of, syntax_of
from router.tool_text import Called, Said, Told, ToolReader

AUTOMATIC = "auto"  # the template says how the model writes calls


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What the reader of an answer needs to know."""

    syntax: ToolSyntax
    names: frozenset[str]
    is_parallel: bool  # else only the first call counts
    # A grammar sees to it that the text is nothing but calls, and begins with one, or has none at all.
    is_either: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """A call that has begun."""

    id: str
    name: str


def tool_use_of(body: ChatBody, tool_template: str | None, parser: str) -> ToolUse | None:
    """How this chat's tools are called; None: it has none, or must not call them.

    `parser`: AUTOMATIC, or the name of a syntax. Raises ApiError.
    """
    if not body.tools or body.tool_choice == "none":
        return None
    if tool_template is None:
        raise bad_request("tools", "this model's chat template has no tools", "unsupported_parameter")
    syntax = syntax_of(tool_template) if parser == AUTOMATIC else SYNTAXES[parser]
    if is_forced(body):  # by a grammar, whatever the model is used to
        syntax = replace(LIST, has_short_ids=syntax is not None and syntax.has_short_ids)
    if syntax is None:
        message = "how this model writes tool calls is not known here; the router's --tool-parser can say it"
        raise bad_request("tools", message, "unsupported_parameter")
    if body.structured_outputs is not None:
        message = "cannot be combined with tools, unless tool_choice is none"
        raise bad_request("structured_outputs", message, "unsupported_parameter")
    is_either = body.response_format not in (None, {"type": "text"}) and not is_forced(body)
    return ToolUse(syntax, frozenset(tool.function.name for tool in body.tools), body.parallel_tool_calls, is_either)


class ChoiceCalls:
    """One choice's text, from what it says to what it calls."""

    def __init__(self, use: ToolUse, seed: int, prompt_token_ids: Sequence[int]) -> None:
        self._use = use
        self._seed = seed
        self._prompt_token_ids = prompt_token_ids
        self._prompt_digest = ""  # none is known before the first call
        self._reader = ToolReader(use.syntax, use.names)
        # The text so far where it may yet begin with a mark, which decides; within an answer's strings a mark means nothing.
        self._opening = "" if use.is_either and not use.syntax.bare else None
        self._is_answer = False
        self.calls: list[Call] = []  # by index

    def push(self, text: str) -> list[Told]:
        """What more text lets be told."""
        if self._opening is not None:
            opening, mark = self._opening + text, self._use.syntax.mark
            if mark.startswith(opening.lstrip()):
                self._opening = opening
                return []
            self._opening, text = None, opening
            self._is_answer = not opening.lstrip().startswith(mark)
        if self._is_answer:
            return [Said(text)] if text else []
        return self._counted(self._reader.push(text))

    def finish(self) -> list[Told]:
        """What is left, since none follows."""
        if self._opening is not None or self._is_answer:
            opening, self._opening = self._opening, None
            return [Said(opening)] if opening else []
        return self._counted(self._reader.finish())

    def finish_reason(self, reason: str | None) -> str | None:
        """The choice's own reason, or that it calls tools."""
        return "tool_calls" if reason == "stop" and self.calls else reason

    def _counted(self, told: Sequence[Told]) -> list[Told]:
        counted: list[Told] = []
        for each in told:
            if isinstance(each, Called):
                if each.index and not self._use.is_parallel:
                    continue
                if each.name is not None:
                    self.calls.append(Call(self._id_of(each.index), each.name))
            counted.append(each)
        return counted

    def _id_of(self, index: int) -> str:
        self._prompt_digest = self._prompt_digest or digest_of(self._prompt_token_ids)
        return call_id(self._seed, self._prompt_digest, index, is_short=self._use.syntax.has_short_ids)
