"""What a model thinks is told apart from what it says: however it is cut, whole and streamed, beside calls, and in responses."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from engine import plan
from engine.byte_tokenizer import END_OF_TEXT, write_tokenizer
from engine.grammars import GrammarError, Grammars
from proto import baton_pb2 as pb
from router.api import ApiSettings
from router.choice_reader import ChoiceReader
from router.events import Grammar
from router.thought_grammar import behind_thought
from router.thought_text import Thinking, ThoughtReader
from tests.router.live_router import MODEL_NAME, LiveRouter
from tests.router.scripted_nodes import Script, replying
from tests.router.test_api import Scenario, events
from tests.router.test_api import play as play_briefly
from tests.router.test_tool_calls import HI, saying, told_of
from tests.router.tiny_model import TURN_ID, write_model_text
from tests.router.tool_model import CALL_NOW, HERMES_TEMPLATE, NOW

CHAT: Final = "/v1/chat/completions"
RESPONSES: Final = "/v1/responses"
_THOUGHT: Final = "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
_BEGUN: Final = "{% if begun %}<think>\n{% elif enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
TEMPLATE: Final = (
    HERMES_TEMPLATE.replace("{{ message.content }}", _THOUGHT + "{{ message.content }}").removesuffix("assistant: ")
    + "{% if add_generation_prompt %}assistant: "
    + _BEGUN
    + "{% endif %}"
)
SAID: Final = "<think>\nSo  she\nasks.\n</think>\n\nWell, <think> no.\n"
BOUND: Final = "So {</think>\n\n{}"
PARTED: Final = ("So  she\nasks.", "Well, <think> no.\n")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_thinking_model(tmp_path_factory.mktemp("model"))


def write_thinking_model(directory: Path, template: str = TEMPLATE) -> Path:
    write_model_text(directory)
    (directory / "chat_template.jinja").write_text(template)
    return directory


def play(model: Path, scenario: Scenario, script: Script | None = None, **settings: Any) -> None:
    play_briefly(model, scenario, script, max_model_len=1024, **settings)


def read(thinking: Thinking, pieces: list[str]) -> tuple[str, str, int | None]:
    reader = ThoughtReader(thinking)
    told = [*(reader.push(piece) for piece in pieces), reader.finish()]
    return "".join(each.thought for each in told), "".join(each.said for each in told), reader.end


words: Final = st.sampled_from(["<think>", "</think>", "<", "think>", "</th", "ink>", "a", " ", "\n", " " * 40, "b c"])


@pytest.mark.covers("A01")
@given(texts=st.lists(words, max_size=12), thinking=st.sampled_from(Thinking), data=st.data())
def test_however_a_text_is_cut_the_same_is_thought_and_said(
    texts: list[str], thinking: Thinking, data: st.DataObject
) -> None:
    text = "".join(texts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    thought, said, end = read(thinking, pieces)
    assert (thought, said, end) == read(thinking, [text]) == read(thinking, [*text])
    opening = text.lstrip()
    is_thought = thinking is Thinking.BEGUN or (opening.startswith("<think>") and len(text) - len(opening) <= 64)
    if not is_thought:
        assert (thought, said, end) == ("", text, None)
        return
    inner, tag, behind = (text if thinking is Thinking.BEGUN else opening.removeprefix("<think>")).partition("</think>")
    assert thought.strip() == inner.strip()
    assert said == (behind.lstrip() if tag else "")
    assert end == (len(text) - len(behind) if tag else None)
    assert not thought[:1].isspace()
    assert len(thought) - len(thought.rstrip()) in (0, *range(65, 1000))


@pytest.mark.covers("A05")
@given(cuts=st.lists(st.integers(0, len(SAID)), max_size=5), before=st.sampled_from([0, 3, 12, len(SAID) - 4]))
def test_a_thoughts_tokens_are_counted_however_they_come(cuts: list[int], before: int) -> None:
    """Of two characters each, behind what somebody else has told."""
    rest = len(SAID) - before
    places = sorted({0, rest, *(min(cut, rest) // 2 * 2 for cut in cuts)})
    reader = ChoiceReader(None, ThoughtReader(Thinking.MAYBE), SAID[:before])
    for begin, end in itertools.pairwise(places):
        reader.push(SAID[before + begin : before + end], range(begin, end, 2))
    left = max(0, SAID.index("</think>") + len("</think>") - before)
    assert reader.num_thought_tokens == -(-left // 2)


@pytest.mark.covers("A05")
def test_a_token_whose_text_is_held_back_counts_by_where_it_begins() -> None:
    """As a stop string's beginning is: `</think>Hello world!` may be one."""
    pieces = [("ab", [0]), ("", [2]), ("", [10]), ("", [15]), ("</think>Hello world", [21]), (" bye", [])]
    for grouped in (pieces, [("".join(text for text, _ in pieces), [at for _, offsets in pieces for at in offsets])]):
        reader = ChoiceReader(None, ThoughtReader(Thinking.BEGUN))
        for text, offsets in grouped:
            reader.push(text, offsets)
        reader.finish()
        assert reader.num_thought_tokens == 2


