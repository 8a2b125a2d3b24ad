"""Structured outputs: from `response_format` and vLLM's `structured_outputs` to the grammar that nodes follow. Pure.

A schema is taken only if what xgrammar 0.2 makes of it is what it says: a keyword that would be left out, alone or beside
another, is refused by name, because an answer that silently does not fit is a wrong answer. The bounds here keep the compiling
of hostile grammars within a second or so. What only a compiler can tell (a bad regex) a node answers, with 400 as well.

`schema_grammar` is the way in for whoever else has a schema, such as a tool's parameters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final, Literal

from pydantic import Field, StrictStr

from router.events import Grammar
from router.json_reading import TURNS, TooManyValues, read_json
from router.openai_types import SCHEMA_NAME_PATTERN, CheckedBody, Flag, Nested, bad_request, validated
from router.regex_rules import RegexRefusal, num_repeats, within_quotes
from router.schema_values import DECIMALS, LARGEST, followed, has_number, too_wide
from router.schema_words import FORMAT_PATTERNS, plain
from router.wrong_values import NO_CHARACTER, NOT_FINITE, shown

MAX_TEXT_BYTES: Final = 64 << 10  # of a grammar
MAX_DEPTH: Final = 32  # of schemas within schemas
MAX_JSON_DEPTH: Final = (
    128  # of all that is in one, notes as well: what answers repeat, JSON's writer must be able to write
)
MAX_REPEATS: Final = 20_000  # of all counts in a grammar (maxLength, {1,9}) together
MAX_CHOICES: Final = 1_000
ANY_OBJECT: Final[Mapping[str, Any]] = {"type": "object"}

_NOTES: Final = frozenset(
    "title description default examples $schema $id $comment deprecated readOnly writeOnly $defs definitions".split()
)
_OF_TYPE: Final[Mapping[str, frozenset[str]]] = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "boolean": frozenset(),
    "null": frozenset(),
}
# Any of these says all that a schema says, but for a type beside `enum` and `const`, and notes.
_WHOLE: Final = ("$ref", "anyOf", "allOf", "enum", "const")
# Of dates the 30th of February is one, to xgrammar; what it takes for an address no validator does.
_FORMATS: Final = frozenset({"date", "time", "date-time", "email", "uuid", *FORMAT_PATTERNS})
_COUNTS: Final = frozenset({"minItems", "maxItems", "minLength", "maxLength"})
_QUANTIFIER: Final = re.compile(r"\{(\d*)(?:,(\d*))?\}")


class JsonSchema(Nested):
    """OpenAI's `json_schema`. Constrained whether `strict` or not."""

    name: Annotated[str, Field(strict=True, pattern=SCHEMA_NAME_PATTERN)]
    description: StrictStr | None = None
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema")] = True
    strict: Flag | None = None


