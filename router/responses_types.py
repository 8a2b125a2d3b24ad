"""The body of /v1/responses: the part of OpenAI's Responses API that is about text and functions, checked once.

Nothing is kept: a conversation comes whole with each request, in `input`, and goes the way of a chat. What is outside of this
part is refused by name, unless it asks for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    SkipValidation,
    StrictStr,
    Tag,
    WithJsonSchema,
    model_validator,
)

from router.chat_types import MAX_TOOLS, ChatBody, Function, check_choice, check_tools, with_refusals
from router.openai_types import (
    MAX_REQUEST_ID_LENGTH,
    REQUEST_ID_PATTERN,
    ApiError,
    Flag,
    Metadata,
    Nested,
    Number,
    SamplingDefaults,
    Seed,
    ShortText,
    bad_request,
    validated,
)
from router.structured import MAX_TEXT_BYTES
from router.wrong_values import NO_CHARACTER, shown

_EMPTY_IN_PARTS: Final = ("annotations", "logprobs")  # lists that say nothing if there is nothing in them

UNSERVED: Final[Mapping[str, tuple[object, ...]]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "include": ([],),
    "max_tool_calls": (),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory",),
    "reasoning": ({}, {"effort": "none"}),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "stream_options": ({}, {"include_obfuscation": False}),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "verbosity": (),
}

_NAMES: Final[Mapping[str, str]] = {  # what a chat calls otherwise
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
}


class InputPart(Nested):
    """Text of an item: a client's, or of an answer that comes back."""

    type: Literal["input_text", "output_text"]
    text: StrictStr

    @model_validator(mode="before")
    @classmethod
    def _as_answered(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if not (name in _EMPTY_IN_PARTS and value == [])}


Text = StrictStr | Annotated[list[InputPart], Field(fail_fast=True)]


