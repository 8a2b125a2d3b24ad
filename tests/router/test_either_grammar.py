"""An answer that fits a format, or calls tools as the model writes calls: what its grammar lets be said, and how it is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from engine import plan
from engine.byte_tokenizer import END_OF_TEXT, write_tokenizer
from engine.grammars import Grammars
from proto import baton_pb2 as pb
from router.answer_grammar import answer_grammar
from router.chat_types import ChatBody
from router.either_grammar import either_grammar
from router.openai_types import ApiError
from router.tool_syntax import HERMES, LLAMA, MISTRAL, ToolSyntax
from tests.router.live_router import LiveRouter
from tests.router.scripted_nodes import Script, replying
from tests.router.test_api import Scenario
from tests.router.test_api import play as play_briefly
from tests.router.test_tool_calls import HI, flattened, joined
from tests.router.tiny_model import TURN_ID
from tests.router.tool_model import MISTRAL_TEMPLATE, WEATHER, write_tool_model

CHAT: Final = "/v1/chat/completions"
VOCAB_SIZE: Final = 300
MARK, ARGS = 256, 259  # special tokens of the tokenizer, with names of ours
ANSWER: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"text": {"type": "string"}},
    "required": ["text"],
    "additionalProperties": False,
}
FORMAT: Final[dict[str, Any]] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}
CITY: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Oslo", "Łódź"]}},
}
STRANGE: Final[dict[str, Any]] = {"type": "object", "not": {}}  # no grammar says it
FUNCTIONS: Final[list[dict[str, Any]]] = [
    {"name": "city", "parameters": CITY},
    {"name": "now"},
    {"name": "odd", "parameters": STRANGE},
]
TEXT: Final = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 15_000}}}
LONG: Final[dict[str, Any]] = {"type": "function", "function": {"parameters": TEXT}}
OSLO, ODD = '{"city": "Oslo"}', '{"any": ["thing"]}'


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    directory = tmp_path_factory.mktemp("model")
    write_tokenizer(VOCAB_SIZE, 256, directory)
    return Grammars(directory, VOCAB_SIZE)


def body(**fields: Any) -> ChatBody:
    tools = [{"type": "function", "function": each} for each in FUNCTIONS]
    asked = {"model": "m", "messages": HI, "tools": tools, "response_format": FORMAT}
    return ChatBody.model_validate(asked | fields)


def can_be_said(grammars: Grammars, syntax: ToolSyntax, special: dict[int, str], asked: ChatBody, text: str) -> bool:
    """Whether it is a whole text of the grammar; special tokens are written by what they spell."""
    made = either_grammar(asked, syntax, special, (END_OF_TEXT,))
    assert made is not None
    grammar = plan.Grammar(made.kind, made.text, made.is_compact, made.end_token_ids)
    grammars.check(grammar)
    constraint = grammars.constraint(grammar)
    while text:
        special_id = next((token_id for token_id, each in special.items() if text.startswith(each)), None)
        spelled = text[0] if special_id is None else special[special_id]
        for token_id in spelled.encode() if special_id is None else [special_id]:
            allowed = constraint.allowed()
            if allowed is None or not allowed[token_id]:
                return False
            constraint.add(token_id)
        text = text[len(spelled) :]
    allowed = constraint.allowed()
    return allowed is None or bool(allowed[END_OF_TEXT])


def hermes(*calls: tuple[str, str]) -> str:
    return "\n".join(f'<tool_call>\n{{"name": "{name}", "arguments": {each}}}\n</tool_call>' for name, each in calls)


def objects(*calls: tuple[str, str], key: str, separator: str) -> str:
    return separator.join(f'{{"name": "{name}", "{key}": {each}}}' for name, each in calls)


def llama(*calls: tuple[str, str]) -> str:
    return objects(*calls, key="parameters", separator="; ")


def mistral(*calls: tuple[str, str]) -> str:
    return f"[TOOL_CALLS][{objects(*calls, key='arguments', separator=', ')}]"


def named(*calls: tuple[str, str]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{each}" for name, each in calls)


FAMILIES: Final[list[Any]] = [
    pytest.param(HERMES, {}, hermes, id="hermes"),
    pytest.param(HERMES, {MARK: "<tool_call>", ARGS: "</tool_call>"}, hermes, id="hermes, special"),
    pytest.param(LLAMA, {}, llama, id="llama"),
    pytest.param(MISTRAL, {MARK: "[TOOL_CALLS]"}, mistral, id="mistral"),
    pytest.param(MISTRAL, {MARK: "[TOOL_CALLS]", ARGS: "[ARGS]"}, named, id="mistral, named"),
]


@pytest.mark.covers("A14", "A15")
@pytest.mark.parametrize(("syntax", "special", "write"), FAMILIES)
def test_the_format_or_calls_can_be_said_and_nothing_else(
    grammars: Grammars, syntax: ToolSyntax, special: dict[int, str], write: Any
) -> None:
    calls = [("city", OSLO), ("now", "{}"), ("odd", ODD)]
    good = ['{"text": "<tool_call> [TOOL_CALLS]"}', *(write(call) for call in calls), write(*calls)]
    bad = [
        "Well.",
        '{"txt": ""}',
        write(("city", '{"city": "Rome"}')),
        write(("nobody", "{}")),
        write(("now", '{"city": "Oslo"}')),
        write(("now", "[]")),
        '{"text": ""}' + write(calls[0]),
        write(calls[0]) + '{"text": ""}',
        write(calls[0])[:-1],
    ]
    if special:  # in a text they stand for nothing
        good[0] = '{"text": "<tool"}'
    for text in good:
        assert can_be_said(grammars, syntax, special, body(), text), text
    for text in bad:
        assert not can_be_said(grammars, syntax, special, body(), text), text
    one = body(parallel_tool_calls=False, response_format={"type": "json_object"})
    assert can_be_said(grammars, syntax, special, one, write(calls[0]))
    assert not can_be_said(grammars, syntax, special, one, write(*calls)), "one call"
    assert can_be_said(grammars, syntax, special, one, '{"any": {"thing": 1}}')


@pytest.mark.covers("A11")
def test_what_could_not_be_followed_is_refused_where_it_was_promised() -> None:
    strict = [{"type": "function", "function": {"name": "odd", "parameters": STRANGE, "strict": True}}]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tools": strict}, r'tools\.0\.function\.parameters.*"not" is not supported'),
        ({"ignore_eos": True}, "needs the model's end of text"),
        (
            {"tools": [LONG | {"function": LONG["function"] | {"name": name}} for name in "ab"]},
            "^tools: .* together are",
        ),
        ({"response_format": {"type": "json_schema"}}, "json_schema: is required"),
    ]
    for fields, words in cases:
        with pytest.raises(ApiError, match=words):
            either_grammar(body(**fields), HERMES, {}, (END_OF_TEXT,))
    with pytest.raises(ApiError, match="no end of text"):
        either_grammar(body(), HERMES, {}, ())


def play(tmp_path: Path, scenario: Scenario, script: Script, **model: Any) -> None:
    play_briefly(write_tool_model(tmp_path / "model", **model), scenario, script, max_model_len=1024)


ASKED: Final[dict[str, Any]] = {"messages": HI, "tools": [WEATHER], "response_format": FORMAT, "seed": 5}
SAYS: Final = '{"text": "say <tool_call>{\\"name\\": \\"weather\\", \\"arguments\\": {}}</tool_call> "}'
CALLS: Final = hermes(("weather", '{"city": "Oslo"}'), ("weather", "{}"))


@pytest.mark.covers("A14", "A15")
@pytest.mark.parametrize(
    "said", [SAYS, CALLS, "{", "<tool_c", ""], ids=["answer", "calls", "cut", "cut in a mark", "nothing"]
)
def test_what_it_begins_with_says_which_it_is_whole_and_streamed(tmp_path: Path, said: str) -> None:
    """Within an answer's strings a mark means nothing."""

    async def scenario(router: LiveRouter) -> None:
        whole = flattened((await router.post(CHAT, **ASKED, return_token_ids=True)).json())
        streamed = joined((await router.post(CHAT, **ASKED, return_token_ids=True, stream=True)).text)
        assert streamed == whole
        (choice,) = whole.values()
        if said == CALLS:
            assert [call["function"]["arguments"] for call in choice["calls"]] == ['{"city": "Oslo"}', "{}"]
            assert (choice["content"], choice["reason"]) == ("", "tool_calls")
        else:
            assert (choice["content"], choice["calls"], choice["reason"]) == (said, [], "stop")
        grammar = router.pair.prefill.dispatches[-1].sampling.grammar
        assert grammar.kind == pb.Grammar.STRUCTURAL_TAG and "weather" in grammar.text and [*grammar.end_token_ids]

    play(tmp_path, scenario, replying([*said.encode(), TURN_ID], pb.FINISH_STOP))