class ResponseFormat(Nested):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Nested):
    """vLLM's `structured_outputs`: one of the first five."""

    json_: Annotated[dict[str, Any] | StrictStr | None, Field(alias="json")] = None
    json_object: Flag | None = None
    regex: StrictStr | None = None
    choice: Annotated[list[StrictStr], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    grammar: StrictStr | None = None
    disable_any_whitespace: Flag = False


class _Asked(CheckedBody):
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None


def grammar_of(
    response_format: object, structured_outputs: object, end_token_ids: Sequence[int], *, ignores_end: bool
) -> Grammar | None:
    """What a body's two parameters ask for; None: any text. Raises ApiError.

    `end_token_ids`: the model's own stop tokens. `ignores_end`: the client does not want them to end anything.
    """
    if response_format is None and structured_outputs is None:
        return None
    values = {"response_format": response_format, "structured_outputs": structured_outputs}
    asked = validated(_Asked, {name: value for name, value in values.items() if value is not None})
    first = None if asked.response_format is None else _of_format(asked.response_format)
    second = None if asked.structured_outputs is None else _of_structured(asked.structured_outputs)
    if first is not None and second is not None:
        raise bad_request("structured_outputs", "contradicts response_format; give one of them")
    grammar = first or second
    if grammar is None:
        return None
    field = "response_format" if second is None else "structured_outputs"
    if ignores_end:
        raise bad_request(field, "needs the model's end of text, which ignore_eos takes out")
    return ending_with(grammar, end_token_ids, field)


def ending_with(grammar: Grammar, end_token_ids: Sequence[int], field: str) -> Grammar:
    """The same with what may follow a whole text; raises ApiError where the model has nothing that could."""
    if not end_token_ids:
        raise bad_request(field, "this model has no end of text, so that nothing could follow a whole one")
    return replace(grammar, end_token_ids=tuple(end_token_ids))


def schema_grammar(schema: Mapping[str, Any] | bool, field: str, *, is_compact: bool = False) -> Grammar:
    """The grammar of JSON that fits a schema; `ending_with` completes it. Raises ApiError that begins with `field`.

    `is_compact`: no white space but one blank behind each comma and colon.
    """
    _check_extent(schema, field)
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeError as error:
        raise bad_request(field, NO_CHARACTER) from error
    except ValueError as error:
        raise bad_request(field, NOT_FINITE) from error
    check_size(text, field)
    schema = plain(schema)
    counts = sum(_check_schema(schema, field))
    if counts > MAX_REPEATS:
        raise bad_request(field, f"its lengths and counts together are {counts}, more than {MAX_REPEATS}")
    text = json.dumps(followed(schema), ensure_ascii=False)
    check_size(text, field)  # a pattern's characters may have become longer
    return Grammar("json_schema", text, is_compact, field=field)


def _of_format(asked: ResponseFormat) -> Grammar | None:
    if asked.json_schema is not None and asked.type != "json_schema":
        raise bad_request("response_format.json_schema", f"goes with the type json_schema, not {shown(asked.type)}")
    match asked.type:
        case "json_schema":
            if asked.json_schema is None:
                raise bad_request("response_format.json_schema", "is required", "missing_parameter")
            return schema_grammar(asked.json_schema.schema_, "response_format.json_schema.schema")
        case "json_object":
            return schema_grammar(ANY_OBJECT, "response_format")
        case "text":
            return None


def _of_structured(asked: StructuredOutputs) -> Grammar | None:
    name = "structured_outputs"
    kinds = [asked.json_, asked.json_object or None, asked.regex, asked.choice, asked.grammar]
    if (num_given := sum(each is not None for each in kinds)) != 1:
        raise bad_request(name, f"must have one of json, json_object, regex, choice and grammar, not {num_given}")
    if asked.json_object:
        return schema_grammar(ANY_OBJECT, name, is_compact=asked.disable_any_whitespace)
    if asked.json_ is not None:
        schema = _parsed(asked.json_, f"{name}.json") if isinstance(asked.json_, str) else asked.json_
        return schema_grammar(schema, f"{name}.json", is_compact=asked.disable_any_whitespace)
    if asked.choice is not None:
        check_size("root ::= " + " | ".join(asked.choice), f"{name}.choice")
        text = "root ::= " + " | ".join(map(_quoted, asked.choice))
        check_size(text, f"{name}.choice")  # quotes and what cannot be printed have become longer
        return Grammar("ebnf", text, field=f"{name}.choice")
    kind: Literal["regex", "ebnf"] = "ebnf" if asked.regex is None else "regex"
    field = f"{name}.{'grammar' if asked.regex is None else 'regex'}"
    text = asked.regex or asked.grammar or ""
    check_size(text, field)
    _check_repeats(text, field, is_regex=kind == "regex")
    return Grammar(kind, text, field=field)


def _parsed(text: str, field: str) -> Any:
    try:
        return TURNS.call(len(text), read_json, text)
    except TooManyValues as error:
        raise bad_request(field, str(error)) from error
    except (ValueError, RecursionError) as error:
        raise bad_request(field, f"is no JSON: {shown(text)}") from error


def _quoted(text: str) -> str:
    """A literal of the grammar's language: what can be printed as it is, everything else by its number."""
    return '"' + "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in text) + '"'


def _check_extent(schema: object, field: str) -> None:
    """Raise for what is too deep or too much to be written: JSON's writer lets nobody else run, not even the loop."""
    depth, num_values, level = 0, 0, [schema]
    while level := [each for each in level if isinstance(each, dict | list) and each]:
        depth, num_values = depth + 1, num_values + sum(map(len, level))
        if depth > MAX_JSON_DEPTH:
            raise bad_request(field, f"must be nested at most {MAX_JSON_DEPTH} deep")
        if num_values > MAX_TEXT_BYTES:  # each has a byte at least
            raise bad_request(
                field, f"{num_values} values are more than the {MAX_TEXT_BYTES} bytes that a grammar may have"
            )
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]


