"""Tool calls on /v1/chat/completions over real sockets, the models' words by scripted nodes: shapes, streams, faults, refusals."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Final

import openai
import pydantic
import pytest

from proto import baton_pb2 as pb
from router.api import ApiSettings
from router.entrance import RouterCoreConfig
from router.text import ModelText
from tests.router.live_router import MODEL_NAME, LiveRouter
from tests.router.scripted_nodes import Script, ScriptedAttempt, replying
from tests.router.test_api import Scenario, events
from tests.router.test_api import play as play_briefly
from tests.router.tiny_model import TURN_ID, write_model_text
from tests.router.tool_model import CALL, CALL_NOW, MARK_ID, MISTRAL_TEMPLATE, NOW, WEATHER, write_tool_model

PATH: Final = "/v1/chat/completions"
HI: Final[list[Any]] = [{"role": "user", "content": "hi"}]
ASKED: Final[dict[str, Any]] = {"messages": HI, "tools": [WEATHER], "seed": 5}
SAID: Final = f"Well.\n{CALL}\n{CALL_NOW}"
USAGE: Final[dict[str, Any]] = {"stream": True, "stream_options": {"include_usage": True}}
NUM_CUT: Final = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tool_model(tmp_path_factory.mktemp("model"))


def play(model: Path, scenario: Scenario, script: Script | None = None, **settings: Any) -> None:
    """With room for tools."""
    play_briefly(model, scenario, script, max_model_len=1024, **settings)


def saying(text: str) -> Script:
    """The model's words, and that its turn ends."""
    return replying([*text.encode(), TURN_ID], pb.FINISH_STOP)


def told_of(router: LiveRouter, model: Path) -> str:
    """The newest prompt."""
    return ModelText(model).decode(router.pair.prefill.dispatches[-1].prompt_token_ids)


def joined(text: str) -> dict[int, dict[str, Any]]:
    """A stream's choices put together, as clients do it; by index."""
    *chunks, done = events(text)
    assert done == "[DONE]", text
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            whole = choices.setdefault(part["index"], {"content": "", "calls": [], "ids": []})
            whole["content"] += part["delta"].get("content") or ""
            for each in part["delta"].get("tool_calls", []):
                if each["index"] == len(whole["calls"]):
                    function = {"name": each["function"]["name"], "arguments": ""}
                    whole["calls"].append({"id": each["id"], "type": each["type"], "function": function})
                else:
                    assert not {"id", "type"} & set(each) and set(each["function"]) == {"arguments"}, "once"
                whole["calls"][each["index"]]["function"]["arguments"] += each["function"]["arguments"]
            whole["ids"] += part.get("completion_token_ids", [])
            whole["reason"] = part["finish_reason"]
    return choices


