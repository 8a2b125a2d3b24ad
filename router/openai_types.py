"""What clients may ask: what the bodies of all endpoints share, checked once, each error one sentence; /v1/completions' own.

A parameter of the API that this version does not serve is refused unless it asks for nothing (its default, or null): never
ignored, because an answer that silently leaves something out is a wrong answer. Chats: chat_types.py. Checks that need the model
or the nodes (vocabulary, length) are in intake.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Final, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SkipValidation,
    StrictInt,
    StrictStr,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticKnownError

from proto.bounds import MAX_LOGIT_BIASES
from router.json_reading import TooManyValues, read_json
from router.wrong_values import SHOWN_LENGTH, shown, wrong_of
from runtime.logs import printable

MAX_SEED: Final = 2**63 - 1
# Of what a Responses answer repeats, a stream three times, though nobody computes with it: OpenAI's bounds of metadata. Megabytes
# of it, written at once, hold up everybody's streams.
MAX_METADATA: Final = 16
MAX_METADATA_NAME: Final = 64
MAX_METADATA_TEXT: Final = 512
MAX_REQUEST_ID_LENGTH: Final = 256
REQUEST_ID_PATTERN: Final = r"^[\x21-\x7e]+$"  # it is echoed in a header
REQUEST_ID_RULE: Final = f"must be 1 to {MAX_REQUEST_ID_LENGTH} visible ASCII characters"
SCHEMA_NAME_PATTERN: Final = r"^[a-zA-Z0-9_-]{1,64}$"  # OpenAI's
_PATTERNS: Final = {
    REQUEST_ID_PATTERN: REQUEST_ID_RULE,
    SCHEMA_NAME_PATTERN: "must be 1 to 64 letters, digits, _ or -",
}
_LISTS: Final = {
    "content": "a list of text parts",
    "input": "a text or a list of items",
    "messages": "a list of messages",
    "output": "a list of text parts",
    "stop": "a text or a list of texts",
}
MAX_LOGPROBS: Final = 20
MAX_STOP_STRINGS: Final = 16
MAX_STOP_STRING_LENGTH: Final = 1000  # characters
MAX_STOP_TOKEN_IDS: Final = 256  # with the model's own ones well within what nodes take
MAX_FIELDS: Final = 64  # of an object within a body
IDS_AT_ONCE: Final = (
    1 << 16
)  # that one call of Python's own looks at: no other thread runs meanwhile, not even the loop's

# Parameters of the OpenAI API (and of its usual extensions) that an endpoint does not serve -> values that ask for nothing.
UNSERVED: Final[Mapping[str, tuple[object, ...]]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "priority": (0,),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory",),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
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
    told = f"{param}: {message}" if param else message
    return ApiError(400, printable(told), code=code, param=param)


def unknown_model(asked: str, served: str) -> ApiError:
    """404, for a name that no model here has."""
    message = f"model: this router serves {printable(served)}, not {shown(asked)}"
    return ApiError(404, message, code="model_not_found", param="model")


def check_few(values: object, most: int) -> object:
    """One error for an object of more: else each of its values is looked at, and each that is wrong is an error of its own."""
    if isinstance(values, dict) and len(values) > most:
        raise PydanticKnownError(
            "too_long", {"field_type": "Dictionary", "max_length": most, "actual_length": len(values)}
        )
    return values


def _check_short(text: str) -> str:
    """In place of pydantic's `max_length`, which cannot count what has half a surrogate pair."""
    if len(text) > MAX_METADATA_TEXT:
        raise PydanticKnownError("string_too_long", {"max_length": MAX_METADATA_TEXT})
    return text


def _check_names(metadata: dict[str, str]) -> dict[str, str]:
    if (longest := max(map(len, metadata), default=0)) > MAX_METADATA_NAME:
        raise bad_request("metadata", f"a name may have {MAX_METADATA_NAME} characters, not {longest}")
    return metadata


class CheckedBody(BaseModel):
    """Of JSON objects here: what they do not know is an error."""

    model_config = ConfigDict(extra="forbid")
    unserved: ClassVar[Mapping[str, tuple[object, ...]]] = UNSERVED  # names that are not served, but known