def check_size(text: str, field: str) -> None:
    """ApiError, where a grammar's text is longer than may be compiled."""
    if not text:
        raise bad_request(field, "must not be empty")
    if (num_bytes := _num_bytes(text, field)) > MAX_TEXT_BYTES:
        raise bad_request(field, f"{num_bytes} bytes are more than the {MAX_TEXT_BYTES} that a grammar may have")


def _num_bytes(text: str, field: str) -> int:
    """In UTF-8; raises for what no UTF-8, and so no message to a node, can hold."""
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise bad_request(field, NO_CHARACTER) from error


def _num_counts(text: str) -> int:
    return sum(int(number[:9] or 0) for pair in _QUANTIFIER.findall(text) for number in pair)


def _check_repeats(text: str, field: str, *, is_regex: bool = True) -> int:
    try:
        counts = num_repeats(text) if is_regex else _num_counts(text)
    except RegexRefusal as refusal:
        raise bad_request(field, str(refusal), "unsupported_parameter") from refusal
    if counts > MAX_REPEATS:
        raise bad_request(field, f"its counts together are {counts}, more than {MAX_REPEATS}")
    return counts


def _check_schema(schema: object, field: str, depth: int = 0) -> Iterator[int]:
    """Raise for what would not be followed; yields the counts in it."""
    if depth > MAX_DEPTH:
        raise bad_request(field, f"is nested more than {MAX_DEPTH} deep")
    if schema is True:
        return
    if not isinstance(schema, dict):
        raise bad_request(field, f"must be a schema, not {shown(schema)}")
    for name in ("$defs", "definitions"):
        yield from _check_schemas(schema.get(name, {}), f"{field}.{name}", depth)
    types = _types_of(schema, field)
    whole = [name for name in _WHOLE if name in schema]
    if whole:
        own = {whole[0], "type"} if whole[0] in ("enum", "const") else {whole[0]}
        _refuse_others(schema, own, f" beside {whole[0]}", field)
        yield from _check_whole(schema, whole[0], types, field, depth)
        return
    of_types = f" with the type {' or '.join(types)}" if types else " without a type"
    _refuse_others(schema, {"type"}.union(*[_OF_TYPE[each] for each in types]), of_types, field)
    for name in sorted(_COUNTS & schema.keys()):
        yield _count(schema[name], f"{field}.{name}")
    yield from _check_string(schema, field)
    for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if name in schema and not (type(schema[name]) in (int, float) and abs(schema[name]) <= LARGEST):
            raise bad_request(
                f"{field}.{name}", f"must be a number from -{LARGEST} to {LARGEST}, not {shown(schema[name])}"
            )
    for kind, decimals in DECIMALS.items():
        if kind in types and not has_number(schema, decimals):
            told = f" of at most {decimals} decimals" if decimals else ""
            raise bad_request(field, f"no {kind}{told} lies within its bounds")
    yield from _check_object(schema, field, depth)
    if "items" in schema and schema["items"] is not False:
        yield from _check_schema(schema["items"], f"{field}.items", depth + 1)
    for position, each in enumerate(_list(schema, "prefixItems", field)):
        yield from _check_schema(each, f"{field}.prefixItems.{position}", depth + 1)


def _types_of(schema: Mapping[str, Any], field: str) -> list[str]:
    given = schema.get("type", [])
    types = given if isinstance(given, list) else [given]
    for each in types:
        if not isinstance(each, str) or each not in _OF_TYPE:
            raise bad_request(f"{field}.type", f"must be a JSON type, not {shown(each)}")
    if len({*types}) < len(types):  # as JSON Schema has it; and each value of an enum is held against each of them
        raise bad_request(f"{field}.type", "names a type twice")
    return types


def _refuse_others(schema: Mapping[str, Any], own: set[str], where: str, field: str) -> None:
    for name in sorted(schema.keys() - own - _NOTES):
        raise bad_request(field, f"{shown(name)} is not supported{where}", "unsupported_parameter")


