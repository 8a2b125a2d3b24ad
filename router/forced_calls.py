"""The grammar of an answer that must call tools: a JSON list of calls, each with arguments that its function's schema allows. Pure.

    tool_choice required      [{"name": "f", "parameters": {…}}, {"name": "g", "parameters": {…}}, …]     at least one
    … or a function's name    [{"name": "f", "parameters": {…}}]

Functions bring their schemas with their own `$defs`, and `#` means the schema that it stands in; so each becomes a definition of
the whole, and its definitions move there under names that no other function's have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from router.chat_types import ChatBody, Function
from router.events import Grammar
from router.openai_types import bad_request
from router.schema_words import plain
from router.structured import ending_with, grammar_of, schema_grammar

_DEFINITIONS: Final = ("$defs", "definitions")
_VALUES: Final = ("enum", "const", "default", "examples")  # of a schema: no schemas
NO_ARGUMENTS: Final[dict[str, Any]] = {"type": "object", "properties": {}}


def is_forced(body: ChatBody) -> bool:
    """Whether nothing but calls will do."""
    return body.tool_choice not in ("none", "auto")


def forced_grammar(body: ChatBody, end_token_ids: Sequence[int]) -> Grammar:
    """What the answer must fit; `end_token_ids` are the model's own stop tokens. Raises ApiError."""
    if body.ignore_eos:
        raise bad_request("tool_choice", "needs the model's end of text, which ignore_eos takes out")
    # What the text would have to fit says nothing of a call; a format that is none is told all the same.
    grammar_of(body.response_format, None, end_token_ids, ignores_end=False)
    functions = [tool.function for tool in body.tools]
    called = [each for each in functions if body.called_by_name in (None, each.name)]
    for position, function in enumerate(functions):
        if function not in called:
            continue
        field, parameters = f"tools.{position}.function.parameters", function.parameters or NO_ARGUMENTS
        schema_grammar(parameters, field)
        if not is_of_objects(plain(parameters)):
            raise bad_request(field, "must be a schema of objects and nothing else, since arguments are one")
    is_one = body.called_by_name is not None or not body.parallel_tool_calls
    grammar = schema_grammar(calls_schema(called, is_one=is_one), "tools", is_compact=True)
    return ending_with(grammar, end_token_ids, "tool_choice")


def calls_schema(functions: Sequence[Function], *, is_one: bool) -> dict[str, Any]:
    """JSON schema of a list of calls."""
    definitions: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for number, function in enumerate(functions):
        parameters = dict(function.parameters or NO_ARGUMENTS)
        for key in _DEFINITIONS:
            for name, each in parameters.pop(key, {}).items():
                definitions[f"{number}.{key.lstrip('$')}.{name}"] = _moved(each, number)
        definitions[str(number)] = _moved(parameters, number)
        properties = {"name": {"const": function.name}, "parameters": {"$ref": f"#/$defs/{number}"}}
        calls.append({"type": "object", "properties": properties, "required": ["name", "parameters"]})
    bounds = {"minItems": 1} | ({"maxItems": 1} if is_one else {})
    return {"type": "array", "items": {"anyOf": calls}, **bounds, "$defs": definitions}


def is_of_objects(schema: dict[str, Any]) -> bool:
    """Whether all that fits a schema, which has been checked, is an object; no recursion: references may be a long chain."""
    waiting: list[Any] = [schema]
    followed: set[str] = set()
    while waiting:
        match waiting.pop():
            case {"$ref": str(where)}:
                if where not in followed:
                    section, _, name = where.removeprefix("#/").partition("/")
                    waiting += [schema] if where == "#" else [schema.get(section, {}).get(name, NO_ARGUMENTS)]
                    followed.add(where)  # what is missing a compiler misses
            case {"anyOf": list(schemas)} | {"allOf": list(schemas)}:
                waiting += schemas
            case {"enum": list(values)} if all(isinstance(each, dict) for each in values):
                pass
            case {"const": dict()} | {"type": "object" | ["object"]}:
                pass
            case _:
                return False
    return True


def _moved(schema: Any, number: int) -> Any:
    """The same where its function's definitions are among others."""
    if isinstance(schema, list):
        return [_moved(each, number) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str):
            where = [
                f".{each}" for each in value.removeprefix("#").removeprefix("/").removeprefix("$").split("/") if each
            ]
            moved[key] = f"#/$defs/{number}" + "".join(where)
        elif key in _VALUES:
            moved[key] = value
        elif key == "properties" and isinstance(value, dict):  # its keys are names, not words of a schema
            moved[key] = {name: _moved(each, number) for name, each in value.items()}
        else:
            moved[key] = _moved(value, number)
    return moved
