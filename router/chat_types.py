"""The body of /v1/chat/completions: messages and tools, checked once, each error one sentence.

What a template makes of them: chat_template.py; whether this model can call tools at all: tool_calls.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, SkipValidation, StrictInt, StrictStr, WithJsonSchema, model_validator

from router.chat_template import TOLD_BY_OTHERS
from router.json_reading import TURNS, read_json
from router.openai_types import MAX_LOGPROBS, Flag, GenerationBody, Nested, bad_request
from router.wrong_values import NO_CHARACTER, NOT_FINITE, shown

MAX_TOOLS: Final = 128
MAX_TOOL_BYTES: Final = 256 << 10  # of all definitions together, as JSON
MAX_TOOL_DEPTH: Final = 64  # of a function's parameters, or of a call's arguments
MAX_CALLS_PER_MESSAGE: Final = 256
MAX_KWARGS_BYTES: Final = 64 << 10  # of what a client tells the chat template, as JSON
MAX_KWARGS_DEPTH: Final = 64
_FUNCTION_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FUNCTION_NAME_RULE: Final = "must be 1 to 64 letters, digits, _, - or ."
_EMPTY_IN_MESSAGES: Final = ("annotations", "tool_calls")  # lists that say nothing if there is nothing in them
_LITELLMS: Final = (
    "provider_specific_fields"  # it sends back under this name what it did not know, such as a refusal that is null
)
_PRONOUN: Final = {"tool_calls": "them", "reasoning_content": "it", "reasoning": "it", "refusal": "one"}
_CHOICE_WORDS: Final = ("none", "auto", "required")


class TextPart(Nested):
    """The only kind of content part so far."""

    type: Literal["text"]
    text: StrictStr


class CalledFunction(Nested):
    """What an assistant called, and with what: the arguments are JSON as text."""

    name: StrictStr
    arguments: StrictStr = "{}"

    @model_validator(mode="before")
    @classmethod
    def _as_answered(cls, values: object) -> object:
        """openai's client puts beside a text what it has parsed it into, and sends that back: the text says all of it."""
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if name != "parsed_arguments"}


class ToolCall(Nested):
    """One call of an assistant's message."""

    id: StrictStr
    type: Literal["function"] = "function"
    function: CalledFunction
    index: StrictInt | None = None  # what is put together from a stream has it

    def for_template(self) -> dict[str, Any]:
        """The form that chat templates expect: arguments are an object.

        Those that are none, which a model may have written, stay text: it is to see what it did.
        """
        function = {"name": self.function.name, "arguments": _object_of(self.function.arguments)}
        return {"id": self.id, "type": "function", "function": function}


def with_refusals(content: object, part_type: str) -> object:
    """An assistant's content with what it refused as text: to who goes on with it, it is what it said."""
    if not isinstance(content, list):
        return content
    return [{"type": part_type, "text": each["refusal"]} if _is_refusal(each) else each for each in content]


def _is_refusal(part: object) -> bool:
    match part:
        case {"type": "refusal", "refusal": str(), **more}:
            return all(each is None for each in more.values())
    return False


def _says_nothing(name: str, value: object, message: Mapping[str, object]) -> bool:
    if name == _LITELLMS and isinstance(value, dict):
        return all(each is None or (key != name and each == message.get(key)) for key, each in value.items())
    return name in _EMPTY_IN_MESSAGES and value == []


