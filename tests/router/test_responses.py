"""/v1/responses over real sockets, the model's words by scripted nodes: shapes, typed events, faults, refusals by name."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any, Final

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from proto import baton_pb2 as pb
from router.entrance import RouterCoreConfig
from tests.router.live_router import MODEL_NAME, LiveRouter
from tests.router.scripted_nodes import Script, ScriptedAttempt, ScriptedNode, replying
from tests.router.test_tool_calls import NUM_CUT, SAID, cut, play, saying, told_of
from tests.router.tiny_model import TURN_ID
from tests.router.tool_model import CALL_NOW, CITY, write_tool_model

PATH: Final = "/v1/responses"
TOOLS: Final[list[Any]] = [
    {"type": "function", "name": "weather", "parameters": CITY, "strict": None},
    {"type": "function", "name": "now", "description": "The time.", "parameters": {}, "strict": False},
]
ASKED: Final[dict[str, Any]] = {"model": MODEL_NAME, "input": "hi", "tools": TOOLS, "extra_body": {"seed": 5}}
VOLATILE: Final = {"id", "created_at"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tool_model(tmp_path_factory.mktemp("model"))


def client_of(router: LiveRouter) -> openai.AsyncOpenAI:
    """As a user makes it."""
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{router.port}/v1", api_key="none", max_retries=0)


def without_ids(value: Any) -> Any:
    """What two runs have in common."""
    if isinstance(value, dict):
        return {name: without_ids(each) for name, each in value.items() if name not in VOLATILE}
    return [without_ids(each) for each in value] if isinstance(value, list) else value


def put_together(events: list[ResponseStreamEvent]) -> Response:
    """The response, from its items' deltas, which must be what its last event says."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    items: dict[int, Any] = {}
    open_index: int | None = None
    for event in events[2:-1]:
        if event.type == "response.output_item.added":
            assert open_index is None and event.output_index == len(items)
            assert event.item.type in ("message", "function_call") and event.item.status == "in_progress"
            open_index, items[event.output_index] = event.output_index, ""
            continue
        assert event.output_index == open_index, event
        match event.type:
            case "response.output_text.delta" | "response.function_call_arguments.delta":
                items[event.output_index] += event.delta
            case "response.output_text.done":
                assert event.text == items[event.output_index]
            case "response.function_call_arguments.done":
                assert event.arguments == items[event.output_index]
            case "response.content_part.added":
                assert event.part.text == ""
            case "response.content_part.done":
                assert event.part.text == items[event.output_index]
            case "response.output_item.done":
                items[event.output_index], open_index = event.item, None
            case _:
                pytest.fail(event.type)
    assert open_index is None
    response: Response = events[-1].response
    assert list(items.values()) == response.output
    assert events[-1].type == f"response.{response.status}"
    return response


@pytest.mark.covers("A07", "A08", "A16")
@pytest.mark.parametrize("said", [SAID, "No, 1 < 2. ", "", f"{CALL_NOW} and {CALL_NOW}", '<tool_call>{"nam": 1}'])
def test_the_client_reads_a_stream_that_says_what_the_whole_answer_says(model: Path, said: str) -> None:
    async def scenario(router: LiveRouter) -> None:
        async with client_of(router) as client:
            whole = await client.responses.create(**ASKED)
            events = [event async for event in await client.responses.create(**ASKED, stream=True)]
            streamed = put_together(events)
            assert without_ids(streamed.model_dump()) == without_ids(whole.model_dump())
            async with client.responses.stream(**ASKED) as stream:
                async for _ in stream:
                    pass
                final = await stream.get_final_response()
            assert final.output_text == whole.output_text
        num_tokens = len(said.encode()) + 1
        assert whole.usage and (whole.usage.output_tokens, whole.status) == (num_tokens, "completed")
        assert whole.usage.total_tokens == whole.usage.input_tokens + num_tokens
        assert (whole.store, whole.previous_response_id, whole.error) == (False, None, None)
        kinds = [item.type for item in whole.output]
        if said == SAID:
            assert (kinds, whole.output_text) == (["message", "function_call", "function_call"], "Well.")
            assert whole.output[1].arguments == '{"city": "Łódź"}'
        elif CALL_NOW in said:
            assert (kinds, whole.output_text) == (["function_call", "message", "function_call"], " and")
        else:
            assert (kinds, whole.output_text) == (["message"], said)

    play(model, scenario, saying(said))


