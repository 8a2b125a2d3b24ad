"""Tools that must be called, and /v1/responses, over real processes by the official client; a node dies in the middle of both."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import httpx
import jsonschema_rs
import openai
import pytest

from tests.e2e.role_by_role import RoleByRole, started_role_by_role, wait_until
from tests.router.tool_model import HERMES_TEMPLATE
from tests.thorough import IS_THOROUGH

MODEL: Final = "llama-tiny"
PARAMETERS: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/city"},
        "days": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 9},
            "minItems": 2,
            "maxItems": 4,
        },
    },
    "required": ["city", "days"],
    "$defs": {"city": {"enum": ["Oslo", "Łódź"]}},
}
MANY: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "names": {
            "type": "array",
            "items": {"type": "string", "minLength": 8, "maxLength": 12},
            "minItems": 10,
            "maxItems": 12,
        }
    },
    "required": ["names"],
}
BOUND: Final[Any] = {"format": {"type": "json_schema", "name": "many", "schema": MANY}}  # so that it is long enough
NUM_BEFORE: Final = 20  # deltas
SCHEMAS: Final = {"weather": PARAMETERS, "list": MANY, "now": {"type": "object", "maxProperties": 0}}
TOOLS: Final[list[Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
    {"type": "function", "function": {"name": "list", "parameters": MANY}},
]
FLAT: Final[list[Any]] = [{"type": "function", **tool["function"]} for tool in TOOLS]
HI: Final[list[Any]] = [{"role": "user", "content": "What is the weather like?"}]


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoleByRole]:
    """A model whose template has tools; its weights are random, so what it says is what it must."""
    folder = tmp_path_factory.mktemp("tools")
    model = folder / MODEL
    shutil.copytree(tiny_model, model)
    (model / "chat_template.jinja").write_text(HERMES_TEMPLATE + "{% if begun %}<think>\n{% endif %}{# </think> #}")
    flags: dict[str, tuple[str, ...]] = {"router": (), "prefill-0": (), "decode-0": (), "decode-1": ()}
    with started_role_by_role(model, folder, flags) as running:
        yield running


@pytest.fixture(scope="module")
def client(cluster: RoleByRole) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as running:
        yield running


def calls_of(message: Any) -> list[tuple[str, str, str]]:
    """Each call's id, function and arguments, which fit its schema."""
    calls = [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls]
    for _, name, arguments in calls:
        jsonschema_rs.validate(SCHEMAS[name], json.loads(arguments))
    return calls


@pytest.mark.covers("A01", "A14", "A15", "A16")
def test_what_must_be_called_is_called_with_arguments_that_fit(client: openai.OpenAI) -> None:
    weather: Any = {"type": "function", "function": {"name": "weather"}}
    for seed in range(3 if IS_THOROUGH else 1):
        asked: dict[str, Any] = {"model": MODEL, "messages": HI, "tools": TOOLS[:2], "seed": seed, "n": 2}
        for choice, parallel in ((weather, True), ("required", False)):
            forced = asked | {"tool_choice": choice, "parallel_tool_calls": parallel}
            whole = client.chat.completions.create(**forced)
            with client.chat.completions.stream(**forced) as stream:
                streamed = stream.get_final_completion()
            for each, again in zip(whole.choices, streamed.choices, strict=True):
                assert each.finish_reason == again.finish_reason == "tool_calls"
                assert not each.message.content
                (call,) = calls_of(each.message)
                assert calls_of(again.message) == [call]
                assert choice == "required" or call[1] == "weather"


def killed_while(cluster: RoleByRole, ask: Callable[[Callable[[], None]], Any]) -> Any:
    """What `ask` gives while the decode node that serves it dies; it calls what it is given once that has begun."""

    def holders() -> list[str]:
        return [name for name in ("decode-0", "decode-1") if cluster.held_blocks(name)]

    def kill() -> None:
        (busy,) = holders()
        cluster.kill(busy)
        killed.append(busy)
        slow.close()

    wait_until("nothing is left of who was before", lambda: not holders())
    killed: list[str] = []
    before = cluster.metric("retries_total", "NODE_LOST")
    with ExitStack() as slow:
        slow.enter_context(cluster.slow_steps(0.1))
        answer = ask(kill)
    assert cluster.metric("retries_total", "NODE_LOST") > before, "it was in the middle"
    cluster.start(killed[0])
    cluster.wait_until_ready()
    return answer