def message_of(text: str) -> dict[str, Any]:
    """A stream's first choice put together."""
    *chunks, done = events(text)
    assert done == "[DONE]", text
    whole: dict[str, Any] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            delta = part["delta"]
            for name in ("reasoning_content", "content"):
                if delta.get(name):
                    assert name == "content" or not whole.get("content"), "thought before it is said"
                    whole[name] = whole.get(name, "") + delta[name]
            whole["reason"] = part["finish_reason"]
    return whole


@pytest.mark.covers("A01", "A05")
@pytest.mark.parametrize(
    ("said", "kwargs", "thought", "content", "num_thought"),
    [
        (SAID, {}, *PARTED, SAID.index("</think>") + 8),
        (SAID.removeprefix("<think>"), {"begun": True}, *PARTED, SAID.index("</think>") + 1),
        (SAID, {"enable_thinking": False}, None, SAID, 0),
        ("Well.", {}, None, "Well.", 0),
        ("<think>\n\n</think>\n\nWell.", {}, None, "Well.", 17),
        ("<think>So", {}, "So", "", 10),
        ("<thin", {}, None, "<thin", 0),
        ("  ", {}, None, "  ", 0),
        ("So </thi", {"begun": True}, "So </thi", "", 9),
    ],
)
def test_a_thought_is_a_field_of_its_own_whole_and_streamed(
    model: Path, said: str, kwargs: dict[str, Any], thought: str | None, content: str, num_thought: int
) -> None:
    async def scenario(router: LiveRouter) -> None:
        asked: dict[str, Any] = {"messages": HI, "chat_template_kwargs": kwargs}
        whole = (await router.post(CHAT, **asked)).json()
        message = whole["choices"][0]["message"]
        assert (message.get("reasoning_content"), message["content"]) == (thought, content)
        details = whole["usage"].get("completion_tokens_details", {"reasoning_tokens": 0})
        assert details["reasoning_tokens"] == num_thought, (
            "a byte is a token, and the end of the turn one of where it comes"
        )
        for extra in ({}, {"return_token_ids": True}, {"stream_options": {"include_usage": True}}):
            streamed = await router.post(CHAT, **asked, stream=True, **extra)
            told = message_of(streamed.text)
            assert (told.get("reasoning_content"), told.get("content", "")) == (thought, content)
            assert told["reason"] == whole["choices"][0]["finish_reason"]
        usage = events(streamed.text)[-2]["usage"]
        assert usage.get("completion_tokens_details", {"reasoning_tokens": 0})["reasoning_tokens"] == num_thought

    play(model, scenario, saying(said))