@pytest.mark.covers("A16", "A11")
@pytest.mark.parametrize("stream", [False, True])
def test_half_a_surrogate_pair_of_what_is_only_said_back_is_said_back(model: Path, stream: bool) -> None:
    async def scenario(router: LiveRouter) -> None:
        asked = {"model": MODEL_NAME, "input": "hi", "metadata": {"a": "é\ud800"}, "stream": stream}
        answer = await router.client.post(PATH, content=json.dumps(asked))
        assert answer.status_code == 200
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: ")]
        last = json.loads(lines[-1])["response"] if stream else answer.json()
        assert (last["status"], last["metadata"]) == ("completed", {"a": "é\ud800"})

    play(model, scenario, saying(SAID))


@pytest.mark.covers("A16")
def test_items_go_back_as_they_came_and_instructions_stand_before_them(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        async with client_of(router) as client:
            first = await client.responses.create(**ASKED, instructions="Be brief.")
            assert told_of(router, model).endswith("system: Be brief.user: hiassistant: ")
            call = first.output[1]
            assert call.type == "function_call"
            brought: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
            parts: Any = {
                "role": "user",
                "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
            }
            for items in (first.output, [item.model_dump() for item in first.output]):
                await client.responses.create(model=MODEL_NAME, input=[parts, *items, brought])
                assert told_of(router, model) == (
                    'user: abassistant: Well.<tool_call>{"name": "weather", "arguments": {"city": "Łódź"}}</tool_call>'
                    '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
                    f"tool: rain({call.call_id})assistant: "
                )
            said = await client.responses.create(model=MODEL_NAME, input="hi", temperature=0.5, max_output_tokens=200)
            assert (said.temperature, said.top_p, said.max_output_tokens) == (0.5, 1.0, 200)
            assert router.pair.prefill.dispatches[-1].sampling.temperature == 0.5

    play(model, scenario, saying(SAID))


@pytest.mark.covers("A16")
@pytest.mark.parametrize("stream", [False, True])
def test_what_max_output_tokens_cuts_off_is_incomplete(model: Path, stream: bool) -> None:
    said = SAID[: SAID.index('"city"') + 3].encode()

    async def scenario(router: LiveRouter) -> None:
        async with client_of(router) as client:
            asked = ASKED | {"max_output_tokens": len(said)}
            if stream:
                response = put_together([event async for event in await client.responses.create(**asked, stream=True)])
            else:
                response = await client.responses.create(**asked)
            assert response.incomplete_details and response.incomplete_details.reason == "max_output_tokens"
            message, call = response.output
            assert call.type == "function_call" and call.arguments == '{"ci'
            assert (message.status, call.status) == ("completed", "incomplete")

    play(model, scenario, replying(said))


@pytest.mark.covers("A08", "R05", "R09")
def test_attempts_that_end_anywhere_do_not_show(model: Path, fresh_seed: int) -> None:
    rng = random.Random(fresh_seed)

    async def scenario(router: LiveRouter) -> None:
        async with client_of(router) as client:
            seen: list[Any] = []
            for _ in range(NUM_CUT // 2):
                seen.append(await client.responses.create(**ASKED))
                seen.append(
                    put_together([event async for event in await client.responses.create(**ASKED, stream=True)])
                )
            assert all(without_ids(each.model_dump()) == without_ids(seen[0].model_dump()) for each in seen)
            assert (seen[0].output_text, len(seen[0].output)) == ("Well.", 3)
        assert max(dispatch.attempt for dispatch in router.pair.prefill.dispatches) >= 2

    play(model, scenario, cut([*SAID.encode(), TURN_ID], rng), core_config=RouterCoreConfig(min_refusal_wait_s=0.001))


@pytest.mark.covers("A07", "A16")
def test_usage_tells_what_of_the_prompt_the_first_node_that_computed_it_had_cached(model: Path) -> None:
    async def script(attempt: ScriptedAttempt) -> None:
        def tell(node: ScriptedNode, cached_tokens: int | None) -> None:
            timing = pb.Timing(key=attempt.key, first_step_us=1, cached_tokens=cached_tokens)
            node.send(attempt.prefill.router, pb.NodeMessage(tokens=pb.TokenBatch(timings=[timing])))

        tell(attempt.prefill, 2 if attempt.dispatch.attempt == 0 else 1 << 20)
        attempt.prefill_says(attempt.num_generated, b"a")
        if attempt.dispatch.attempt == 0:
            attempt.prefill_fails(pb.CHECKSUM)
            return
        tell(attempt.decode, None)
        attempt.decode_says(attempt.num_generated, b"ab", pb.FINISH_LENGTH)

    async def scenario(router: LiveRouter) -> None:
        async with client_of(router) as client:
            whole = await client.responses.create(**ASKED)
            streamed = put_together([event async for event in await client.responses.create(**ASKED, stream=True)])
        assert max(dispatch.attempt for dispatch in router.pair.prefill.dispatches) == 1
        for usage in (whole.usage, streamed.usage):
            assert usage and usage.input_tokens_details.cached_tokens == 2 < usage.input_tokens
            assert usage.total_tokens == usage.input_tokens + 3

    play(model, scenario, script, core_config=RouterCoreConfig(min_refusal_wait_s=0.001))


def failing_after(text: bytes) -> Script:
    """Says so much, and then that it cannot go on, whoever tries."""

    async def script(attempt: ScriptedAttempt) -> None:
        if text:
            attempt.prefill_says(0, text[:1])
            attempt.decode_says(0, text)
            attempt.decode_fails(pb.INTERNAL, retryable=False)
        else:
            attempt.prefill_fails(pb.INTERNAL, retryable=False)

    return script


@pytest.mark.covers("A06")
def test_a_failure_is_a_status_before_the_first_event_and_an_event_behind_it(model: Path) -> None:
    async def late(router: LiveRouter) -> None:
        async with client_of(router) as client:
            events = [event async for event in await client.responses.create(**ASKED, stream=True)]
            assert events[-1].type == "response.failed"
            assert events[-1].response.error and "INTERNAL" in events[-1].response.error.message
            assert events[-1].sequence_number == len(events) - 1
            with pytest.raises(openai.InternalServerError):
                await client.responses.create(**ASKED)

    async def at_once(router: LiveRouter) -> None:
        async with client_of(router) as client:
            for stream in (False, True):
                with pytest.raises(openai.InternalServerError):
                    await client.responses.create(**ASKED, stream=stream)

    play(model, late, failing_after(b"So "))
    play(model, at_once, failing_after(b""))


@pytest.mark.covers("A11")
def test_what_is_outside_of_the_subset_is_refused_by_name(model: Path) -> None:
    message = {"type": "message", "role": "user", "content": "hi"}
    deep = json.loads("[" * 900 + "]" * 900)
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not supported"),
        ({"store": True}, "store", "not supported by this version (got true)"),
        ({"background": True}, "background", "not supported"),
        ({"include": ["reasoning.encrypted_content"]}, "include", "not supported"),
        ({"reasoning": {"effort": "low"}}, "reasoning", "not supported"),
        ({"truncation": "auto"}, "truncation", "not supported"),
        ({"messages": [message]}, "messages", "unknown parameter"),
        ({"input": None}, "input", "is required"),
        ({"input": []}, "input", "must not be empty"),
        ({"input": 5}, "input", "must be a text or a list of items, not 5"),
        ({"input": ["hi"]}, "input.0", 'must be an object, not "hi"'),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0.type", '"item_reference"'),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "must not be empty"),
        ({"input": [{"type": "computer_call"}]}, "input.0.type", '"computer_call"'),
        ({"input": [message | {"role": "king"}]}, "input.0.role", "king"),
        ({"input": [message | {"content": 5}]}, "input.0.content", "a text or a list of text parts, not 5"),
        ({"input": [message | {"content": [{"type": "input_image"}]}]}, "input.0.content.0.type", "input_image"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0.call_id", "is required"),
        ({"input": "x" * 2000}, "input", "leave no room"),
        ({"max_output_tokens": 5000}, "max_output_tokens", "5000 is more than"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "x"}}}},
            "text.format.schema.type",
            "x",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "a b"}}}, "text.format.name", "a b"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "xml"),
        # As deep as can be read; the answer repeats it some levels deeper, and broke.
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object", "default": deep}}}},
            "text.format.schema",
            "must be nested at most 128 deep",
        ),
        (
            {"tools": [TOOLS[0] | {"parameters": {"not": {}}}], "tool_choice": "required"},
            "tools.0.parameters",
            '"not" is not supported',
        ),
        ({"text": {"verbosity": "low"}}, "text.verbosity", 'not supported by this version (got "low")'),
        (
            {"input": [message | {"phase": "last"}]},
            "input.0.phase",
            "must be 'commentary' or 'final_answer', not \"last\"",
        ),
        ({"seed": -(2**63) - 1}, "seed", "greater than or equal to -9223372036854775808"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "must be 'function'"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools.1.name", "is the name of another one"),
        ({"tools": [TOOLS[0] | {"name": "a b"}]}, "tools.0.name", "letters, digits"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", 'no tool "x"'),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", '{"type": "function", "name": ...}'),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"metadata": {"a": 1}}, "metadata.a", "must be a text"),
        # Answers repeat it, and a stream waited for a tenth of a second while another's megabytes of it were written.
        ({"metadata": {"a": "x" * 513}}, "metadata.a", "at most 512 characters"),
        ({"metadata": {"a" * 65: "x"}}, "metadata", "a name may have 64 characters, not 65"),
        ({"user": "x" * 513}, "user", "at most 512 characters"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "description": "x" * 65537}}},
            "text.format.description",
            "may have 65536 characters, not 65537",
        ),
        ({"model": "other"}, "model", "serves tiny"),
    ]

    async def scenario(router: LiveRouter) -> None:
        for fields, param, words in cases:
            content = json.dumps({"model": MODEL_NAME, "input": "hi"} | fields)
            answer = await router.client.post(PATH, content=content)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (404 if param == "model" else 400, param), (fields, error)
            assert words in error["message"], error
        assert not router.pair.prefill.dispatches
        nothing = {"store": False, "previous_response_id": None, "truncation": "disabled", "service_tier": "auto"}
        harmless = nothing | {
            "include": [],
            "reasoning": {"effort": None, "summary": None},
            "text": {"format": {"type": "text"}, "verbosity": "medium"},
            "tools": [],
            "prompt_cache_retention": "in_memory",
        }
        repeated = {"metadata": {"a": "b"}, "user": "me", "prompt_cache_key": "mine", "safety_identifier": "me"}
        answer = await router.client.post(PATH, json={"model": MODEL_NAME, "input": "hi"} | harmless | repeated)
        assert answer.status_code == 200 and answer.json() | repeated == answer.json()
        said = [message, {"role": "assistant", "content": "Well.", "phase": "commentary"}, message]
        asked = {"model": MODEL_NAME, "input": said, "reasoning": {"effort": "none"}, "seed": -1}
        again = await router.client.post(PATH, json=asked)
        assert (again.status_code, again.json()["seed"]) == (200, 2**63 - 1), again.text
        assert (await router.client.get(f"{PATH}/{answer.json()['id']}")).status_code == 404

    play(model, scenario)


@pytest.mark.covers("A10")
def test_a_client_that_leaves_ends_its_request(model: Path) -> None:
    async def script(attempt: ScriptedAttempt) -> None:
        attempt.prefill_says(0, b"a")
        attempt.decode_says(0, b"a")

    async def scenario(router: LiveRouter) -> None:
        async with client_of(router) as client:
            stream = await client.responses.create(**ASKED, stream=True)
            async for event in stream:
                if event.type == "response.output_text.delta":
                    break
            await stream.close()
        async with asyncio.timeout(60):
            while not router.pair.decode.cancels:  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.001)

    play(model, scenario, script)
