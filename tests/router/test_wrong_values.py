"""Each place of a good body, of every endpoint, holds each of many wrong values, is left out, or has one name too many.

Whatever is refused is refused in one plain sentence that begins with the field.
"""

from __future__ import annotations

import asyncio
import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

import pytest
from starlette.requests import Request

from router.bodies import HeldBody
from router.chat_types import ChatBody
from router.intake import Intake, IntakeLimits
from router.openai_types import ApiError, CompletionBody, parse_body
from router.responses_types import ResponsesBody, renamed
from router.shell import RouterShell
from router.text import ModelText
from router.tokenizing import Tokenizing
from tests.router.tool_model import write_tool_model

NAME: Final = "tiny"
LONGEST: Final = 1000
WRONG: Final[list[Any]] = [
    *(None, True, 0, -1, 10**40, 1.5, float("inf")),
    *("x", "", "\ud800", [], [1], [None], [[]], {}, {"a": 1}, {"type": 5}, {"type": "x"}),
]
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 1},
        "b": {"type": "string", "maxLength": 3},
        "c": {"type": "array", "items": {"enum": [1]}, "minItems": 1},
    },
    "required": ["a"],
    "additionalProperties": False,
}
FORMAT: Final = {"name": "x", "description": "d", "strict": True, "schema": SCHEMA}
FUNCTION: Final[dict[str, Any]] = {
    "name": "weather",
    "description": "d",
    "parameters": {"type": "object"},
    "strict": True,
}
TOOLS: Final = [{"type": "function", "function": FUNCTION}]
SHARED: Final[dict[str, Any]] = {
    "model": NAME,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "seed": 1,
    "timeout_s": 5.0,
    "user": "me",
    "request_id": "abc",
    "stream": False,
}
GENERATION: Final[dict[str, Any]] = SHARED | {
    "max_tokens": 4,
    "min_tokens": 0,
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {"5": 1},
    "stop": ["x"],
    "stop_token_ids": [5],
    "ignore_eos": False,
    "return_token_ids": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "generated_token_ids": [5],
}
CALL: Final = {"id": "c1", "type": "function", "index": 0, "function": {"name": "weather", "arguments": "{}"}}
CHAT: Final[list[dict[str, Any]]] = [
    {"role": "user", "name": "n", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "x", "tool_call_id": "c1"},
]
ITEMS: Final[list[dict[str, Any]]] = [
    {
        "type": "message",
        "id": "i",
        "status": "completed",
        "role": "user",
        "content": [{"type": "input_text", "text": "hi"}],
    },
    {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "hi"}]},
]
SHORT: Final = {"model": NAME, "prompt": "hi"}
RESPONSE: Final = SHARED | {"input": ITEMS, "instructions": "x", "max_output_tokens": 4, "metadata": {"a": "b"}}
GOOD: Final[list[tuple[str, dict[str, Any]]]] = [
    ("completions", GENERATION | {"prompt": "hi", "echo": False, "logprobs": 1, "best_of": 1}),
    ("completions", {"model": NAME, "prompt": [[1, 2], [3]]}),
    ("completions", SHORT | {"response_format": {"type": "json_schema", "json_schema": FORMAT}}),
    ("completions", SHORT | {"structured_outputs": {"json": {"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": True}}}}),
    ("completions", SHORT | {"structured_outputs": {"choice": ["a"], "disable_any_whitespace": True}}),
    ("completions", SHORT | {"structured_outputs": {"regex": "a"}}),
    ("completions", SHORT | {"structured_outputs": {"grammar": 'root ::= "a"'}}),
    ("completions", SHORT | {"structured_outputs": {"json_object": True}}),
    ("chat", GENERATION | {"messages": CHAT, "logprobs": True, "top_logprobs": 1, "max_completion_tokens": 4}),
    ("chat", {"model": NAME, "messages": CHAT[:1], "tools": TOOLS, "parallel_tool_calls": True, "tool_choice": "auto"}),
    ("chat", {"model": NAME, "messages": CHAT[:1], "chat_template_kwargs": {"enable_thinking": False}}),
    (
        "chat",
        {
            "model": NAME,
            "messages": CHAT[:1],
            "tools": TOOLS,
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
        },
    ),
    ("responses", RESPONSE | {"text": {"format": {"type": "json_schema"} | FORMAT}}),
    (
        "responses",
        {
            "model": NAME,
            "input": "hi",
            "tools": [{"type": "function"} | FUNCTION],
            "tool_choice": {"type": "function", "name": "weather"},
        },
    ),
    ("tokenize", SHORT | {"add_special_tokens": True, "add_generation_prompt": True, "return_token_strs": True}),
    ("tokenize", {"model": NAME, "messages": CHAT, "tools": TOOLS, "continue_final_message": False}),
    ("tokenize", {"model": NAME, "messages": CHAT, "chat_template_kwargs": {"enable_thinking": False}}),
    ("detokenize", {"model": NAME, "tokens": [1, 2]}),
]
# Words of pydantic and of Python, which a client has nothing to do with.
FOREIGN: Final = re.compile(
    r"[Ii]nput |should|\bvalid|str\b|\bdict|bool|None|\bint\b|integer,|float|Literal|instance|union|tagged|Field|\[type|surrogates"
)

