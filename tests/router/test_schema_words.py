"""Words of a schema that say nothing are taken, and those that another word says are followed; formats hold what validators do."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Final

import jsonschema_rs
import pytest

from engine import plan
from engine.byte_tokenizer import END_OF_TEXT, NUM_BYTES, write_tokenizer
from engine.grammars import Grammars
from router.openai_types import ApiError
from router.schema_words import FORMAT_PATTERNS, plain
from router.structured import schema_grammar
from tests.router.test_structured import VOCAB_SIZE, said


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    directory: Path = tmp_path_factory.mktemp("model")
    write_tokenizer(VOCAB_SIZE, 256, directory)
    return Grammars(directory, VOCAB_SIZE)


def taken(schema: Any) -> plan.Grammar:
    """As nodes get it."""
    asked = schema_grammar(schema, "schema", is_compact=True)
    return plan.Grammar(asked.kind, asked.text, asked.is_compact, (END_OF_TEXT,))


def can_say(grammars: Grammars, schema: Any, text: str) -> bool:
    """Whether the whole text fits."""
    constraint = grammars.constraint(taken(schema))
    for byte in text.encode():
        allowed = constraint.allowed()
        assert allowed is not None
        if not allowed[byte]:
            return False
        constraint.add(byte)
    allowed = constraint.allowed()
    return allowed is not None and bool(allowed[END_OF_TEXT])


A: Final = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}
B: Final = {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]}

# (what is written, what it is taken for)
SAYS: Final[list[tuple[dict[str, Any], dict[str, Any]]]] = [
    ({"type": "array", "items": True, "uniqueItems": False}, {"type": "array", "items": True}),
    ({"type": "integer", "format": "int64", "minimum": 0}, {"type": "integer", "minimum": 0}),
    ({"type": "integer", "format": "int32"}, {"type": "integer"}),
    ({"type": ["number", "null"], "format": "double"}, {"type": ["number", "null"]}),
    ({"type": "number", "format": "float"}, {"type": "number"}),
    ({"type": "integer", "multipleOf": 1}, {"type": "integer"}),
    ({"type": "string", "nullable": False}, {"type": "string"}),
    ({"$ref": "#/$defs/a", "nullable": False}, {"$ref": "#/$defs/a"}),
    ({"type": "string", "maxLength": 3, "nullable": True}, {"type": ["string", "null"], "maxLength": 3}),
    ({"type": ["string", "null"], "nullable": True}, {"type": ["string", "null"]}),
    ({"enum": ["a", None], "type": "string", "nullable": True}, {"enum": ["a", None], "type": ["string", "null"]}),
    ({"type": "object", "propertyNames": {"type": "string"}}, {"type": "object"}),
    ({"type": "object", "anyOf": [A, B]}, {"anyOf": [A, B]}),
    ({"type": "object", "properties": {"nullable": {"type": "null", "nullable": False}}},
     {"type": "object", "properties": {"nullable": {"type": "null"}}}),
    ({"enum": [{"uniqueItems": False}]}, {"enum": [{"uniqueItems": False}]}),
]  # fmt: skip


@pytest.mark.covers("A14")
@pytest.mark.parametrize(("schema", "same"), SAYS)
def test_a_schema_without_words_that_say_nothing_is_the_same_schema(schema: Any, same: Any) -> None:
    told = json.dumps(schema)
    assert plain(schema) == same
    assert json.dumps(schema) == told, "the client's own stays as it is: answers repeat it"
    deep = {"type": "array", "items": {"anyOf": [schema]}, "$defs": {"a": schema}}
    assert plain(deep) == {"type": "array", "items": {"anyOf": [same]}, "$defs": {"a": same}}
    if "$ref" not in schema:
        assert schema_grammar(schema, "schema") == schema_grammar(same, "schema")


REFUSED: Final[list[tuple[Any, str]]] = [
    ({"type": "array", "uniqueItems": True}, '"uniqueItems" is not supported with the type array'),
    ({"type": "integer", "multipleOf": 2}, '"multipleOf" is not supported'),
    ({"type": "integer", "multipleOf": True}, '"multipleOf" is not supported'),
    ({"type": "number", "multipleOf": 1}, '"multipleOf" is not supported'),
    ({"type": "integer", "format": "uuid"}, '"format" is not supported with the type integer'),
    ({"type": "string", "format": "int32"}, 'schema.format: "int32" is not supported'),
    ({"type": "string", "nullable": "yes"}, '"nullable" is not supported'),
    ({"$ref": "#", "nullable": True}, '"nullable" is not supported beside $ref'),
    ({"type": "string", "enum": ["a"], "nullable": True}, '"nullable" is not supported beside enum'),
    ({"nullable": True}, '"nullable" is not supported without a type'),
    ({"type": "object", "propertyNames": {"pattern": "a"}}, '"propertyNames" is not supported'),
    ({"type": "object", "propertyNames": {"type": "string", "maxLength": 3}}, '"propertyNames" is not supported'),
    ({"type": "object", "anyOf": [A, {"type": "null"}]}, '"type" is not supported beside anyOf'),
    ({"type": "object", "anyOf": [A, B | {"nullable": True}]}, '"type" is not supported beside anyOf'),
    ({"type": "object", "anyOf": [A, {"$ref": "#"}]}, '"type" is not supported beside anyOf'),
    ({"type": "object", "anyOf": []}, '"type" is not supported beside anyOf'),
    # An open object would let a declared name be said again with an escape in it, and be anything.
    ({"type": "object", "properties": {"a": {}}, "additionalProperties": True}, "must be false beside properties"),
]


@pytest.mark.covers("A14", "A11")
@pytest.mark.parametrize(("schema", "words"), REFUSED)
def test_one_that_says_something_is_still_refused_by_name(schema: Any, words: str) -> None:
    with pytest.raises(ApiError) as refused:
        schema_grammar(schema, "schema")
    assert words in refused.value.message


@pytest.mark.covers("A14")
def test_nullable_lets_a_null_be_said_and_nothing_else_more(grammars: Grammars) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 2, "nullable": True}}}
    texts = {'{"a": null}': True, '{"a": "xy"}': True, '{"a": "xyz"}': False, '{"a": 1}': False, "null": False}
    assert {text: can_say(grammars, schema, text) for text in texts} == texts


VALUES: Final[dict[str, tuple[list[str], list[str]]]] = {
    "ipv4": (
        ["0.0.0.0", "255.255.255.255", "192.168.10.1", "99.100.199.249"],
        ["256.1.1.1", "1.2.3", "1.2.3.4.5", "01.2.3.4", "1.2.3.04", "1.2.3.", "a.b.c.d", ""],
    ),
    "ipv6": (
        ["::", "::1", "1::", "fe80::1:2", "1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7::", "::2:3:4:5:6:7:8", "a:b::C:D", "1::3:4:5:6:7:8"],
        [":", ":::", "1::2::3", "12345::", "1:2:3:4:5:6:7", "1:2:3:4:5:6:7:8:9", "g::", "1:2:3:4:5:6:7::8", "::1:", ""],
    ),
    "hostname": (
        ["a", "localhost", "example.com", "a-b.c-d.e", "www.a1.example.co.uk", "x" * 25, "1a"],
        ["-a", "a-", "a.", ".a", "a..b", "a_b", "a b", "xn--a", "é.com", ""],
    ),
    "duration": (
        ["P1D", "PT1H", "PT1H30M", "P1Y2M3DT4H5M6S", "P2W", "PT36H", "P1M", "PT5S", "P10Y", "P1M2D"],
        ["P", "PT", "P1", "1D", "P1DT", "P1H", "P1Y1D", "PT1H1S", "P1W2D", "p1d", "P-1D", "P1.5D", ""],
    ),
}  # fmt: skip


@pytest.mark.covers("A14")
@pytest.mark.parametrize("name", [*FORMAT_PATTERNS])
def test_a_format_holds_what_validators_hold_and_nothing_else(grammars: Grammars, name: str) -> None:
    schema = {"type": "string", "format": name}
    grammars.check(taken(schema))
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    good, bad = VALUES[name]
    assert {each: can_say(grammars, schema, json.dumps(each)) for each in good} == dict.fromkeys(good, True)
    assert {each: can_say(grammars, schema, json.dumps(each)) for each in bad} == dict.fromkeys(bad, False)
    assert all(validator.is_valid(each) for each in good)
    rng = random.Random(name)
    texts = [text for _ in range(60) if (text := said(grammars, taken(schema), rng)) is not None]
    assert len(texts) > 20
    assert not [text for text in texts if not validator.is_valid(json.loads(text))]
    assert max(map(ord, "".join(texts))) < NUM_BYTES


@pytest.mark.covers("A14")
def test_a_format_counts_among_a_schemas_counts() -> None:
    many = {"type": "object", "properties": {f"p{i}": {"type": "string", "format": "ipv6"} for i in range(60)}}
    with pytest.raises(ApiError, match="its lengths and counts together are"):
        schema_grammar(many, "schema")