@pytest.mark.covers("A14", "A15")
def test_an_answer_that_spells_a_call_in_a_string_calls_nothing(tmp_path: Path) -> None:
    """Mistral's newer calls need no quotes, so that a string of JSON can hold one."""
    said = '{"text": "[TOOL_CALLS]weather{} "}'

    async def scenario(router: LiveRouter) -> None:
        (choice,) = flattened((await router.post(CHAT, **ASKED)).json()).values()
        assert (choice["content"], choice["calls"], choice["reason"]) == (said, [], "stop")
        unbound = {name: value for name, value in ASKED.items() if name != "response_format"}
        (choice,) = flattened((await router.post(CHAT, **unbound)).json()).values()
        assert choice["calls"], "where nothing binds it is one"

    play(tmp_path, scenario, replying([*said.encode(), TURN_ID], pb.FINISH_STOP), template=MISTRAL_TEMPLATE)


@pytest.mark.covers("A15", "A16")
@pytest.mark.parametrize("said", [SAYS, CALLS], ids=["answer", "calls"])
def test_a_choice_that_is_handed_up_goes_on_as_what_it_had_begun(tmp_path: Path, said: str) -> None:
    ids = [*said.encode(), TURN_ID]

    async def scenario(router: LiveRouter) -> None:
        (whole,) = flattened((await router.post(CHAT, **ASKED, return_token_ids=True)).json()).values()
        for cut in (0, 3, 11, 20, len(ids) - 8):
            given = {"generated_token_ids": ids[:cut]} if cut else {}
            (rest,) = flattened((await router.post(CHAT, **ASKED, **given, return_token_ids=True)).json()).values()
            assert whole["content"].endswith(rest["content"])
            assert rest["reason"] == whole["reason"]
            assert {call["id"] for call in rest["calls"]} <= {call["id"] for call in whole["calls"]}

    play(tmp_path, scenario, replying(ids, pb.FINISH_STOP))


@pytest.mark.covers("A14", "A15")
def test_a_mark_that_is_a_special_token_is_named_by_its_id(tmp_path: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        await router.post(CHAT, **ASKED)
        grammar = json.loads(router.pair.prefill.dispatches[-1].sampling.grammar.text)
        assert {"type": "token", "token": 261} in grammar["format"]["elements"][1]["elements"]

    play(tmp_path, scenario, replying([TURN_ID], pb.FINISH_STOP), template=MISTRAL_TEMPLATE)


def test_without_a_format_nothing_binds() -> None:
    class Text:
        stop_token_ids = (END_OF_TEXT,)

        def spelled(self, tokens: Any) -> dict[int, str]:
            return {}

    assert answer_grammar(body(response_format={"type": "text"}), None, None, Text()) is None
