"""What the libraries are asked to ask, and what plain HTTP gets for the same: the seed makes answers equal."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from tests.clients.served import Served

MESSAGES: Final = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "What is a baton?"},
]
CHAT: Final = {"messages": MESSAGES, "max_tokens": 24, "temperature": 0.8, "seed": 7}
COMPLETION: Final = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0.8, "seed": 7}


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, by the names of OpenAI's API."""

    name: str
    path: str  # "chat", "completion" or "response"
    body: dict[str, Any]
    stream: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What somebody got for it."""

    texts: list[str]  # by choice
    finish_reasons: list[str]  # of a response its status
    prompt_tokens: int
    completion_tokens: int
    logprobs: list[float] = field(default_factory=list)  # of choice 0, where asked for
    calls: list[list[Any]] = field(default_factory=list)  # of all choices: id, name, arguments as an object


ASKS: Final = (
    Ask("chat", "chat", CHAT),
    Ask("chat stream", "chat", CHAT, stream=True),
    Ask("chat, greedy", "chat", CHAT | {"temperature": 0.0}),
    Ask("chat, stop string", "chat", CHAT | {"stop": ["e", "1"], "max_tokens": 64}),
    Ask("completion", "completion", COMPLETION),
    Ask("completion stream", "completion", COMPLETION, stream=True),
)
ANSWER: Final = {
    "type": "object",
    "properties": {"is_baton": {"type": "boolean"}, "colour": {"enum": ["red", "green"]}},
    "required": ["is_baton", "colour"],
    "additionalProperties": False,
}
_CITY: Final = {"enum": ["Oslo", "Łódź"]}
_DAYS: Final = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 2, "maxItems": 4}
FUNCTIONS: Final[dict[str, dict[str, Any]]] = {
    "weather": {"type": "object", "properties": {"city": _CITY, "days": _DAYS}, "required": ["city", "days"]},
    "colour": ANSWER,
}
_FORMAT: Final = {"name": "answer", "strict": True, "schema": ANSWER}
_TOOLS: Final = [
    {"type": "function", "function": {"name": name, "parameters": parameters}} for name, parameters in FUNCTIONS.items()
]
_NAMED: Final = {"type": "function", "function": {"name": "weather"}}
_BOUND: Final = CHAT | {"response_format": {"type": "json_schema", "json_schema": _FORMAT}, "max_tokens": 200}
_CALLING: Final = CHAT | {"tools": _TOOLS, "max_tokens": 200}
_ONE: Final = _CALLING | {"tool_choice": "required", "parallel_tool_calls": False}
STRUCTURED: Final = (Ask("structured", "chat", _BOUND), Ask("structured stream", "chat", _BOUND, stream=True))
CALLS: Final = (
    Ask("a named call", "chat", _CALLING | {"tool_choice": _NAMED}),
    Ask("a named call, stream", "chat", _CALLING | {"tool_choice": _NAMED}, stream=True),
    Ask("a required call", "chat", _ONE),
    Ask("a required call, stream", "chat", _ONE, stream=True),
)
_RESPONSE: Final = {"input": MESSAGES, "max_output_tokens": 24, "temperature": 0.8, "seed": 7}
_RESPONDING: Final = _RESPONSE | {
    "tools": [{"type": "function", "name": name, "parameters": parameters} for name, parameters in FUNCTIONS.items()],
    "parallel_tool_calls": False,
    "max_output_tokens": 200,
}
_AS_RESPONSE: Final = _RESPONSE | {"text": {"format": {"type": "json_schema", **_FORMAT}}, "max_output_tokens": 200}
RESPONSES: Final = (
    Ask("response", "response", _RESPONSE),
    Ask("response stream", "response", _RESPONSE, stream=True),
    Ask("structured response", "response", _AS_RESPONSE),
    Ask("structured response, stream", "response", _AS_RESPONSE, stream=True),
    Ask("call of a response", "response", _RESPONDING | {"tool_choice": {"type": "function", "name": "weather"}}),
    Ask("call of a response, stream", "response", _RESPONDING | {"tool_choice": "required"}, stream=True),
)
# Beyond what every library's own words can say.
OPENAIS: Final = (
    Ask("two choices", "chat", CHAT | {"n": 2}),
    Ask("two choices, stream", "chat", CHAT | {"n": 2}, stream=True),
    Ask("logprobs", "chat", CHAT | {"logprobs": True, "top_logprobs": 2}),
    Ask("logprobs stream", "chat", CHAT | {"logprobs": True, "top_logprobs": 2}, stream=True),
    Ask("echo", "completion", COMPLETION | {"echo": True, "logprobs": 1}),
    Ask("token ids", "completion", COMPLETION | {"prompt": [40, 41, 42, 43]}),
    Ask("two calling choices", "chat", _ONE | {"n": 2}),
    Ask("many prompts", "completion", COMPLETION | {"prompt": ["a", "b", "c"]}),
)


def as_json(asks: tuple[Ask, ...]) -> str:
    """For a script."""
    return json.dumps([asdict(ask) for ask in asks])


def plainly(served: Served, ask: Ask) -> Answer:
    """What plain HTTP gets, not streamed whatever the ask."""
    path = {"chat": "/v1/chat/completions", "completion": "/v1/completions", "response": "/v1/responses"}[ask.path]
    found = served.plainly(path, ask.body)
    return _of_response(found) if ask.path == "response" else _of_choices(found, ask.path == "chat")


def _of_choices(found: dict[str, Any], is_chat: bool) -> Answer:
    choices, usage = found["choices"], found["usage"]
    told = choices[0].get("logprobs") or {}
    logprobs = [token["logprob"] for token in told.get("content") or ()] if is_chat else told.get("token_logprobs")
    calls = [call for choice in choices if is_chat for call in choice["message"].get("tool_calls") or ()]
    return Answer(
        [(choice["message"]["content"] or "") if is_chat else choice["text"] for choice in choices],
        [choice["finish_reason"] for choice in choices],
        usage["prompt_tokens"],
        usage["completion_tokens"],
        [each for each in logprobs or () if each is not None],
        [[call["id"], call["function"]["name"], json.loads(call["function"]["arguments"])] for call in calls],
    )


def _of_response(found: dict[str, Any]) -> Answer:
    parts = [part for item in found["output"] if item["type"] == "message" for part in item["content"]]
    calls = [item for item in found["output"] if item["type"] == "function_call"]
    return Answer(
        ["".join(part["text"] for part in parts)],
        [found["status"]],
        found["usage"]["input_tokens"],
        found["usage"]["output_tokens"],
        [],
        [[call["call_id"], call["name"], json.loads(call["arguments"])] for call in calls],
    )
