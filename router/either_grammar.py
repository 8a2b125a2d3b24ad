"""The grammar of an answer that either fits a response_format or calls tools, as the model itself writes calls. Pure.

    {"city": "Rome", "temperature": 21}                                          the format
    <tool_call>\\n{"name": "weather", "arguments": {…}}\\n</tool_call>             … or calls: of hermes,
    {"name": "weather", "parameters": {…}}; {…}                                  of llama,
    [TOOL_CALLS][{"name": "weather", "arguments": {…}}, …]                       of mistral,
    [TOOL_CALLS]weather[ARGS]{…}                                                 and of its newer models

Agents that end with a structured answer send both with each turn. Arguments fit their function's schema where a grammar can say
it, and are any object where none can, as without a format; of a function that is `strict` such a schema is an error. What is
made is a structural tag, as xgrammar has them; a mark that is a special token, and so no text, is named by its id.

Source: XGrammar's documentation of structural tags, version 0.2.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from router.chat_types import ChatBody, Function
from router.events import Grammar
from router.forced_calls import NO_ARGUMENTS, calls_schema, is_of_objects
from router.openai_types import ApiError, bad_request
from router.schema_words import plain
from router.structured import ANY_OBJECT, check_size, ending_with, grammar_of, schema_grammar
from router.tool_syntax import ToolSyntax

_MAX_BLANKS: Final = 16  # between two tokens of JSON, as in other answers (engine/grammars.py)
Format = dict[str, Any]


def either_grammar(
    body: ChatBody, syntax: ToolSyntax, special: Mapping[int, str], end_token_ids: Sequence[int]
) -> Grammar | None:
    """What the answer must fit; None: any text. Raises ApiError. special: tokens of the syntax that are no text here, by id."""
    answer = grammar_of(body.response_format, None, end_token_ids, ignores_end=body.ignore_eos)
    if answer is None:
        return None
    ids = {text: token_id for token_id, text in special.items()}
    tag = {"type": "structural_tag", "format": _either(json_format(answer.text), _calls(body, syntax, ids))}
    text = json.dumps(tag, ensure_ascii=False)
    check_size(text, "tools")
    return ending_with(Grammar("structural_tag", text, field="response_format"), end_token_ids, "response_format")


def _calls(body: ChatBody, syntax: ToolSyntax, ids: Mapping[str, int]) -> Format:
    """One call or more."""
    functions = [tool.function for tool in body.tools]
    schemas = [_schema(function, position) for position, function in enumerate(functions)]
    together = [
        function.model_copy(update={"parameters": schema})
        for function, (schema, _) in zip(functions, schemas, strict=True)
    ]
    schema_grammar(calls_schema(together, is_one=False), "tools")  # may be too much, where none is by itself
    arguments = [json_format(followed) for _, followed in schemas]
    key, mark = syntax.argument_keys[0] if not syntax.bare else syntax.argument_keys[-1], piece(syntax.mark, ids)
    if syntax.is_named and "[ARGS]" in ids:
        named = [
            sequence(mark, _text(function.name), piece("[ARGS]", ids), each)
            for function, each in zip(functions, arguments, strict=True)
        ]
        return _repeated(_either(*named), "", body)
    objects = _either(
        *(
            sequence(_text(f'{{"name": {json.dumps(function.name)}, "{key}": '), each, _text("}"))
            for function, each in zip(functions, arguments, strict=True)
        )
    )
    if syntax.is_list:
        opening = _either(_text("["), _text(" ["))
        return sequence(mark, opening, _repeated(objects, ", ", body), _text("]"))
    if syntax.bare:
        return _repeated(objects, "; ", body)
    return _repeated(sequence(mark, _text("\n"), objects, _text("\n"), piece(syntax.closes, ids)), "\n", body)


def _schema(function: Function, position: int) -> tuple[dict[str, Any], str]:
    """What its arguments fit, as it was written, and as a grammar says it. Raises ApiError."""
    field, parameters = f"tools.{position}.function.parameters", function.parameters or NO_ARGUMENTS
    try:
        followed = schema_grammar(parameters, field)
        if not is_of_objects(plain(parameters)):
            raise bad_request(field, "must be a schema of objects and nothing else, since arguments are one")
    except ApiError:
        if function.strict:
            raise
        parameters = dict(ANY_OBJECT)
        followed = schema_grammar(parameters, field)
    return parameters, followed.text


def json_format(schema: str, *, is_compact: bool = False) -> Format:
    """JSON that fits a schema; is_compact: with a blank at most between two tokens."""
    blanks = 1 if is_compact else _MAX_BLANKS
    return {"type": "json_schema", "json_schema": json.loads(schema), "max_whitespace_cnt": blanks}


def _text(text: str) -> Format:
    return {"type": "const_string", "value": text}


def piece(text: str, ids: Mapping[str, int]) -> Format:
    """A text; the token, where it is a special one."""
    return {"type": "token", "token": ids[text]} if text in ids else _text(text)


def sequence(*elements: Format) -> Format:
    """One behind the other."""
    return {"type": "sequence", "elements": [*elements]}


def _either(*elements: Format) -> Format:
    return {"type": "or", "elements": [*elements]}


def _repeated(each: Format, separator: str, body: ChatBody) -> Format:
    if not body.parallel_tool_calls:
        return each
    further = sequence(_text(separator), each) if separator else each
    return sequence(each, {"type": "star", "content": further})