def flattened(answer: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The same of a whole answer."""
    return {
        choice["index"]: {
            "content": choice["message"]["content"] or "",
            "calls": choice["message"].get("tool_calls", []),
            "ids": choice.get("completion_token_ids", []),
            "reason": choice["finish_reason"],
        }
        for choice in answer["choices"]
    }


@pytest.mark.covers("A15")
def test_calls_are_in_the_message_with_ids_and_the_template_is_told_of_the_tools(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        answer = (await router.post(PATH, **ASKED, return_token_ids=True)).json()
        (choice,) = answer["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("Well.", "tool_calls")
        first, second = choice["message"]["tool_calls"]
        assert first["function"] == {"name": "weather", "arguments": '{"city": "Łódź"}'}
        assert second["function"] == {"name": "now", "arguments": "{}"}
        assert first["type"] == "function" and first["id"].startswith("call_") and first["id"] != second["id"]
        assert choice["completion_token_ids"] == [*SAID.encode(), TURN_ID]
        assert answer["usage"]["completion_tokens"] == len(SAID.encode()) + 1
        prompt = told_of(router, model)
        assert prompt.startswith(f"In <tool_call>: {json.dumps(WEATHER)}user: hi")
        tokens = await router.post("/tokenize", messages=HI, tools=[WEATHER])
        assert tokens.json()["tokens"] == list(router.pair.prefill.dispatches[0].prompt_token_ids)
        refused = await router.post("/tokenize", prompt="hi", tools=[WEATHER])
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
        again = (await router.post(PATH, **ASKED)).json()["choices"][0]["message"]["tool_calls"]
        assert again == choice["message"]["tool_calls"], "ids too"
        other = (await router.post(PATH, **ASKED | {"seed": 6})).json()["choices"][0]["message"]["tool_calls"]
        assert other[0]["id"] != first["id"]

    play(model, scenario, saying(SAID))


@pytest.mark.covers("A08", "A15")
@pytest.mark.parametrize(
    "said", [SAID, "No, 1 < 2. ", CALL[:-20], '<tool_call>{"nam": 1}</tool_call> x', f" {CALL} and "]
)
def test_a_stream_says_what_the_whole_answer_says_and_no_tag(model: Path, said: str) -> None:
    async def scenario(router: LiveRouter) -> None:
        asked = ASKED | {"n": 2, "return_token_ids": True, "logprobs": True}
        whole = await router.post(PATH, **asked)
        stream = await router.post(PATH, **asked, **USAGE)
        assert whole.status_code == stream.status_code == 200, whole.text
        told = joined(stream.text)
        assert told == flattened(whole.json())
        assert told[0]["content"] == told[1]["content"]
        ids = [call["id"] for choice in told.values() for call in choice["calls"]]
        assert len(set(ids)) == len(ids), "of each choice its own"
        if told[0]["calls"]:
            assert told[0]["reason"] == "tool_calls" and "tool_call>" not in told[0]["content"]
        else:
            assert told[0]["reason"] == "stop" and told[0]["content"] == said
        parts = [part for chunk in events(stream.text)[:-1] for part in chunk["choices"] if part["index"] == 0]
        scored = [each["token"] for part in parts for each in part["logprobs"]["content"]]
        assert len(scored) == len(said.encode()) + 1

    play(model, scenario, saying(said))


def cut(said: list[int], rng: random.Random) -> Script:
    """The first attempts of a choice are preempted, each somewhere."""

    async def script(attempt: ScriptedAttempt) -> None:
        first = attempt.num_generated
        end = min(first + rng.randint(1, 12 + len(said) // 3), len(said))
        attempt.prefill_says(
            first, said[first : first + 1], pb.FINISH_STOP if first + 1 == len(said) else pb.FINISH_UNSPECIFIED
        )
        if first + 1 == len(said):
            return
        attempt.decode_says(first, said[first:end], pb.FINISH_STOP if end == len(said) else pb.FINISH_UNSPECIFIED)
        if end < len(said):
            attempt.decode_fails(pb.PREEMPTED, token_ids=said[:end])

    return script


@pytest.mark.covers("A15", "R05", "R09")
def test_attempts_that_end_anywhere_in_a_call_do_not_show(model: Path, fresh_seed: int) -> None:
    rng = random.Random(fresh_seed)

    async def scenario(router: LiveRouter) -> None:
        for number in range(NUM_CUT):
            answer = await router.post(PATH, **ASKED, **(USAGE if number % 2 else {}))
            choices = joined(answer.text) if number % 2 else flattened(answer.json())
            assert (choices[0]["content"], choices[0]["reason"]) == ("Well.", "tool_calls")
            assert [call["function"]["arguments"] for call in choices[0]["calls"]] == ['{"city": "Łódź"}', "{}"]
        assert max(dispatch.attempt for dispatch in router.pair.prefill.dispatches) >= 2

    play(model, scenario, cut([*SAID.encode(), TURN_ID], rng), core_config=RouterCoreConfig(min_refusal_wait_s=0.001))


@pytest.mark.covers("A05", "A08", "R08")
@pytest.mark.parametrize("stream", [False, True])
def test_a_choice_that_is_handed_up_and_what_goes_on_with_it_are_one_call_under_one_id(
    model: Path, fresh_seed: int, stream: bool
) -> None:
    rng = random.Random(fresh_seed)

    async def scenario(router: LiveRouter) -> None:
        for _ in range(NUM_CUT):
            given: list[int] = []
            content, reason = "", "pd_reschedule"
            calls: dict[Any, dict[str, str]] = {}
            while reason == "pd_reschedule":
                body = ASKED | {"generated_token_ids": given, "stream": stream}
                answer = await router.post(PATH, **body)
                parts = events(answer.text)[:-1] if stream else [answer.json()]
                for choice in [choice for part in parts for choice in part["choices"]]:
                    message = choice.get("delta") or choice.get("message") or {}
                    content += message.get("content") or ""
                    for each in message.get("tool_calls", []):
                        key = each["index"] if stream else each["id"]
                        known = calls.setdefault(key, {"name": "", "arguments": ""})
                        known["name"] = each["function"].get("name", known["name"])
                        known["arguments"] += each["function"]["arguments"]
                    reason, given = choice["finish_reason"], choice.get("completion_token_ids", given)
            assert (content, reason) == ("Well.", "tool_calls")
            assert list(calls.values()) == [
                {"name": "weather", "arguments": '{"city": "Łódź"}'},
                {"name": "now", "arguments": "{}"},
            ]

    play(model, scenario, cut([*SAID.encode(), TURN_ID], rng), core_config=RouterCoreConfig(preempt_retry_count=0))


@pytest.mark.covers("A15")
def test_the_openai_client_calls_and_answers_and_its_messages_go_back(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{router.port}/v1", api_key="none") as client:
            asked: dict[str, Any] = ASKED | {"model": MODEL_NAME}
            message = (await client.chat.completions.create(**asked)).choices[0].message
            assert message.tool_calls
            async with client.chat.completions.stream(**asked) as stream:
                async for _ in stream:
                    pass
                streamed = (await stream.get_final_completion()).choices[0].message
            assert streamed.tool_calls and streamed.content == message.content
            told = [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls]
            assert told == [(call.id, call.function.name, call.function.arguments) for call in streamed.tool_calls]
            for said in (message, message.model_dump(), message.model_dump(exclude_none=True) | {"content": None}):
                turns = [said, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}]
                await client.chat.completions.create(model=MODEL_NAME, messages=turns)
                sent = told_of(router, model)
                assert '<tool_call>{"name": "weather", "arguments": {"city": "Łódź"}}</tool_call>' in sent
                assert sent.endswith(f"tool: rain({message.tool_calls[0].id})assistant: ")

    play(model, scenario, saying(SAID))


class Weather(pydantic.BaseModel):
    """What `weather` is called with."""

    city: str


@pytest.mark.covers("A15")
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the client's own, of what it has parsed
def test_what_openais_client_has_parsed_goes_back(model: Path) -> None:
    async def calls(router: LiveRouter) -> None:
        asked: dict[str, Any] = {"model": MODEL_NAME, "tools": [openai.pydantic_function_tool(Weather, name="weather")]}
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{router.port}/v1", api_key="none") as client:
            message = (await client.chat.completions.parse(messages=HI, **asked)).choices[0].message
            assert message.tool_calls and message.tool_calls[0].function.parsed_arguments == Weather(city="Łódź")
            result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
            await client.chat.completions.create(messages=[*HI, message, result], **asked)
            again = '<tool_call>{"name": "weather", "arguments": {"city": "Łódź"}}</tool_call>tool: rain'
            assert again in told_of(router, model)

    async def words(router: LiveRouter) -> None:
        asked: dict[str, Any] = {"model": MODEL_NAME, "messages": HI, "response_format": Weather}
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{router.port}/v1", api_key="none") as client:
            async with client.chat.completions.stream(**asked) as stream:
                await stream.until_done()
                streamed = (await stream.get_final_completion()).choices[0].message
            for message in ((await client.chat.completions.parse(**asked)).choices[0].message, streamed):
                assert message.parsed == Weather(city="Rome")
                await client.chat.completions.create(model=MODEL_NAME, messages=[*HI, message, *HI])
                assert 'assistant: {"city":"Rome"}user: hi' in told_of(router, model)

    play(model, calls, saying(CALL))
    play(model, words, saying('{"city":"Rome"}'))


@pytest.mark.covers("A15")
@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_calls_the_first_counts_and_with_none_nobody_is_told_of_tools(
    model: Path, stream: bool
) -> None:
    async def scenario(router: LiveRouter) -> None:
        async def choice(**fields: Any) -> dict[str, Any]:
            answer = await router.post(PATH, **ASKED, **fields, stream=stream)
            return (joined(answer.text) if stream else flattened(answer.json()))[0]

        (call,) = (await choice(parallel_tool_calls=False))["calls"]
        assert call["function"]["name"] == "weather"
        told = await choice(tool_choice="none")
        assert (told["content"], told["calls"], told["reason"]) == (SAID, [], "stop")
        assert told_of(router, model) == "user: hiassistant: "

    play(model, scenario, saying(SAID))


@pytest.mark.covers("A15")
def test_a_mark_that_is_a_special_token_is_seen_where_there_are_tools(tmp_path: Path) -> None:
    said = [*b"So ", MARK_ID, *b'[{"name": "now", "arguments": {}}]', TURN_ID]

    async def scenario(router: LiveRouter) -> None:
        answer = (await router.post(PATH, messages=HI, tools=[NOW])).json()["choices"][0]
        (call,) = answer["message"]["tool_calls"]
        assert (answer["message"]["content"], call["function"]) == ("So", {"name": "now", "arguments": "{}"})
        assert len(call["id"]) == 9
        plain = (await router.post(PATH, messages=HI)).json()["choices"][0]["message"]["content"]
        assert plain == 'So [{"name": "now", "arguments": {}}]'

    play(write_tool_model(tmp_path / "model", MISTRAL_TEMPLATE), scenario, replying(said, pb.FINISH_STOP))


@pytest.mark.covers("A11")
def test_what_cannot_be_called_is_refused_in_one_sentence(model: Path, tmp_path: Path) -> None:
    deep: dict[str, Any] = {}
    for _ in range(65):
        deep = {"a": deep}

    def tool(**fields: Any) -> dict[str, Any]:
        return {"tools": [NOW | {"function": {"name": "now"} | fields}]}

    def calling(**fields: Any) -> dict[str, Any]:
        call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}
        return {"messages": [{"role": "assistant", "tool_calls": [call]} | fields]}

    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"tools": NOW}, "tools", "must be a list"),
        ({"tools": [NOW] * 129}, "tools", "at most 128"),
        ({"tools": [NOW, NOW]}, "tools.1.function.name", '"now" is the name of another one, too'),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "must be 'function', not \"web_search\""),
        ({"tools": [{"type": "function"}]}, "tools.0.function", "is required"),
        (tool(name="a b"), "tools.0.function.name", 'letters, digits, _, - or ., not "a b"'),
        (tool(parameters=[]), "tools.0.function.parameters", "must be an object"),
        (tool(parameters=deep), "tools.0.function.parameters", "nested at most 64 deep"),
        (tool(description="x" * (256 << 10)), "tools", "at most 262144 bytes together"),
        (tool(description="\ud800"), "tools", "half a surrogate pair"),
        (tool(colour=1), "tools.0.function.colour", "unknown parameter"),
        ({"tool_choice": "any"}, "tool_choice", 'must be one of none, auto, required, or {"type": "function"'),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", 'no tool "x"'),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "not an object"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "must be true or false"),
        (calling(role="user", content="x"), "messages.0.tool_calls", "only an assistant has them, not a user"),
        (calling(role="user", content="x", tool_calls=[], tool_call_id="a"), "messages.0.tool_call_id", "only a tool"),
        (calling(tool_calls=[{"id": "a"}]), "messages.0.tool_calls.0.function", "is required"),
    ]

    async def refused(router: LiveRouter, fields: dict[str, Any], param: str, words: str) -> None:
        content = json.dumps({"model": MODEL_NAME, "messages": HI, "tools": [NOW]} | fields)
        answer = await router.client.post(PATH, content=content)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), (fields, error)
        assert words in error["message"], error

    async def scenario(router: LiveRouter) -> None:
        for fields, param, words in cases:
            await refused(router, fields, param, words)
        assert not router.pair.prefill.dispatches
        broken = calling(tool_calls=[{"id": "a", "function": {"name": "now", "arguments": '{"a'}}])
        assert (await router.post(PATH, **broken, max_tokens=5)).status_code == 200, "the model sees what it wrote"

    async def without_tools(router: LiveRouter) -> None:
        await refused(router, {}, "tools", "this model's chat template has no tools")
        assert (await router.post(PATH, messages=HI, tools=[NOW], tool_choice="none", max_tokens=5)).status_code == 200

    async def unknown(router: LiveRouter) -> None:
        await refused(router, {}, "tools", "--tool-parser")

    async def forced(router: LiveRouter) -> None:
        answer = (await router.post(PATH, messages=HI, tools=[NOW])).json()
        assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "now"

    play(model, scenario)
    play(write_model_text(tmp_path / "plain"), without_tools)
    strange = write_tool_model(tmp_path / "strange", "{{ tools }}{{ messages[0].content }}")
    play(strange, unknown)
    settings = ApiSettings(MODEL_NAME, 30.0, 1 << 20, tool_parser="hermes")
    play(strange, forced, saying(CALL_NOW), settings=settings)


@pytest.mark.covers("A11")
def test_a_call_with_half_a_surrogate_pair_goes_back_as_it_was_said(model: Path) -> None:
    """As text it is JSON, which clients send on; as an object a template could not write it."""
    call = r'<tool_call>{"name": "weather", "arguments": {"city": "\ud83d"}}</tool_call>'

    async def scenario(router: LiveRouter) -> None:
        message = (await router.post(PATH, **ASKED)).json()["choices"][0]["message"]
        assert message["tool_calls"][0]["function"]["arguments"] == r'{"city": "\ud83d"}'
        answered = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"}
        again = await router.post(PATH, **ASKED | {"messages": [*HI, message, answered]})
        assert again.status_code == 200, again.text
        assert r"\ud83d" in told_of(router, model)

    play(model, scenario, saying(call))