class Nested(CheckedBody):
    """An object within a body: what is null in it is not there, as in the body itself."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        check_few(values, MAX_FIELDS)
        return {name: value for name, value in values.items() if value is not None}


class StreamOptions(Nested):
    """Options that count only with `stream`."""

    include_usage: Annotated[bool, Field(strict=True)] = False
    continuous_usage_stats: Annotated[bool, Field(strict=True)] = False  # vLLM's, which guidellm asks for
    include_obfuscation: Annotated[bool, Field(strict=True)] = False  # chunks padded to one length: there is no such

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.include_obfuscation:
            message = "not supported by this version (got true)"
            raise bad_request("stream_options.include_obfuscation", message, "unsupported_parameter")
        return self


Flag = Annotated[bool, Field(strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Penalty = Annotated[Number, Field(ge=-2, le=2)]
StopString = Annotated[str, Field(strict=True, min_length=1, max_length=MAX_STOP_STRING_LENGTH)]
StopStrings = Annotated[
    Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "maxItems": MAX_STOP_STRINGS},
            ]
        }
    ),
]
# A negative one is the same as itself and 2^63: answers name it so, and nodes draw by it.
Seed = Annotated[int, Field(strict=True, ge=-MAX_SEED - 1, le=MAX_SEED), AfterValidator(lambda seed: seed & MAX_SEED)]
Structured = dict[str, Any] | None
LogitBias = Annotated[
    dict[str, Annotated[Number, Field(ge=-100, le=100)]],
    Field(max_length=MAX_LOGIT_BIASES),
    BeforeValidator(partial(check_few, most=MAX_LOGIT_BIASES)),
]
ShortText = Annotated[StrictStr, AfterValidator(_check_short)]
Metadata = Annotated[
    dict[str, ShortText],
    Field(max_length=MAX_METADATA),
    BeforeValidator(partial(check_few, most=MAX_METADATA)),
    AfterValidator(_check_names),
]
PromptForm = str | list[str] | list[int] | list[list[int]]


class SamplingDefaults(CheckedBody):
    """What a model's generation_config.json may say in place of a client that does not."""

    temperature: Annotated[Number, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[Number, Field(ge=0, le=1)] = 1.0
    top_k: Annotated[int, Field(strict=True, ge=-1)] = 0
    min_p: Annotated[Number, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[Number, Field(gt=0, le=2)] = 1.0


class GenerationBody(SamplingDefaults):
    """What both endpoints take."""

    model: StrictStr
    max_tokens: Annotated[int, Field(strict=True, ge=0)] | None = None
    min_tokens: Annotated[int, Field(strict=True, ge=0)] = 0
    n: Annotated[int, Field(strict=True, ge=1)] = 1  # at most the router's --max-n
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: LogitBias = Field(default_factory=dict)  # of a literal pydantic makes a deep copy for each body
    seed: Seed | None = None
    stop: StopStrings = Field(default_factory=list)
    stop_token_ids: Annotated[list[StrictInt], Field(max_length=MAX_STOP_TOKEN_IDS)] = Field(default_factory=list)
    ignore_eos: Flag = False
    response_format: Structured = None  # see structured.py
    structured_outputs: Structured = None
    stream: Flag = False
    stream_options: StreamOptions | None = None
    return_token_ids: Flag = False
    generated_token_ids: Annotated[list[StrictInt], Field(fail_fast=True)] = Field(default_factory=list)
    timeout_s: Annotated[Number, Field(gt=0)] | None = None
    user: StrictStr | None = None  # whom it is for, as in what OpenAI has made of it since: no answer hangs on it
    metadata: Metadata = Field(default_factory=dict)
    prompt_cache_key: StrictStr | None = None
    safety_identifier: StrictStr | None = None
    request_id: (
        Annotated[str, Field(strict=True, max_length=MAX_REQUEST_ID_LENGTH, pattern=REQUEST_ID_PATTERN)] | None
    ) = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def counts_in_chunks(self) -> bool:
        """Whether each chunk of a stream has the counts so far."""
        options = self.stream_options
        return options is not None and options.include_usage and options.continuous_usage_stats

    def with_defaults(self, defaults: SamplingDefaults) -> Self:
        """The body with what it does not say taken from there."""
        missing = defaults.model_fields_set - self.model_fields_set
        if not missing:
            return self
        return self.model_copy(update={name: getattr(defaults, name) for name in missing})


class CompletionBody(GenerationBody):
    """The body of /v1/completions."""

    prompt: Annotated[PromptForm, SkipValidation]  # see prompts_of
    echo: Flag = False
    logprobs: Annotated[int, Field(strict=True, ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(strict=True, ge=1)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        """How many most likely tokens are asked for; None: no logprobs at all."""
        return self.logprobs


Body = TypeVar("Body", bound=CheckedBody)
Checked = TypeVar("Checked", bound=BaseModel)


def parse_body(body_type: type[Body], content: bytes) -> Body:
    """Check a request's body; raises ApiError with the first thing that is wrong with it."""
    values = _parsed(content)
    if not isinstance(values, dict):
        raise bad_request(None, f"The body must be a JSON object, not {shown(values)}.", "invalid_json")
    asked = {name: value for name, value in values.items() if value is not None}
    served = body_type.model_fields  # asked for once: the look-up is a call
    for name in [name for name in asked if name not in served]:
        _check_unserved(body_type.unserved, name, asked.pop(name))
    return validated(body_type, asked)


def _parsed(content: bytes) -> object:
    """JSON; what is wrong with it in words that are not Python's."""
    try:
        return read_json(content.decode(json.detect_encoding(content), "surrogatepass"), _DECODER)
    except TooManyValues as error:
        raise bad_request(None, f"The body has too much in it: {error}.") from error
    except (json.JSONDecodeError, _NoNumberError) as error:
        problem = str(error)
    except UnicodeDecodeError:
        problem = "it is no UTF-8"
    except RecursionError:
        problem = "it is nested too deeply"
    except ValueError:  # Python's limit; what it says of it names a function of its own
        problem = f"a number in it has more than {sys.get_int_max_str_digits()} digits"
    raise bad_request(None, f"The body is not JSON: {problem}.", "invalid_json")


def parse_defaults(values: Mapping[str, Any]) -> SamplingDefaults:
    """What a generation_config.json says of sampling; raises ApiError with the first thing that is wrong with it."""
    named = {name: values[name] for name in SamplingDefaults.model_fields if values.get(name) is not None}
    return validated(SamplingDefaults, named)


def validated(body_type: type[Checked], values: Mapping[str, Any]) -> Checked:
    """The values, checked; raises ApiError with the first thing that is wrong with them."""
    try:
        return body_type.model_validate(values)
    except ValidationError as error:
        wrong = wrong_of(values, error.errors(include_url=False), _PATTERNS, _LISTS)
        raise bad_request(wrong.field, wrong.message, wrong.code) from error


def _check_unserved(unserved: Mapping[str, tuple[object, ...]], name: str, value: object) -> None:
    """Let a value pass that asks for nothing; refuse any other, and names that the API does not have."""
    if name not in unserved:
        raise bad_request(name[:SHOWN_LENGTH], "unknown parameter", "unknown_parameter")
    if isinstance(value, dict):
        value = {key: each for key, each in value.items() if each is not None}
    for harmless in unserved[name]:
        if value == harmless and isinstance(value, bool) == isinstance(harmless, bool):
            return
    raise bad_request(name, f"not supported by this version (got {shown(value)})", "unsupported_parameter")


def prompts_of(value: object) -> list[str | list[int]]:
    """The prompts of a completion in any of their four forms; token ids are whole numbers, and not checked further."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise bad_request("prompt", f"must be a text, a list of token ids, or a list of either, not {shown(value)}")
    if not value:
        raise bad_request("prompt", "must not be empty")
    first = type(value[0])
    expected = {int: "a token id", str: "a text", list: "a list of token ids"}.get(first, "a text or a token id")
    for position, each in enumerate(value):
        if type(each) is not first or first not in (int, str, list):
            raise bad_request(f"prompt.{position}", f"must be {expected}, not {shown(each)}")
        if first is list:
            _check_token_list(f"prompt.{position}", each)
    return [value] if first is int else value


def _check_token_list(field: str, token_ids: list[object]) -> None:
    for start in range(0, len(token_ids), IDS_AT_ONCE):
        if set(map(type, token_ids[start : start + IDS_AT_ONCE])) - {int}:
            position = next(i for i, each in enumerate(token_ids) if type(each) is not int)
            raise bad_request(f"{field}.{position}", f"must be a token id, not {shown(token_ids[position])}")


class _NoNumberError(ValueError):
    """Python would read it, JSON has no such number."""


def _refuse_constant(name: str) -> None:
    raise _NoNumberError(f"{name} is no number")


_DECODER: Final = json.JSONDecoder(parse_constant=_refuse_constant)  # json.loads would make one for each body