@pytest.mark.covers("A01")
def test_where_it_is_not_told_apart_it_is_content_and_a_grammar_begins_behind_a_thought_that_has_begun(
    model: Path, tmp_path: Path
) -> None:
    async def as_it_is(router: LiveRouter) -> None:
        message = (await router.post(CHAT, messages=HI)).json()["choices"][0]["message"]
        assert "reasoning_content" not in message and message["content"] == SAID

    async def bound(router: LiveRouter) -> None:
        reply = await router.post(CHAT, messages=HI, response_format={"type": "json_object"})
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        assert answer["choices"][0]["message"]["content"] == BOUND
        assert router.pair.prefill.dispatches[-1].sampling.grammar.kind == pb.Grammar.JSON_SCHEMA
        completion = (await router.post("/v1/completions", prompt="a", max_tokens=50)).json()
        assert completion["choices"][0]["text"] == BOUND
        begun: dict[str, Any] = {"messages": HI, "chat_template_kwargs": {"begun": True}}
        reply = await router.post(CHAT, **begun, response_format={"type": "json_object"})
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        message = answer["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("So {", "{}")
        assert router.pair.prefill.dispatches[-1].sampling.grammar.kind == pb.Grammar.STRUCTURAL_TAG

    async def spelled(router: LiveRouter) -> None:
        reply = await router.post(CHAT, messages=HI, structured_outputs={"regex": "<think>a"})
        message = reply.json()["choices"][0]["message"]
        assert message["content"] == "<think>a" and "reasoning_content" not in message, "as it was asked for"

    async def always(router: LiveRouter) -> None:
        message = (await router.post(CHAT, messages=HI)).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == PARTED

    play(model, as_it_is, saying(SAID), settings=ApiSettings(MODEL_NAME, 30.0, 1 << 20, reasoning_parser="none"))
    play(model, bound, saying(BOUND))
    play(model, spelled, saying("<think>a"))
    plain = write_thinking_model(tmp_path / "plain", HERMES_TEMPLATE)
    play(plain, as_it_is, saying(SAID))
    play(plain, always, saying(SAID), settings=ApiSettings(MODEL_NAME, 30.0, 1 << 20, reasoning_parser="think"))


@pytest.mark.covers("A01", "A15")
def test_a_call_behind_a_thought_and_a_thought_that_speaks_of_one(model: Path) -> None:
    said = f"<think>I could {CALL_NOW}, and</think>\n{CALL_NOW}"

    async def scenario(router: LiveRouter) -> None:
        answer = (await router.post(CHAT, messages=HI, tools=[NOW])).json()["choices"][0]
        message = answer["message"]
        assert message["reasoning_content"] == f"I could {CALL_NOW}, and"
        assert (message["content"], answer["finish_reason"]) == (None, "tool_calls")
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["now"]
        streamed = message_of((await router.post(CHAT, messages=HI, tools=[NOW], stream=True)).text)
        assert (streamed["reasoning_content"], streamed["reason"]) == (message["reasoning_content"], "tool_calls")
        sent = [*HI, {"role": "assistant", **message}, {"role": "tool", "tool_call_id": "a", "content": "12:00"}]
        await router.post(CHAT, messages=sent, tools=[NOW])
        assert f"<think>{message['reasoning_content']}</think>" in told_of(router, model), "what was thought goes back"

    play(model, scenario, saying(said))


@pytest.mark.covers("A01", "A16")
def test_a_choice_that_is_handed_up_goes_on_thinking(model: Path) -> None:
    ids = [*SAID.encode(), TURN_ID]

    async def scenario(router: LiveRouter) -> None:
        for cut in range(0, len(ids) - 1, 4):
            given = {"generated_token_ids": ids[:cut]} if cut else {}
            answer = (await router.post(CHAT, messages=HI, **given)).json()
            message, usage = answer["choices"][0]["message"], answer["usage"]
            assert PARTED[0].endswith(message.get("reasoning_content", "")) and PARTED[1].endswith(message["content"])
            is_thinking = cut < SAID.index("\n</think>")
            assert bool(message.get("reasoning_content")) == is_thinking
            left = max(0, SAID.index("</think>") + 8 - cut)
            assert usage.get("completion_tokens_details", {"reasoning_tokens": 0})["reasoning_tokens"] == left

    play(model, scenario, replying(ids, pb.FINISH_STOP))


@pytest.mark.covers("A01")
def test_a_message_that_is_to_go_on_says_whether_it_thinks(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        for begun, thought in (("<think>So", "and</think>"), ("<think>So</think>", None), ("So", None)):
            messages = [*HI, {"role": "assistant", "content": begun}]
            answer = await router.post(CHAT, messages=messages, continue_final_message=True)
            assert answer.status_code == 200, answer.text
            message = answer.json()["choices"][0]["message"]
            parted = ("and", "Well.") if thought else (None, "and</think>Well.")
            assert (message.get("reasoning_content"), message["content"]) == parted

    play(model, scenario, saying("and</think>Well."))


@pytest.mark.covers("A01")
def test_tags_that_are_special_tokens_are_seen(tmp_path: Path) -> None:
    model = write_thinking_model(tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(tag, special=True) for tag in ("<think>", "</think>")])
    opens, closes = (tokenizer.token_to_id(tag) or 0 for tag in ("<think>", "</think>"))
    tokenizer.save(str(model / "tokenizer.json"))

    async def scenario(router: LiveRouter) -> None:
        message = (await router.post(CHAT, messages=HI)).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("So", "Well.")
        begun = await router.post(CHAT, messages=HI, chat_template_kwargs={"begun": True})
        assert begun.json()["choices"][0]["message"]["reasoning_content"] == "<think>So", "the prompt's tag is one, too"

    play(model, scenario, replying([opens, *b"So", closes, *b"Well.", TURN_ID], pb.FINISH_STOP))


@pytest.mark.covers("A16")
def test_a_response_has_an_item_for_the_thought_that_goes_back(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        async with openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{router.port}/v1", api_key="none", max_retries=0
        ) as client:
            whole = await client.responses.create(model=MODEL_NAME, input="hi")
            thought, message = whole.output
            assert thought.type == "reasoning" and thought.content and message.type == "message"
            assert (thought.content[0].text, whole.output_text) == PARTED
            assert whole.usage and whole.usage.output_tokens_details.reasoning_tokens == SAID.index("</think>") + 8
            deltas: dict[str, str] = {}
            async with client.responses.stream(model=MODEL_NAME, input="hi") as stream:
                async for event in stream:
                    if event.type in ("response.reasoning_text.delta", "response.output_text.delta"):
                        deltas[event.type] = deltas.get(event.type, "") + event.delta
                final = await stream.get_final_response()
            assert tuple(deltas.values()) == PARTED
            assert [item.type for item in final.output] == ["reasoning", "message"]
            sent: list[Any] = [{"role": "user", "content": "hi"}, *(item.model_dump() for item in whole.output)]
            sent.insert(1, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "First."}]})
            await client.responses.create(model=MODEL_NAME, input=[*sent, {"role": "user", "content": "and?"}])
            assert f"<think>First.\n\n{PARTED[0]}</think>{PARTED[1]}" in told_of(router, model)

    play(model, scenario, saying(SAID))