CONTRADICTION: Final = re.compile("contradicts|cannot be given with|needs")  # of which the message names both sides


class _Room:
    """Of a shell what intake asks it."""

    max_total_tokens = max_total_tokens_now = LONGEST

    def most_prompts(self, num_choices: int) -> int:
        return LONGEST // num_choices


class _Checks:
    """What each endpoint does with a body before any node hears of it."""

    def __init__(self, model: Path) -> None:
        text = ModelText(model)
        self._intake = Intake(cast(RouterShell, _Room()), text, NAME, IntakeLimits(30.0, None, 16))
        self._tokenizing = Tokenizing(text, NAME, self._read, 9.0, lambda: LONGEST)
        self._content = b""

    async def _read(self, request: Request, patience: asyncio.Timeout) -> HeldBody:
        return HeldBody(self._content, lambda: None, None, patience)

    async def refusal(self, endpoint: str, content: bytes) -> dict[str, Any] | None:
        """The error; None: the body is taken."""
        if endpoint in ("tokenize", "detokenize"):
            self._content = content
            request = Request({"type": "http", "headers": []})
            answer = await (self._tokenizing.tokenize if endpoint == "tokenize" else self._tokenizing.detokenize)(
                request
            )
            error: dict[str, Any] | None = json.loads(bytes(answer.body)).get("error")
            return error
        try:
            if endpoint == "responses":
                await self._intake.asked(parse_body(ResponsesBody, content).as_chat(), 0.0, len(content))
            elif endpoint == "chat":
                await self._intake.asked(parse_body(ChatBody, content), 0.0, len(content))
            else:
                await self._intake.asked(parse_body(CompletionBody, content), 0.0, len(content))
        except ApiError as refused:
            told: dict[str, Any] = (renamed(refused) if endpoint == "responses" else refused).body()["error"]
            return told
        return None


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> _Checks:
    return _Checks(write_tool_model(tmp_path_factory.mktemp("model")))


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of every value in it but the whole."""
    for name in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*at, name)
        yield from places(value[name], (*at, name))


def spoilt(good: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Bodies with one thing wrong, or something else that may be there, and where."""
    for *way, last in places(good):
        bodies = [copy.deepcopy(good) for _ in range(len(WRONG) + 2)]
        inner = bodies
        for name in way:
            inner = [each[name] for each in inner]
        for each, value in zip(inner, WRONG, strict=False):
            each[last] = value
        del inner[-1][last]
        if isinstance(inner[-2][last], dict):
            inner[-2][last]["bogus"] = 1
        yield from (((*way, last), body) for body in bodies)


@pytest.mark.covers("A11")
@pytest.mark.parametrize(("endpoint", "good"), GOOD, ids=[f"{i}-{endpoint}" for i, (endpoint, _) in enumerate(GOOD)])
def test_whatever_is_wrong_where_is_told_in_one_plain_sentence(
    checks: _Checks, endpoint: str, good: dict[str, Any]
) -> None:
    async def scenario() -> int:
        assert await checks.refusal(endpoint, json.dumps(good).encode()) is None
        num_refused = 0
        for place, body in spoilt(good):
            content = json.dumps(body).replace("Infinity", "1e999").encode()
            if (error := await checks.refusal(endpoint, content)) is None:
                continue
            num_refused += 1
            message, field = error["message"], error["param"]
            where = (place, message, content)
            assert field and message.startswith(f"{field}: "), where
            if not CONTRADICTION.search(message):
                assert set(field.split(".")) & {*map(str, place), "max_tokens", "tool_choice", "prompt"}, where
            assert not FOREIGN.search(message.split('"')[0]), where
            assert "\n" not in message and message.isascii() and len(message) < 400, where
        return num_refused

    assert asyncio.run(scenario()) > 10


@pytest.mark.covers("A11")
def test_more_calls_in_a_row_than_a_message_may_have_are_refused_as_input(checks: _Checks) -> None:
    content = json.dumps({"model": NAME, "input": [ITEMS[1]] * 257}).encode()
    error = asyncio.run(checks.refusal("responses", content))
    assert (
        error is not None and error["param"] == "input" and "at most 256 items, not a list of 257" in error["message"]
    )


class _LeftAlone(_Room):
    """Of a router whose longest node has gone."""

    max_total_tokens_now = LONGEST // 4


@pytest.mark.covers("A12")
def test_what_the_router_is_to_choose_fits_the_nodes_that_are_there_and_what_the_client_asks_may_need_another(
    tmp_path: Path,
) -> None:
    limits = IntakeLimits(30.0, None, 16)
    intake = Intake(cast(RouterShell, _LeftAlone()), ModelText(write_tool_model(tmp_path)), NAME, limits)

    def granted(num_prompt_tokens: int, **fields: Any) -> int:
        """max_tokens."""
        body = CompletionBody(model=NAME, prompt=[65] * num_prompt_tokens, **fields)
        (asked,) = asyncio.run(intake.asked(body, 0.0, 0))
        return asked.request.sampling.max_tokens

    assert granted(LONGEST // 4 - 3) == 3, "as many as a node has room for"
    assert granted(LONGEST // 4) == 16, "no node that is there has any: the default, of one that may come back"
    assert granted(LONGEST // 4 - 3, max_tokens=LONGEST // 2) == LONGEST // 2
