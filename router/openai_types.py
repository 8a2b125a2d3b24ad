"""What clients may ask: the bodies of the OpenAI endpoints, checked once, each error one sentence.

A parameter of the API that this version does not serve is refused unless it asks for nothing (its default, or null): never
ignored, because an answer that silently leaves something out is a wrong answer. Checks that need the model or the nodes
(vocabulary, length) are in api.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError

MAX_SEED: Final = 2**63 - 1
MAX_REQUEST_ID_LENGTH: Final = 256
REQUEST_ID_PATTERN: Final = r"^[\x21-\x7e]+$"  # it is echoed in a header
_SHOWN_LENGTH: Final = 60  # characters of a wrong value that its error repeats

_BRANCHES: Final = (
    "str",
    "list[int]",
    "list[TextPart]",
    "constrained-str",
)  # pydantic puts a union's branches into locations

# Parameters of the OpenAI API (and of its usual extensions) that are not served yet -> values that ask for nothing.
UNSERVED: Final[Mapping[str, tuple[object, ...]]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "generated_token_ids": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "metadata": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "stop": ([],),
    "stop_token_ids": ([],),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_k": (0, -1),
    "top_logprobs": (0,),
    "top_p": (1,),
    "verbosity": (),
    "web_search_options": (),
}


class ApiError(Exception):
    """An answer in the API's error shape."""

    def __init__(
        self, status: int, message: str, *, code: str, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The JSON object, as OpenAI's clients parse it."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        if self.status == 429:
            kind = "rate_limit_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_request(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """400; `message` names value and bound, the field is put in front."""
    return ApiError(400, f"{param}: {message}" if param else message, code=code, param=param)


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class StreamOptions(_Body):
    """Options that count only with `stream`."""

    include_usage: Annotated[bool, Field(strict=True)] = False


class TextPart(_Body):
    """The only kind of content part so far."""

    type: Literal["text"]
    text: StrictStr


class Message(_Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: StrictStr | list[TextPart]
    name: StrictStr | None = None

    def for_template(self) -> dict[str, str]:
        """The form that chat templates expect: content is one text."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text} | ({} if self.name is None else {"name": self.name})


class GenerationBody(_Body):
    """What both endpoints take."""

    model: StrictStr
    max_tokens: Annotated[int, Field(strict=True, ge=1)] | None = None
    temperature: Annotated[float, Field(strict=True, ge=0, le=2, allow_inf_nan=False)] = 1.0
    seed: Annotated[int, Field(strict=True, ge=0, le=MAX_SEED)] | None = None
    stream: Annotated[bool, Field(strict=True)] = False
    stream_options: StreamOptions | None = None
    ignore_eos: Annotated[bool, Field(strict=True)] = False
    return_token_ids: Annotated[bool, Field(strict=True)] = False
    user: StrictStr | None = None
    request_id: (
        Annotated[str, Field(strict=True, max_length=MAX_REQUEST_ID_LENGTH, pattern=REQUEST_ID_PATTERN)] | None
    ) = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the counts."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(GenerationBody):
    """The body of /v1/completions."""

    prompt: StrictStr | list[StrictInt]


class ChatBody(GenerationBody):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]  # one error of a huge list is enough
    max_completion_tokens: Annotated[int, Field(strict=True, ge=1)] | None = None


Body = TypeVar("Body", bound=GenerationBody)


def parse_body(body_type: type[Body], content: bytes) -> Body:
    """Check a request's body; raises ApiError with the first thing that is wrong with it."""
    try:
        values = json.loads(content, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise bad_request(None, f"The body is not JSON: {error}.", "invalid_json") from error
    if not isinstance(values, dict):
        raise bad_request(None, f"The body must be a JSON object, not {_shown(values)}.", "invalid_json")
    asked = {name: value for name, value in values.items() if value is not None}
    for name in [name for name in asked if name not in body_type.model_fields]:
        _check_unserved(name, asked.pop(name))
    _check_prompt_form(asked.get("prompt"))
    try:
        return body_type.model_validate(asked)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)
        # A value that fits no branch of a union has an error for each; the one that got furthest says most.
        worst = max((each for each in found if each["loc"][0] == found[0]["loc"][0]), key=lambda each: len(each["loc"]))
        raise _sentence(worst["loc"], worst["type"], worst["msg"], worst["input"]) from error


def _check_unserved(name: str, value: object) -> None:
    """Let a value pass that asks for nothing; refuse any other, and names that the API does not have."""
    if name not in UNSERVED:
        raise bad_request(name[:_SHOWN_LENGTH], "unknown parameter", "unknown_parameter")
    for harmless in UNSERVED[name]:
        if value == harmless and isinstance(value, bool) == isinstance(harmless, bool):
            return
    raise bad_request(name, f"not supported by this version (got {_shown(value)})", "unsupported_parameter")


def _check_prompt_form(prompt: object) -> None:
    if prompt is not None and not isinstance(prompt, str | list):
        raise bad_request("prompt", f"must be a text or a list of token ids, not {_shown(prompt)}")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        raise bad_request("prompt", "a list of prompts is not supported by this version", "unsupported_parameter")


def _sentence(location: tuple[int | str, ...], kind: str, message: str, value: object) -> ApiError:
    """One sentence that names field, value and bound."""
    field = ".".join(str(part)[:_SHOWN_LENGTH] for part in location if str(part) not in _BRANCHES)
    match kind:
        case "missing":
            return bad_request(field, "is required", "missing_parameter")
        case "extra_forbidden":
            return bad_request(field, "unknown parameter", "unknown_parameter")
        case "too_short":
            return bad_request(field, "must not be empty")
        case "model_type":
            return bad_request(field, f"must be an object, not {_shown(value)}")
    for subject in ("Input should", "String should"):
        message = message.replace(subject, "must")
    return bad_request(field, f"{message}, not {_shown(value)}")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _shown(value: object) -> str:
    """A client's value in an error: ASCII, and no longer than one can read."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, str) and len(value) > _SHOWN_LENGTH:
        value = value[:_SHOWN_LENGTH] + "..."
    return json.dumps(value)