class Message(Nested):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: StrictStr | Annotated[list[TextPart], Field(fail_fast=True)]
    name: StrictStr | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS_PER_MESSAGE, fail_fast=True)] = Field(
        default_factory=list
    )
    tool_call_id: StrictStr | None = None
    reasoning_content: StrictStr | None = None  # what it thought, which vLLM, SGLang and others answer beside the text
    reasoning: StrictStr | None = None  # the same, by vLLM's newer name
    refusal: StrictStr = ""  # said in place of a text

    @model_validator(mode="before")
    @classmethod
    def _as_answered(cls, values: object) -> object:
        """Clients send a message of ours, or of other servers, back with all the fields that they know, empty as they are."""
        if not isinstance(values, dict):
            return values
        if values.get("role") == "assistant":
            values = {name: value for name, value in values.items() if name != "parsed"}
            says_other = "content" in values or values.get("tool_calls") or values.get("refusal")
            if values.get("content") is None and says_other:
                values["content"] = ""
            elif "content" in values:
                values["content"] = with_refusals(values["content"], "text")
        return {name: value for name, value in values.items() if not _says_nothing(name, value, values)}

    @property
    def text(self) -> str:
        """Its content, in one."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)

    @property
    def thought(self) -> str | None:
        """By whichever name."""
        return self.reasoning if self.reasoning_content is None else self.reasoning_content

    def for_template(self) -> dict[str, Any]:
        """The form that chat templates expect: content is one text; what is not there is not named."""
        told: dict[str, Any] = {"role": self.role, "content": self.text or self.refusal}
        if self.name is not None:
            told["name"] = self.name
        if self.tool_calls:
            told["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            told["tool_call_id"] = self.tool_call_id
        if self.thought is not None:
            told["reasoning_content"] = self.thought
        return told


class Function(Nested):
    """A function that the model may call; `parameters` is a JSON schema of its arguments."""

    name: StrictStr
    description: StrictStr = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: Flag = False


class Tool(Nested):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """The form that chat templates expect, which is the client's."""
        return self.model_dump(exclude_unset=True, exclude={"function": {"strict"}})


class ChatBody(GenerationBody):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]  # one error of a huge list is enough
    max_completion_tokens: Annotated[int, Field(strict=True, ge=1)] | None = None
    logprobs: Flag = False
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=MAX_LOGPROBS)] = 0
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(default_factory=list)
    tool_choice: Annotated[
        Any, SkipValidation, WithJsonSchema({"anyOf": [{"enum": list(_CHOICE_WORDS)}, {"type": "object"}]})
    ] = "auto"
    parallel_tool_calls: Flag = True
    chat_template_kwargs: dict[StrictStr, Any] = Field(default_factory=dict)
    add_generation_prompt: Flag | None = None  # left out: unless the last message is continued
    continue_final_message: Flag = False

    @property
    def num_logprobs(self) -> int | None:
        """As a completion's."""
        return self.top_logprobs if self.logprobs else None

    @property
    def called_by_name(self) -> str | None:
        """The function that must be called, if the client says which."""
        return None if isinstance(self.tool_choice, str) else str(self.tool_choice["function"]["name"])

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_messages(self.messages)
        check_continued(self.messages, self.continue_final_message, self.add_generation_prompt)
        check_tools([tool.function for tool in self.tools], "tools.{}.function")
        check_kwargs(self.chat_template_kwargs)
        names = [tool.function.name for tool in self.tools]
        check_choice(self.tool_choice, names, '{"type": "function", "function": {"name": ...}}')
        return self