@pytest.mark.covers("A16")
def test_a_thought_that_is_cut_off_is_all_that_a_response_has(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        response = (await router.post(RESPONSES, input="hi", max_output_tokens=9)).json()
        (thought,) = response["output"]
        assert (thought["type"], thought["content"][0]["text"], thought["status"]) == ("reasoning", "So", "incomplete")
        assert response["status"] == "incomplete"

    play(model, scenario, replying([*b"<think>So"], pb.FINISH_LENGTH))


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    directory = tmp_path_factory.mktemp("bytes")
    write_tokenizer(300, 256, directory)
    return Grammars(directory, 300)


@pytest.mark.covers("A14")
@pytest.mark.parametrize("special", [{}, {256: "</think>"}], ids=["text", "special"])
@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (Grammar("json_schema", '{"type": "object"}'), '{"a": [1]}', "no"),
        (Grammar("json_schema", '{"type": "array"}', is_compact=True), '["a",{"b": 1}]', '["a",  1]'),
        (Grammar("regex", "[ab]{2}"), "ab", "abc"),
        (Grammar("regex", "\\t+x"), "\t\tx", "\tx "),
        (Grammar("ebnf", 'root ::= "yes" | "no"'), "no", "nay"),
        (
            Grammar("structural_tag", '{"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}'),
            "x",
            "y",
        ),
    ],
    ids=["json", "compact", "regex", "tab", "ebnf", "tag"],
)
def test_behind_any_thought_the_answer_is_bound_as_it_would_be_without(
    grammars: Grammars, grammar: Grammar, good: str, bad: str, special: dict[int, str]
) -> None:
    made = behind_thought(replace(grammar, end_token_ids=(END_OF_TEXT,)), special)
    bound = plan.Grammar(made.kind, made.text, made.is_compact, made.end_token_ids)
    grammars.check(bound)

    def can_be_said(text: str) -> bool:
        constraint = grammars.constraint(bound)
        thought, tag, answer = text.partition("</think>")
        for token_id in [*thought.encode(), *([256] if special and tag else tag.encode()), *answer.encode()]:
            allowed = constraint.allowed()
            if allowed is None or not allowed[token_id]:
                return False
            constraint.add(token_id)
        allowed = constraint.allowed()
        return allowed is None or bool(allowed[END_OF_TEXT])

    for thought in ("", "\n", "So, {} <think> </thin \u0142"):
        for blanks in ("", "\n\n"):
            assert can_be_said(f"{thought}</think>{blanks}{good}")
            assert not can_be_said(f"{thought}</think>{blanks}{bad}")
    assert not can_be_said(good) and not can_be_said("So")
    constraint = grammars.constraint(bound)
    for token_id in [*b"hm", *([256] if special else b"</think>")]:
        allowed = constraint.allowed()
        assert allowed is not None and allowed[token_id] and not allowed[[258, 259]].any(), (
            "special tokens are no thought"
        )
        constraint.add(token_id)
    allowed = constraint.allowed()
    assert allowed is not None and not allowed[ord("S")] and not allowed[256], "the thought is over"


@pytest.mark.covers("A14")
def test_what_would_take_too_long_to_be_followed_is_refused_behind_a_thought_too(grammars: Grammars) -> None:
    slow = Grammar("regex", "([a-z]{1,99}){1,99}")
    made = behind_thought(replace(slow, end_token_ids=(END_OF_TEXT,)), {})
    for kind, text in ((slow.kind, slow.text), (made.kind, made.text)):
        with pytest.raises(GrammarError, match="too many ways"):
            grammars.check(plan.Grammar(kind, text, False, (END_OF_TEXT,)))
