"""What a schema may say: whatever is taken is followed to the letter, and what would not be is refused by name."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

from engine import plan
from engine.byte_tokenizer import END_OF_TEXT, NUM_BYTES, write_tokenizer
from engine.grammars import Grammars
from router.openai_types import ApiError
from router.structured import MAX_REPEATS, grammar_of, schema_grammar

VOCAB_SIZE = 300  # bytes, special tokens, and a few words that nobody says in JSON


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    directory = tmp_path_factory.mktemp("model")
    write_tokenizer(VOCAB_SIZE, 256, directory)
    return Grammars(directory, VOCAB_SIZE)


def drawn(rng: random.Random, depth: int = 3) -> Any:
    """Any schema, of keywords that there are: most are refused for one of them."""
    if rng.random() < 0.05:
        return True
    schema: dict[str, Any] = {}
    kinds = ["string", "integer", "number", "boolean", "null", *(["object", "array"] * 3 if depth else [])]
    match rng.randrange(8):
        case 0:
            schema["enum"] = rng.sample(["a", 1, None, True, [1], {"x": "y"}, '"\\\n€'], rng.randint(1, 3))
        case 1:
            schema["const"] = rng.choice(["a", 7, None, {"k": [1, "z"]}])
        case 2 if depth:
            schema[rng.choice(["anyOf", "anyOf", "allOf", "oneOf"])] = [
                drawn(rng, depth - 1) for _ in range(rng.randint(1, 2))
            ]
        case _:
            schema["type"] = rng.choice([rng.choice(kinds), rng.choice(kinds), rng.sample(kinds[:5], 2)])
    names = rng.sample(["p", "q r", "é"], rng.randint(0, 3))
    keywords: dict[str, Any] = {
        "minLength": rng.randint(0, 3),
        "maxLength": rng.randint(3, 6),
        "pattern": rng.choice(
            ["^[a-c]+$", "^x{2,3}$", "^(é|\\d)$", '^a"', r'^["x]\\?$', r"^[^a]\W.\s$", "^.[^a] €", r"[!-~]\Sé"]
        ),
        "format": rng.choice(["uuid", "time", "email"]),
        "minimum": rng.choice([-3, 0, 2.5]),
        "maximum": rng.choice([3, 100, 7.25]),
        "exclusiveMinimum": rng.choice([-9, 0]),
        "exclusiveMaximum": rng.choice([50, 4]),
        "multipleOf": 3,
        "items": drawn(rng, depth - 1) if depth else True,
        "prefixItems": [drawn(rng, depth - 1)] if depth else [],
        "minItems": rng.randint(0, 1),
        "maxItems": rng.randint(1, 3),
        "uniqueItems": True,
        "properties": {name: drawn(rng, depth - 1) for name in names} if depth else {},
        "required": names[:1],
        "additionalProperties": rng.choice([False, False, drawn(rng, depth - 1) if depth else True]),
        "title": "t",
        "not": {"type": "null"},
    }
    fitting = {
        "string": ["minLength", "maxLength", "pattern", "format"],
        "integer": ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"],
        "number": ["minimum", "maximum"],
        "object": ["properties", "required", "additionalProperties"],
        "array": ["items", "prefixItems", "minItems", "maxItems"],
    }
    kind = schema.get("type")
    for name in fitting.get(kind, []) if isinstance(kind, str) else []:
        if rng.random() < 0.5:
            schema[name] = keywords[name]
    if rng.random() < 0.1:
        name = rng.choice([*keywords])
        schema[name] = keywords[name]
    return schema


def said(grammars: Grammars, grammar: plan.Grammar, rng: random.Random) -> str | None:
    """A text drawn token by token from what is allowed; None if it gets long."""
    constraint = grammars.constraint(grammar)
    token_ids: list[int] = []
    while len(token_ids) < 400:
        allowed = constraint.allowed()
        assert allowed is not None
        likely = [each for each in b'"}],:0189abct' if allowed[each]]
        choices = likely if likely and rng.random() < 0.8 else np.flatnonzero(allowed).tolist()
        assert choices, f"nothing may follow {bytes(token_ids)!r}"
        if allowed[END_OF_TEXT] and rng.random() < 0.3:
            return bytes(token_ids).decode()
        token_id = rng.choice(choices)
        if token_id == END_OF_TEXT:
            return bytes(token_ids).decode()
        assert token_id < NUM_BYTES or token_id == END_OF_TEXT or token_id >= 260
        if token_id >= NUM_BYTES:
            continue  # a word: not of bytes alone
        token_ids.append(token_id)
        constraint.add(token_id)
    return None


@pytest.mark.covers("A14")
@pytest.mark.parametrize("part", range(4))
def test_whatever_is_taken_is_followed(grammars: Grammars, part: int) -> None:
    num_taken = num_said = 0
    for seed in range(part * 100, part * 100 + 100):
        rng = random.Random(seed)
        schema = drawn(rng)
        try:
            taken = schema_grammar(schema, "schema", is_compact=True)
        except ApiError as error:
            assert error.status == 400
            assert "\n" not in error.message
            continue
        num_taken += 1
        grammar = plan.Grammar(taken.kind, taken.text, taken.is_compact, (END_OF_TEXT,))
        try:
            grammars.check(grammar)
        except ValueError:
            continue  # bounds that contradict each other: refused by a node
        for _ in range(5):
            text = said(grammars, grammar, rng)
            value = None if text is None else json.loads(text)
            if text is None or "Infinity" in json.dumps(value):  # 9E999, which Python's numbers do not hold
                continue
            num_said += 1
            assert jsonschema_rs.validator_for(schema, validate_formats=True).is_valid(value), (seed, schema, text)
    assert num_taken > 30
    assert num_said > 60


REFUSED: list[tuple[Any, str]] = [
    ({"type": "integer", "multipleOf": 3}, '"multipleOf" is not supported with the type integer'),
    ({"minimum": 3}, '"minimum" is not supported without a type'),
    ({"type": "string", "minimum": 3}, '"minimum" is not supported with the type string'),
    ({"enum": [1], "minimum": 0}, '"minimum" is not supported beside enum'),
    ({"enum": ["a"], "type": "integer"}, "schema.enum: has a value that is not of the type"),
    ({"enum": []}, "schema.enum: must be a list of at least one value"),
    ({"oneOf": [{"type": "integer"}]}, '"oneOf" is not supported'),
    ({"allOf": [{}, {}]}, "schema.allOf: must have one schema"),
    ({"type": "string", "pattern": "a", "maxLength": 3}, "more than one of pattern, format and lengths"),
    ({"type": "string", "format": "colour"}, 'schema.format: "colour" is not supported'),
    ({"type": "string", "format": {}}, "schema.format: an object is not supported"),
    ({"type": "object", "properties": {}, "required": ["a"]}, 'schema.required: "a" is none of the properties'),
    ({"type": "object", "properties": {"a": {}}, "additionalProperties": True}, "must be false beside properties"),
    ({"type": "colour"}, 'schema.type: must be a JSON type, not "colour"'),
    ({"type": ["null", "integer", "null"], "enum": [0]}, "schema.type: names a type twice"),
    ({"$ref": "http://elsewhere/"}, "schema.$ref: must be # or #/$defs/NAME"),
    ({"type": "array", "items": {"type": "array", "items": 5}}, "schema.items.items: must be a schema, not 5"),
    ({"type": "string", "maxLength": MAX_REPEATS + 1}, f"more than {MAX_REPEATS}"),
    (
        {"type": "string", "maxLength": -1},
        "schema.maxLength: must be a whole number from 0 to 9007199254740992, not -1",
    ),
    ({"type": "string", "pattern": "a{99999}"}, "its counts together are"),
    ({"type": "string", "pattern": "((a{1,99}){1,99}){1,99}"}, "its counts together are"),
    ({"type": "string", "pattern": "(?=a)b"}, "(?=…) is not supported"),
    ({"type": "string", "pattern": r"a\bb"}, r"\b is not supported"),
    ({"type": "string", "pattern": "a^b"}, "schema.pattern: ^ is not supported behind anything"),
    ({"type": "string", "pattern": r'a["\\]'}, 'schema.pattern: ["\\\\] has only characters that JSON escapes'),
    ({"type": "string", "pattern": r"^a\Z"}, r"schema.pattern: \Z is not supported"),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 1e-7}, "schema: no number of at most 6 decimals lies within"),
    ({"type": ["integer", "null"], "minimum": 0.1, "maximum": 0.3}, "schema: no integer lies within its bounds"),
    ({"enum": [1, 2**63]}, "schema.enum: 9223372036854775808 has more than 64 bits"),
    ({"const": {"a": [-(2**63) - 1]}}, "schema.const: -9223372036854775809 has more than 64 bits"),
    ({"enum": ["x" * 70_000]}, "bytes are more than the 65536"),
    (json.loads('{"type":"array","items":' * 40 + "{}" + "}" * 40), "is nested more than 32 deep"),
    ({"enum": ["\ud800"]}, "half a surrogate pair"),
    ({"type": "object", "default": json.loads("[" * 200 + "]" * 200)}, "must be nested at most 128 deep"),
    ({"enum": [0] * 70_000}, "70001 values are more than the 65536 bytes"),
]


@pytest.mark.covers("A14", "A11")
@pytest.mark.parametrize(("schema", "words"), REFUSED)
def test_a_schema_that_would_not_be_followed_is_refused_by_name(schema: Any, words: str) -> None:
    with pytest.raises(ApiError) as refused:
        schema_grammar(schema, "schema")
    assert refused.value.status == 400
    assert refused.value.message.startswith("schema")
    assert words in refused.value.message


BAD: list[tuple[Any, Any, str]] = [
    ({"type": "json_schema"}, None, "response_format.json_schema: is required"),
    ({"type": "json_schema", "json_schema": {"name": "a b"}}, None, "response_format.json_schema.name: "),
    ({"type": "json_object", "json_schema": {"name": "a"}}, None, "response_format.json_schema: goes with the type"),
    ({"type": "text", "json_schema": {"name": "a", "schema": {}}}, None, "response_format.json_schema: goes with"),
    ({"type": "json_object"}, {"regex": "a"}, "structured_outputs: contradicts response_format"),
    (None, {}, "must have one of json, json_object, regex, choice and grammar, not 0"),
    (None, {"regex": "a", "choice": ["b"]}, "not 2"),
    (None, {"choice": []}, "structured_outputs.choice: must not be empty"),
    (None, {"json": "{"}, "structured_outputs.json: is no JSON"),
    (None, {"json": '{"enum": [NaN]}'}, "structured_outputs.json: holds a number that is not finite"),
    (None, {"json": {"type": "integer", "default": math.inf}}, "structured_outputs.json: holds a number that is not"),
    (None, {"regex": ""}, "structured_outputs.regex: must not be empty"),
    (None, {"regex": "[\ud83c-\udbff]"}, "structured_outputs.regex: holds half a surrogate pair"),
    (None, {"grammar": 'root ::= "\ud800"'}, "structured_outputs.grammar: holds half a surrogate pair"),
    (None, {"choice": ["a", "\udfff"]}, "structured_outputs.choice: holds half a surrogate pair"),
    (None, {"choice": ["日" * 30_000]}, "structured_outputs.choice: 90009 bytes are more than the 65536"),
    (None, {"structural_tag": "x"}, "structured_outputs.structural_tag: unknown parameter"),
]


@pytest.mark.covers("A14", "A11")
@pytest.mark.parametrize(("response_format", "structured_outputs", "words"), BAD)
def test_a_bad_parameter_is_one_sentence(response_format: Any, structured_outputs: Any, words: str) -> None:
    with pytest.raises(ApiError) as refused:
        grammar_of(response_format, structured_outputs, (1,), ignores_end=False)
    assert words in refused.value.message


@pytest.mark.covers("A14")
def test_a_text_that_never_could_end_is_refused() -> None:
    for ends, ignores_end, words in (((), False, "no end of text"), ((1,), True, "ignore_eos")):
        with pytest.raises(ApiError, match=words):
            grammar_of({"type": "json_object"}, None, ends, ignores_end=ignores_end)
    assert grammar_of({"type": "text"}, None, (), ignores_end=True) is None


@pytest.mark.covers("A14")
@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string", "pattern": r"^C:\\[a-z]+$"}, r'"C:\\win"'),
        ({"type": "string", "pattern": '^"é"\n$'}, r'"\"é\"\n"'),
        (
            {"properties": {"pattern": {"type": "string", "pattern": "^[^a] €$"}}, "type": "object"},
            '{"pattern": "b €"}',
        ),
        ({"type": "array", "items": {"anyOf": [{"type": "string", "pattern": '"'}]}}, r'["\""]'),
        ({"type": "array", "minItems": 2}, '["a", {"b": [1]}]'),
        ({"type": "array", "maxItems": 2}, "[1, null]"),
        ({"type": "array", "prefixItems": [{"type": "integer"}], "minItems": 2}, '[1, "a"]'),
        ({"type": "number", "minimum": 0.1, "maximum": 0.1}, "0.1"),
        ({"const": [2**63 - 1, -(2**63)]}, "[9223372036854775807,-9223372036854775808]"),
    ],
)
def test_a_text_that_fits_can_be_said(grammars: Grammars, schema: dict[str, Any], text: str) -> None:
    assert jsonschema_rs.validator_for(schema).is_valid(json.loads(text))
    taken = schema_grammar(schema, "schema", is_compact=True)
    constraint = grammars.constraint(plan.Grammar(taken.kind, taken.text, taken.is_compact, (END_OF_TEXT,)))
    for byte in text.encode():
        allowed = constraint.allowed()
        assert allowed is not None and allowed[byte], f"{chr(byte)!r} of {text}"
        constraint.add(byte)
    allowed = constraint.allowed()
    assert allowed is not None and allowed[END_OF_TEXT]


@pytest.mark.covers("A14")
def test_a_choice_is_said_as_it_is(grammars: Grammars) -> None:
    choices = ["yes", 'a"b\\n\n', "€ 😀", "[x]*", "", "\\u0041 | {é}+ # no\xa0\x7f"]
    asked = grammar_of(None, {"choice": choices}, (END_OF_TEXT,), ignores_end=False)
    assert asked is not None
    grammar = plan.Grammar(asked.kind, asked.text, asked.is_compact, asked.end_token_ids)
    grammars.check(grammar)
    rng = random.Random(3)
    assert {said(grammars, grammar, rng) for _ in range(300)} == {*choices}
