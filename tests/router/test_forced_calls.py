"""The schema of an answer that must call tools: what fits is a list of calls, each as its function says."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import jsonschema_rs
import pytest

from router.chat_types import ChatBody
from router.forced_calls import calls_schema, forced_grammar
from router.openai_types import ApiError
from tests.router.live_router import LiveRouter
from tests.router.test_api import HI, play
from tests.router.tool_model import WEATHER, write_tool_model

CHAT: Final = "/v1/chat/completions"
CITY: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/a"}, "$ref": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"a": {"enum": ["Oslo", {"$ref": "#"}]}},
}
TREE: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"left": {"$ref": "#"}, "size": {"$ref": "#/definitions/a"}, "name": {"$ref": "#/$defs/a"}},
    "required": ["size"],
    "additionalProperties": False,
    "definitions": {"a": {"type": "integer"}},
    "$defs": {"a": {"type": "string"}},
}
GOOD: Final = (
    [{"name": "city", "parameters": {"city": "Oslo"}}],
    [{"name": "city", "parameters": {"city": {"$ref": "#"}, "$ref": "x"}}],
    [{"name": "tree", "parameters": {"size": 1, "left": {"size": 2, "name": "b", "left": {"size": 3}}}}],
)
BAD: Final[tuple[object, ...]] = (
    [],
    {"name": "city", "parameters": {"city": "Oslo"}},
    [{"name": "now", "parameters": {"city": "Oslo"}}],
    [{"name": "city", "parameters": {"city": 1}}],
    [{"name": "tree", "parameters": {"size": "Oslo"}}],
    [{"name": "tree", "parameters": {"size": 1, "name": 2}}],
    [{"name": "tree", "parameters": {"size": 1, "left": {"city": "Oslo"}}}],
    [{"name": "tree"}],
)


def body(choice: object, **fields: Any) -> ChatBody:
    functions = [{"name": "city", "parameters": CITY}, {"name": "tree", "parameters": TREE}, {"name": "now"}]
    tools = [{"type": "function", "function": each} for each in functions]
    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": tools, "tool_choice": choice}
    return ChatBody.model_validate(asked | fields)


def test_each_functions_own_definitions_are_what_its_arguments_fit() -> None:
    functions = [tool.function for tool in body("required").tools[:2]]
    several = jsonschema_rs.validator_for(calls_schema(functions, is_one=False))
    one = jsonschema_rs.validator_for(calls_schema(functions, is_one=True))
    for each in GOOD:
        assert several.is_valid(each) and one.is_valid(each), each
    assert several.is_valid([GOOD[0][0], GOOD[2][0]]) and not one.is_valid([GOOD[0][0], GOOD[2][0]])
    for wrong in BAD:
        assert not several.is_valid(wrong), wrong


@pytest.mark.covers("A11")
def test_a_choice_by_name_leaves_the_others_out_and_what_cannot_end_is_refused() -> None:
    named = {"type": "function", "function": {"name": "city"}}
    assert "tree" not in forced_grammar(body(named), (7,)).text
    assert "tree" in forced_grammar(body("required"), (7,)).text
    assert forced_grammar(body("required"), (7,)).end_token_ids == (7,)
    for fields, ends, words in (({"ignore_eos": True}, (7,), "ignore_eos"), ({}, (), "no end of text")):
        with pytest.raises(ApiError, match=words):
            forced_grammar(body("required", **fields), ends)


@pytest.mark.covers("A11")
def test_what_another_function_takes_refuses_no_call_of_this_one() -> None:
    """Clients offer many tools, and force a simple one."""
    odd = {"type": "object", "properties": {"a": {"oneOf": [{"type": "string"}]}}}
    functions = [{"name": "city", "parameters": CITY}, {"name": "odd", "parameters": odd}]
    asked = body({"type": "function", "function": {"name": "city"}}).model_dump()
    asked["tools"] = [{"type": "function", "function": each} for each in functions]
    assert "city" in forced_grammar(ChatBody.model_validate(asked), (7,)).text
    with pytest.raises(ApiError, match=r"tools\.1\.function\.parameters"):
        forced_grammar(ChatBody.model_validate(asked | {"tool_choice": "required"}), (7,))


LINKS: Final[dict[str, Any]] = {
    f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{n + 1}"}, {"$ref": f"#/$defs/a{n + 1}"}]} for n in range(500)
}
NO_OBJECTS: Final[tuple[dict[str, Any], ...]] = (
    {"type": "string"},
    {"type": ["object", "null"]},
    {"type": "object", "nullable": True},
    {"title": "anything"},
    {"enum": [{"city": "Oslo"}, "Oslo"]},
    {"const": 1},
    {"anyOf": [CITY, {"type": "null"}]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": True}}},
    {"allOf": [{"$ref": "#/definitions/a"}], "definitions": {"a": {"type": "number"}}, "$defs": {"a": CITY}},
    {"$ref": "#/$defs/a0", "$defs": LINKS | {"a500": {"type": "string"}}},
)
OBJECTS: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"type": "object"},
    {"type": ["object"]},
    {"type": "object", "anyOf": [CITY, {"type": "object", "nullable": False}]},
    {"$ref": "#/$defs/a0", "$defs": LINKS | {"a500": {"type": "object"}}},
    {"enum": [{"city": "Oslo"}, {}]},
    {"anyOf": [{"type": "object"}, {"$ref": "#"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"const": {"b": 1}}}},
)


@pytest.mark.covers("A11")
@pytest.mark.parametrize("parameters", [*NO_OBJECTS, *OBJECTS])
def test_a_call_that_must_come_has_an_object_for_its_arguments(parameters: dict[str, Any]) -> None:
    """What a grammar lets a model write is to be read as a call: arguments that are a text are none, so nothing would be called."""
    asked = body("required", tools=[{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    if parameters in OBJECTS:
        assert forced_grammar(asked, (7,)).text
        return
    with pytest.raises(ApiError, match=r"^tools\.0\.function\.parameters: must be a schema of objects"):
        forced_grammar(asked, (7,))


JSON: Final[dict[str, Any]] = {"type": "json_schema", "json_schema": {"name": "a", "schema": CITY}}
NAMED: Final[dict[str, Any]] = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.covers("A14", "A15")
@pytest.mark.parametrize("tool_choice", ["none", "required", NAMED])
@pytest.mark.parametrize("response_format", [JSON, {"type": "json_object"}])
def test_a_format_beside_tools_binds_a_text_and_says_nothing_of_a_call(
    tmp_path: Path, tool_choice: Any, response_format: dict[str, Any]
) -> None:
    """Agents send both with each turn, and which of them is meant follows from tool_choice; of auto it is either."""

    async def scenario(router: LiveRouter) -> None:
        asked: dict[str, Any] = {"messages": HI, "tools": [WEATHER], "tool_choice": tool_choice, "max_tokens": 5}
        answer = await router.post(CHAT, **asked, response_format=response_format)
        assert answer.status_code == 200, answer.text
        plain = {name: asked[name] for name in ("messages", "max_tokens")} | {"response_format": response_format}
        await router.post(CHAT, **(plain if tool_choice == "none" else asked))
        first, second = [dispatch.sampling.grammar for dispatch in router.pair.prefill.dispatches]
        assert first == second and first.text
        broken = await router.post(CHAT, **asked, response_format={"type": "json_schema"})
        assert broken.json()["error"]["param"] == "response_format.json_schema", "looked at all the same"
        other = await router.post(CHAT, **asked, structured_outputs={"regex": "a"})
        assert (other.status_code == 200) == (tool_choice == "none")

    play(write_tool_model(tmp_path / "model"), scenario, max_model_len=1024)