@pytest.mark.covers("A15", "A16", "R09", "R10")
def test_a_killed_decode_node_shows_in_no_call_and_in_no_response(cluster: RoleByRole, client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "list"}}
    forced: dict[str, Any] = {"model": MODEL, "messages": HI, "tools": TOOLS, "tool_choice": named, "seed": 3}
    asked: dict[str, Any] = {"model": MODEL, "input": "Tell me.", "text": BOUND, "extra_body": {"seed": 4}}

    def called(on_begun: Callable[[], None]) -> list[tuple[str, str, str]]:
        num_deltas = 0
        with client.chat.completions.stream(**forced) as stream:
            for event in stream:
                num_deltas += event.type == "tool_calls.function.arguments.delta"
                if num_deltas == NUM_BEFORE:
                    num_deltas += 1
                    on_begun()
            return calls_of(stream.get_final_completion().choices[0].message)

    def said(on_begun: Callable[[], None]) -> str:
        deltas: list[str] = []
        with client.responses.stream(**asked) as stream:
            for event in stream:
                if event.type == "response.output_text.delta":
                    deltas.append(event.delta)
                    if len(deltas) == NUM_BEFORE:
                        on_begun()
            final = stream.get_final_response()
        text = "".join(deltas)
        assert text == final.output_text
        return text

    for ask in (called, said):
        disturbed, undisturbed = killed_while(cluster, ask), ask(lambda: None)
        assert disturbed == undisturbed
    whole = client.responses.create(**asked)
    assert (whole.status, whole.output_text) == ("completed", undisturbed)


@pytest.mark.covers("A01", "A14", "A15", "A16")
def test_a_response_has_the_format_and_the_call_that_were_asked_for(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 120}},
        "required": ["age"],
    }
    bound: Any = {"format": {"type": "json_schema", "name": "person", "schema": schema, "strict": True}}
    said = client.responses.create(model=MODEL, input="Who?", text=bound, max_output_tokens=100)
    assert said.status == "completed" and said.usage
    again = client.responses.create(model=MODEL, input="Who?", text=bound, max_output_tokens=100)
    assert again.usage and again.usage.input_tokens == said.usage.input_tokens
    assert said.usage.input_tokens_details.cached_tokens < again.usage.input_tokens_details.cached_tokens
    jsonschema_rs.validate(schema, json.loads(said.output_text))
    choice: Any = {"type": "function", "name": "weather"}
    (call,) = client.responses.create(model=MODEL, input="Where?", tools=FLAT, tool_choice=choice).output
    assert call.type == "function_call" and call.name == "weather"
    jsonschema_rs.validate(PARAMETERS, json.loads(call.arguments))


@pytest.mark.covers("A01", "A14", "A15", "A16")
def test_of_an_automatic_choice_beside_a_format_either_comes_and_fits(client: openai.OpenAI) -> None:
    """Which one a bias of the first byte decides; the rest is the grammar's."""
    schema = PARAMETERS | {"additionalProperties": False}
    format_: Any = {"type": "json_schema", "json_schema": {"name": "report", "schema": schema, "strict": True}}
    asked: dict[str, Any] = {"model": MODEL, "messages": HI, "tools": TOOLS[:2], "response_format": format_, "seed": 6}
    for unwanted in "<{":
        biased = asked | {"logit_bias": {str(ord(unwanted)): -100}}
        (whole,) = client.chat.completions.create(**biased).choices
        with client.chat.completions.stream(**biased) as stream:
            (streamed,) = stream.get_final_completion().choices
        assert streamed.finish_reason == whole.finish_reason == ("stop" if unwanted == "<" else "tool_calls")
        assert (streamed.message.content or "") == (whole.message.content or "")
        if unwanted == "<":
            jsonschema_rs.validate(schema, json.loads(whole.message.content or ""))
            assert not whole.message.tool_calls
        else:
            assert not whole.message.content
            assert calls_of(whole.message) == calls_of(streamed.message) != []
    bound: Any = {"format": {"type": "json_schema", "name": "report", "schema": schema}}
    response = client.responses.create(model=MODEL, input="Who?", tools=FLAT[:2], text=bound, extra_body={"seed": 6})
    assert response.status == "completed"
    for item in response.output:
        arguments = item.arguments if item.type == "function_call" else response.output_text
        named = SCHEMAS[item.name] if item.type == "function_call" else schema
        jsonschema_rs.validate(named, json.loads(arguments))


@pytest.mark.covers("A01", "A14", "R09")
def test_behind_a_thought_that_the_prompt_has_begun_the_format_binds(cluster: RoleByRole) -> None:
    """The thought is given, as to a choice that was handed up: a model whose weights are random ends none."""
    format_ = {"type": "json_schema", "json_schema": {"name": "report", "schema": PARAMETERS}}
    asked: dict[str, Any] = {"model": MODEL, "messages": HI, "response_format": format_, "seed": 8}
    asked |= {"chat_template_kwargs": {"begun": True}, "generated_token_ids": [*b"Let me {see}.\n</think>\n"]}
    answer = httpx.post(f"{cluster.url}/v1/chat/completions", json=asked, timeout=120).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop" and "reasoning_content" not in choice["message"], (
        "somebody else has told it"
    )
    jsonschema_rs.validate(PARAMETERS, json.loads(choice["message"]["content"]))
    asked |= {"generated_token_ids": [*b"Let me {see}."], "max_tokens": 40}
    (choice,) = httpx.post(f"{cluster.url}/v1/chat/completions", json=asked, timeout=120).json()["choices"]
    assert choice["finish_reason"] == "length" and choice["message"]["reasoning_content"], "it goes on thinking"
    assert choice["message"]["content"] == ""
