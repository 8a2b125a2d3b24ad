"""What the libraries are asked to ask, and what plain HTTP gets for the same: the seed makes answers equal."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import httpx

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
    path: str  # "chat" or "completion"
    body: dict[str, Any]
    stream: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What somebody got for it."""

    texts: list[str]  # by choice
    finish_reasons: list[str]
    prompt_tokens: int | None
    completion_tokens: int | None
    logprobs: list[float] = field(default_factory=list)  # of choice 0, where asked for


ASKS: Final = (
    Ask("chat", "chat", CHAT),
    Ask("chat stream", "chat", CHAT, stream=True),
    Ask("chat, greedy", "chat", CHAT | {"temperature": 0.0}),
    Ask("chat, stop string", "chat", CHAT | {"stop": ["e", "1"], "max_tokens": 64}),
    Ask("completion", "completion", COMPLETION),
    Ask("completion stream", "completion", COMPLETION, stream=True),
)
_SCHEMA: Final = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"is_baton": {"type": "boolean"}, "colour": {"enum": ["red", "green"]}},
            "required": ["is_baton", "colour"],
            "additionalProperties": False,
        },
    },
}
# Beyond what every library's own words can say.
OPENAIS: Final = (
    Ask("two choices", "chat", CHAT | {"n": 2}),
    Ask("two choices, stream", "chat", CHAT | {"n": 2}, stream=True),
    Ask("logprobs", "chat", CHAT | {"logprobs": True, "top_logprobs": 2}),
    Ask("logprobs stream", "chat", CHAT | {"logprobs": True, "top_logprobs": 2}, stream=True),
    Ask("echo", "completion", COMPLETION | {"echo": True, "logprobs": 1}),
    Ask("token ids", "completion", COMPLETION | {"prompt": [40, 41, 42, 43]}),
    Ask("structured", "chat", CHAT | {"response_format": _SCHEMA, "max_tokens": 64}),
    Ask("structured stream", "chat", CHAT | {"response_format": _SCHEMA, "max_tokens": 64}, stream=True),
    Ask("many prompts", "completion", COMPLETION | {"prompt": ["a", "b", "c"]}),
)


def as_json(asks: tuple[Ask, ...]) -> str:
    """For a script."""
    return json.dumps([asdict(ask) for ask in asks])


def plainly(client: httpx.Client, model: str, ask: Ask) -> Answer:
    """What plain HTTP gets, not streamed whatever the ask."""
    path = "/v1/chat/completions" if ask.path == "chat" else "/v1/completions"
    answer = client.post(path, json=ask.body | {"model": model}, timeout=120)
    answer.raise_for_status()
    found = answer.json()
    choices, usage = found["choices"], found["usage"]
    told = choices[0].get("logprobs") or {}
    logprobs = (
        [token["logprob"] for token in told.get("content") or ()] if ask.path == "chat" else told.get("token_logprobs")
    )
    return Answer(
        [choice["message"]["content"] if ask.path == "chat" else choice["text"] for choice in choices],
        [choice["finish_reason"] for choice in choices],
        usage["prompt_tokens"],
        usage["completion_tokens"],
        [each for each in logprobs or () if each is not None],
    )