def _object_of(arguments: str) -> object:
    try:
        parsed = TURNS.call(len(arguments), read_json, arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    is_one = isinstance(parsed, dict) and depth_of(parsed) <= MAX_TOOL_DEPTH and _is_text(arguments, parsed)
    return parsed if is_one else arguments


def _is_text(arguments: str, parsed: object) -> bool:
    """Whether it can be written without escapes: a model may have said half a surrogate pair as one, which is JSON."""
    if "\\ud" not in arguments.lower():
        return True
    try:
        json.dumps(parsed, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def check_messages(messages: Sequence[Message]) -> None:
    """Nobody has what only others have, and nothing is said twice."""
    for position, message in enumerate(messages):
        where, role = f"messages.{position}", message.role
        if message.tool_call_id is not None and role != "tool":
            raise bad_request(f"{where}.tool_call_id", f"only a tool has one, not a {role}")
        if role != "assistant":
            for name in ("tool_calls", "reasoning_content", "reasoning", "refusal"):
                if getattr(message, name):
                    raise bad_request(f"{where}.{name}", f"only an assistant has {_PRONOUN[name]}, not a {role}")
        elif message.refusal and message.text:
            raise bad_request(f"{where}.refusal", "stands in place of content; give one of them")
        elif message.reasoning not in (None, message.thought):
            raise bad_request(f"{where}.reasoning", "contradicts reasoning_content; give one of them")


def check_continued(messages: Sequence[Message], is_continued: bool, has_generation_prompt: bool | None) -> None:
    """What is to go on is an assistant's text."""
    if not is_continued:
        return
    field = "continue_final_message"
    if has_generation_prompt:
        raise bad_request(field, "contradicts add_generation_prompt, with which another message begins")
    if not messages or messages[-1].role != "assistant":
        last = f"one of role {messages[-1].role}" if messages else "none"
        raise bad_request(field, f"needs messages of which the last one is an assistant's, not {last}")
    if messages[-1].tool_calls:
        raise bad_request(field, "the last message has tool_calls, behind which its text cannot go on")


def check_tools(functions: list[Function], field: str) -> None:
    """Names that can be called, each once, and definitions that a template can write; `field` is what errors call one of them."""
    seen: set[str] = set()
    for position, function in enumerate(functions):
        where = field.format(position)
        if _FUNCTION_NAME.fullmatch(function.name) is None:
            raise bad_request(f"{where}.name", f"{_FUNCTION_NAME_RULE}, not {shown(function.name)}")
        if function.name in seen:
            raise bad_request(f"{where}.name", f"{shown(function.name)} is the name of another one, too")
        seen.add(function.name)
        if depth_of(function.parameters) > MAX_TOOL_DEPTH:
            raise bad_request(f"{where}.parameters", f"must be nested at most {MAX_TOOL_DEPTH} deep")
    definitions = [[each.name, each.description, each.parameters] for each in functions]
    if (size := _json_bytes("tools", definitions)) > MAX_TOOL_BYTES:
        raise bad_request("tools", f"must have at most {MAX_TOOL_BYTES} bytes together, not {size}")


def check_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Of a chat template: names that are the client's to tell, and values that are bounded."""
    field = "chat_template_kwargs"
    if taken := sorted(TOLD_BY_OTHERS & kwargs.keys()):
        raise bad_request(field, f"{taken[0]} is not told here: the request's other fields, the model or the router do")
    if depth_of(kwargs) > MAX_KWARGS_DEPTH:
        raise bad_request(field, f"must be nested at most {MAX_KWARGS_DEPTH} deep")
    if (size := _json_bytes(field, kwargs)) > MAX_KWARGS_BYTES:
        raise bad_request(field, f"must have at most {MAX_KWARGS_BYTES} bytes, not {size}")


def _json_bytes(field: str, value: object) -> int:
    try:
        return len(json.dumps(value, ensure_ascii=False, allow_nan=False).encode())
    except UnicodeEncodeError as error:
        raise bad_request(field, NO_CHARACTER) from error
    except ValueError as error:
        raise bad_request(field, NOT_FINITE) from error


def check_choice(choice: object, names: list[str], by_name: str) -> None:
    """A word, or a function that there is; `by_name` is how the client names one."""
    match choice:
        case "none" | "auto":
            return
        case "required" if names:
            return
        case {"type": "function", "function": {"name": str(name), **more_of_it}, **more} if not (more or more_of_it):
            if name not in names:
                raise bad_request("tool_choice", f"there is no tool {shown(name)}")
            return
        case "required":
            raise bad_request("tool_choice", "needs tools")
    words = ", ".join(_CHOICE_WORDS)
    raise bad_request("tool_choice", f"must be one of {words}, or {by_name}, not {shown(choice)}")


def depth_of(value: object) -> int:
    """How deep objects and arrays are nested; not by recursion, since the value may be what recursion fails at."""
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list) and each]:
        depth += 1
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return depth