class _Item(Nested):
    """What all items may have, since answers do."""

    id: StrictStr | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(_Item):
    """One turn of a conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text
    phase: Literal["commentary", "final_answer"] | None = None  # OpenAI's own models are told of it; templates are not

    @model_validator(mode="before")
    @classmethod
    def _as_answered(cls, values: object) -> object:
        if not isinstance(values, dict) or values.get("role") != "assistant" or "content" not in values:
            return values
        return values | {"content": with_refusals(values["content"], "output_text")}


class CallItem(_Item):
    """A call that the model has made."""

    type: Literal["function_call"]
    call_id: StrictStr
    name: StrictStr
    arguments: StrictStr


class OutputItem(_Item):
    """What a call has brought."""

    type: Literal["function_call_output"]
    call_id: StrictStr
    output: Text


class ReasoningPart(Nested):
    """Text of a thought."""

    type: Literal["reasoning_text", "summary_text"]
    text: StrictStr


Parts = Annotated[list[ReasoningPart], Field(fail_fast=True)]


class ReasoningItem(_Item):
    """What the model thought before it said or called what follows, as an answer told it."""

    type: Literal["reasoning"]
    summary: Parts = Field(default_factory=list)
    content: Parts | None = None
    encrypted_content: None = None


def _kind_of(item: object) -> str | None:
    if not isinstance(item, dict):
        return None
    return f"{'message' if item.get('type') is None else item['type']}-item"


Item = Annotated[
    Annotated[MessageItem, Tag("message-item")]
    | Annotated[CallItem, Tag("function_call-item")]
    | Annotated[OutputItem, Tag("function_call_output-item")]
    | Annotated[ReasoningItem, Tag("reasoning-item")],
    Discriminator(_kind_of),
]
Items = Annotated[
    Annotated[list[Item], Field(min_length=1, fail_fast=True)],
    BeforeValidator(lambda value: [{"role": "user", "content": value}] if isinstance(value, str) else value),
]


class FunctionTool(Nested):
    """A function that the model may call."""

    type: Literal["function"]
    name: StrictStr
    description: StrictStr = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: Flag = False

    def function(self) -> Function:
        """As chats have it."""
        return Function.model_validate(self.model_dump(exclude_unset=True, exclude={"type"}))

    def told(self) -> dict[str, Any]:
        """As answers repeat it."""
        return self.model_dump(exclude_unset=True)


class TextOptions(Nested):
    """What is said of the text."""

    format: dict[str, Any] = Field(default_factory=lambda: {"type": "text"})  # see response_format
    verbosity: StrictStr = "medium"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.verbosity != "medium":
            message = f"not supported by this version (got {shown(self.verbosity)})"
            raise bad_request("text.verbosity", message, "unsupported_parameter")
        return self


class ResponsesBody(SamplingDefaults):
    """The body of /v1/responses."""

    unserved: ClassVar[Mapping[str, tuple[object, ...]]] = UNSERVED

    model: StrictStr
    input: Items
    instructions: StrictStr | None = None
    max_output_tokens: Annotated[int, Field(strict=True, ge=1)] | None = None
    stream: Flag = False
    text: TextOptions = Field(default_factory=TextOptions)
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(default_factory=list)
    tool_choice: Annotated[Any, SkipValidation, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]})] = (
        "auto"
    )
    parallel_tool_calls: Flag = True
    metadata: Metadata = Field(default_factory=dict)
    seed: Seed | None = None
    timeout_s: Annotated[Number, Field(gt=0)] | None = None
    user: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    safety_identifier: ShortText | None = None
    request_id: (
        Annotated[str, Field(strict=True, max_length=MAX_REQUEST_ID_LENGTH, pattern=REQUEST_ID_PATTERN)] | None
    ) = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        notes = self.text.format.get("description")  # so few as its schema may be
        if isinstance(notes, str) and len(notes) > MAX_TEXT_BYTES:
            raise bad_request("text.format.description", f"may have {MAX_TEXT_BYTES} characters, not {len(notes)}")
        if self.instructions is not None and any("\ud800" <= each <= "\udfff" for each in self.instructions):
            raise bad_request("instructions", NO_CHARACTER)
        check_tools([tool.function() for tool in self.tools], "tools.{}")
        check_choice(
            _chat_choice(self.tool_choice), [tool.name for tool in self.tools], '{"type": "function", "name": ...}'
        )
        return self

    def as_chat(self) -> ChatBody:
        """The chat that it asks for."""
        asked: dict[str, Any] = {
            name: getattr(self, name)
            for name in (*SamplingDefaults.model_fields, "seed", "timeout_s", "user", "request_id", "stream")
            if name in self.model_fields_set
        }
        first = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        asked["model"] = self.model
        asked["messages"] = first + _messages(self.input)
        asked["tools"] = [
            {"type": "function", "function": tool.function().model_dump(exclude_unset=True)} for tool in self.tools
        ]
        asked["tool_choice"] = _chat_choice(self.tool_choice)
        asked["parallel_tool_calls"] = self.parallel_tool_calls
        asked["response_format"] = _response_format(self.text.format)
        asked["max_completion_tokens"] = self.max_output_tokens
        return validated(ChatBody, asked)


def renamed(error: ApiError) -> ApiError:
    """What is wrong with the chat, in this API's names."""
    if error.param is None:
        return error
    name = _NAMES.get(error.param.split(".")[0], error.param)  # of items the list: messages have other numbers
    name = name.replace("response_format.json_schema", "text.format").replace("response_format", "text.format")
    name = re.sub(r"^(tools\.\d+)\.function", r"\1", name)
    message = error.message.replace(f"{error.param}: ", f"{name}: ", 1)
    return ApiError(error.status, message, code=error.code, param=name, retry_after_s=error.retry_after_s)


def _response_format(text_format: dict[str, Any]) -> dict[str, Any]:
    """As chats have it: what is said of a schema is one object."""
    if text_format.get("type") != "json_schema":
        return text_format
    return {"type": "json_schema", "json_schema": {name: text_format[name] for name in text_format if name != "type"}}


def _chat_choice(choice: object) -> object:
    match choice:
        case {"type": "function", "name": name, **more} if not more:
            return {"type": "function", "function": {"name": name}}
        case {"type": "function"}:
            raise bad_request("tool_choice", 'must be {"type": "function", "name": ...}')
    return choice


def _messages(items: list[MessageItem | CallItem | OutputItem | ReasoningItem]) -> list[dict[str, Any]]:
    """Calls belong to what the assistant said before them, a thought to what it said or called behind it."""
    messages: list[dict[str, Any]] = []
    thought: dict[str, str] = {}
    for item in items:
        match item:
            case ReasoningItem():
                told = "".join([part.text for part in item.content or item.summary])
                thought = {"reasoning_content": "\n\n".join([*thought.values(), told])} if told else thought
            case MessageItem():
                of_assistant = thought if item.role == "assistant" else {}
                messages.append({"role": item.role, "content": _text(item.content)} | of_assistant)
                thought = {}
            case OutputItem():
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            case CallItem():
                if not messages or messages[-1]["role"] != "assistant" or thought:
                    messages.append({"role": "assistant", "content": ""} | thought)
                    thought = {}
                call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
                messages[-1].setdefault("tool_calls", []).append(call)
    return messages


def _text(content: str | list[InputPart]) -> str:
    return content if isinstance(content, str) else "".join([part.text for part in content])
