"""Whatever odd text stands anywhere in a request, the client has an answer that is about it, and the router goes on.

Where texts may stand is read from what the router says of itself, /openapi.json: a new parameter is tried like the others.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.router.live_router import MODEL_NAME, LiveRouter
from tests.router.test_api import play
from tests.router.test_tool_calls import saying
from tests.router.tool_model import CITY, write_tool_model

ODD: Final = ("\ud800", "[\ud83c-\udbff]", "\x00", "é" * 70_000)
TOOL: Final[dict[str, Any]] = {"type": "function", "function": {"name": "now", "parameters": CITY}}
# What an endpoint must have, and what makes parts of it count that are not looked at otherwise.
GOOD: Final[dict[str, list[dict[str, Any]]]] = {
    "/v1/completions": [{"prompt": "hi"}, {"prompt": "hi", "stream": True}],
    "/v1/chat/completions": [
        {"messages": [{"role": "user", "content": "hi"}]},
        {"messages": [{"role": "user", "content": "hi"}], "stream": True, "tools": [TOOL]},
    ],
    "/v1/responses": [{"input": "hi"}, {"input": "hi", "stream": True}],
    "/tokenize": [{"prompt": "hi"}, {"messages": [{"role": "user", "content": "hi"}]}],
    "/detokenize": [{"tokens": [1]}],
}
MOST_DEEP: Final = 6


def unlisted(path: str, text: str) -> list[dict[str, Any]]:
    """Parts of a body of which /openapi.json says no more than that they are objects, with the text in them."""
    schemas: list[dict[str, Any]] = [{"const": text}, {"enum": [text]}, {"pattern": text, "type": "string"}]
    schemas.append({"type": "object", "properties": {text: {}}, "required": [text]})
    schemas.append({"$ref": text})
    tools = [TOOL["function"] | {"parameters": {"type": "object", "properties": {"a": each}}} for each in schemas]
    described = {"name": "a", "description": text, "schema": {"const": 1}}
    if path == "/v1/responses":
        formats = [{"name": "a", "schema": each} for each in schemas] + [described]
        calls = [{"tools": [{"type": "function"} | tool], "tool_choice": "required"} for tool in tools]
        return [{"text": {"format": {"type": "json_schema"} | each}} for each in formats] + calls
    if not path.startswith("/v1/"):
        return []
    structured: list[dict[str, Any]] = [{kind: text} for kind in ("regex", "grammar", "json")]
    structured += [{"choice": [text]}, *({"json": each} for each in schemas)]
    formats = [{"name": "a", "schema": each} for each in schemas] + [described]
    bodies: list[dict[str, Any]] = [{"structured_outputs": each} for each in structured]
    bodies += [{"response_format": {"type": "json_schema", "json_schema": each}} for each in formats]
    bodies += [{"logit_bias": {text: 1}}, {"stream_options": {text: True}}, {text: 1}]
    if path == "/v1/chat/completions":
        asked = ("required", {"type": "function", "function": {"name": text}})
        bodies += [
            {"tools": [{"type": "function", "function": tool}], "tool_choice": each} for tool in tools for each in asked
        ]
    return bodies


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tool_model(tmp_path_factory.mktemp("model"))


def with_text(schema: Any, schemas: dict[str, Any], text: str, depth: int = 0) -> Iterator[Any]:
    """Values that a schema allows, each with the text at one of the places where there may be one."""
    if not isinstance(schema, dict) or depth > MOST_DEEP:
        return
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    for each in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())):
        yield from with_text(each, schemas, text, depth + 1)
    if schema.get("type") == "string" and "enum" not in schema and "const" not in schema:
        yield text
    for value in with_text(schema.get("items"), schemas, text, depth + 1):
        yield [value]
    for value in with_text(schema.get("additionalProperties"), schemas, text, depth + 1):
        yield {"a": value}
    needed = {name: fixed(schema["properties"][name], schemas) for name in schema.get("required", ())}
    for name, part in schema.get("properties", {}).items():
        for value in with_text(part, schemas, text, depth + 1):
            yield needed | {name: value}


def fixed(schema: dict[str, Any], schemas: dict[str, Any]) -> Any:
    """Something that a schema allows, or nearly."""
    if "$ref" in schema:
        return fixed(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    if "anyOf" in schema:
        return fixed(schema["anyOf"][0], schemas)
    for word in ("const", "default"):
        if word in schema:
            return schema[word]
    if "enum" in schema:
        return schema["enum"][0]
    return {"string": "a", "integer": 1, "number": 1, "boolean": True, "array": [], "object": {}}.get(
        str(schema.get("type"))
    )


@pytest.mark.covers("A11")
@pytest.mark.parametrize("text", ODD, ids=["half", "half in a class", "nul", "long"])
@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.rpartition("/")[2])
def test_every_place_for_a_text(model: Path, path: str, text: str) -> None:
    async def scenario(router: LiveRouter) -> None:
        told = (await router.client.get("/openapi.json")).json()
        schemas = told["components"]["schemas"]
        content = told["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        body_schema = schemas[content["$ref"].rpartition("/")[2]]
        parts = unlisted(path, text)
        for name, part in body_schema["properties"].items():
            parts += [{name: value} for value in with_text(part, schemas, text)]
        assert parts
        bugs: list[dict[str, Any]] = []  # which would end the process
        asyncio.get_running_loop().set_exception_handler(lambda _, context: bugs.append(context))
        for asked in ({"model": MODEL_NAME} | good | part for good in GOOD[path] for part in parts):
            answer = await router.client.post(path, content=json.dumps(asked), timeout=60)
            assert answer.status_code < 500, (asked, answer.text)
            assert '"server_error"' not in answer.text, (asked, answer.text)
        assert not bugs

    play(model, scenario, saying("Well."))