def _check_whole(schema: Mapping[str, Any], name: str, types: list[str], field: str, depth: int) -> Iterator[int]:
    value = schema[name]
    match name:
        case "$ref":
            if not isinstance(value, str) or not re.fullmatch(r"#(/(\$defs|definitions)/[^/]+)?", value):
                raise bad_request(f"{field}.$ref", f"must be # or #/$defs/NAME, not {shown(value)}")
        case "enum" | "const":
            values = value if name == "enum" else [value]
            if not isinstance(values, list) or not values:
                raise bad_request(f"{field}.{name}", "must be a list of at least one value")
            if types and not all(any(_is_of(each, kind) for kind in types) for each in values):
                raise bad_request(f"{field}.{name}", "has a value that is not of the type")
            if (number := too_wide(values)) is not None:
                raise bad_request(f"{field}.{name}", f"{shown(number)} has more than 64 bits")
        case _:
            schemas = _list(schema, name, field)
            if not schemas or (name == "allOf" and len(schemas) > 1):
                raise bad_request(f"{field}.{name}", f"must have {'one' if name == 'allOf' else 'at least one'} schema")
            for position, each in enumerate(schemas):
                yield from _check_schema(each, f"{field}.{name}.{position}", depth + 1)


def _check_string(schema: Mapping[str, Any], field: str) -> Iterator[int]:
    ways = [each for each in ({"pattern"}, {"format"}, {"minLength", "maxLength"}) if each & schema.keys()]
    if len(ways) > 1:
        raise bad_request(field, "has more than one of pattern, format and lengths", "unsupported_parameter")
    if "format" in schema and not (isinstance(schema["format"], str) and schema["format"] in _FORMATS):
        raise bad_request(f"{field}.format", f"{shown(schema['format'])} is not supported", "unsupported_parameter")
    if schema.get("format") in FORMAT_PATTERNS:
        yield num_repeats(FORMAT_PATTERNS[schema["format"]])
    if "pattern" in schema:
        if not isinstance(schema["pattern"], str):
            raise bad_request(f"{field}.pattern", f"must be a text, not {shown(schema['pattern'])}")
        yield _check_repeats(schema["pattern"], f"{field}.pattern")
        try:
            within_quotes(schema["pattern"])
        except RegexRefusal as refusal:
            raise bad_request(f"{field}.pattern", str(refusal), "unsupported_parameter") from refusal


def _check_object(schema: Mapping[str, Any], field: str, depth: int) -> Iterator[int]:
    properties, required = schema.get("properties", {}), _list(schema, "required", field)
    yield from _check_schemas(properties, f"{field}.properties", depth)
    for name in required:
        if not isinstance(name, str) or name not in properties:
            raise bad_request(f"{field}.required", f"{shown(name)} is none of the properties", "unsupported_parameter")
    others = schema.get("additionalProperties", False)
    if others is not False:
        if properties:
            message = "must be false beside properties"
            raise bad_request(f"{field}.additionalProperties", message, "unsupported_parameter")
        yield from _check_schema(others, f"{field}.additionalProperties", depth + 1)


def _check_schemas(schemas: object, field: str, depth: int) -> Iterator[int]:
    if not isinstance(schemas, dict):
        raise bad_request(field, f"must be an object, not {shown(schemas)}")
    for name, each in schemas.items():
        yield from _check_schema(each, f"{field}.{name[:60]}", depth + 1)


def _list(schema: Mapping[str, Any], name: str, field: str) -> list[Any]:
    value = schema.get(name, [])
    if not isinstance(value, list):
        raise bad_request(f"{field}.{name}", f"must be a list, not {shown(value)}")
    return value


def _count(value: object, field: str) -> int:
    if type(value) is not int or not 0 <= value <= LARGEST:
        raise bad_request(field, f"must be a whole number from 0 to {LARGEST}, not {shown(value)}")
    return value


def _is_of(value: object, kind: str) -> bool:
    match kind:
        case "object":
            return isinstance(value, dict)
        case "array":
            return isinstance(value, list)
        case "string":
            return isinstance(value, str)
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "integer":
            return type(value) is int or (isinstance(value, float) and value.is_integer())
        case _:
            return type(value) in (int, float)
