"""The HTTP endpoints over real sockets: shapes, streams, errors, and clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from proto import baton_pb2 as pb
from router.entrance import RouterCoreConfig
from runtime.session import SessionTiming
from tests.router.live_router import MAX_MODEL_LEN, MODEL_NAME, LiveRouter, live_router, until
from tests.router.scripted_nodes import Script, ScriptedAttempt, replying
from tests.router.tiny_model import BOS_ID, EOS_ID, TURN_ID, write_model_text

Scenario = Callable[[LiveRouter], Awaitable[None]]
HI: Any = [{"role": "user", "content": "hi"}]
EURO = list("€5".encode())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_text(tmp_path_factory.mktemp("model"))


def play(model: Path, scenario: Scenario, script: Script | None = None, **settings: Any) -> None:
    """Run a scenario against a live router."""

    async def run() -> None:
        async with live_router(model, script, **settings) as router:
            await scenario(router)
            await until(lambda: is_idle(router))  # an answer's end is told before its request's

    def is_idle(router: LiveRouter) -> bool:
        held = (router.node("prefill")["prefilling"], router.node("decode")["branches"])
        return not router.shell.snapshot()["requests"] and held == (0, 0)

    asyncio.run(run())


def events(text: str) -> list[Any]:
    """The data of a stream's events; `[DONE]` as it is."""
    parts = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    return [part if part == "[DONE]" else json.loads(part) for part in parts]


@pytest.mark.covers("A01")
def test_a_completion_has_text_usage_and_the_seed_it_was_drawn_with(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        answer = (await router.post(max_tokens=5)).json()
        choice = answer["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("hello", "length")
        assert answer["usage"].pop("prompt_tokens_details") == {"cached_tokens": 0}, "no node has told of any"
        assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
        assert choice["seed"] == router.pair.prefill.dispatches[0].branches[0].seed
        for seed, named in ((41, 41), (-1, 2**63 - 1), (-(2**63), 0)):  # OpenAI's may be negative
            assert (await router.post(max_tokens=5, seed=seed)).json()["choices"][0]["seed"] == named
            assert router.pair.prefill.dispatches[-1].branches[0].seed == named

    play(model, scenario)


@pytest.mark.covers("A01")
def test_what_the_client_asks_reaches_the_prefill_node(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        await router.post(prompt=[1, 2, 300], max_tokens=5, seed=7, temperature=0.5)
        await router.post(ignore_eos=True, max_tokens=5)
        first, second = router.pair.prefill.dispatches
        assert list(first.prompt_token_ids) == [1, 2, 300]
        assert (first.branches[0].seed, first.attempt, first.target.node.name) == (7, 0, "decode")
        assert (first.sampling.temperature, first.sampling.max_tokens) == (0.5, 5)
        assert list(first.sampling.stop_token_ids) == [EOS_ID, TURN_ID]
        assert not second.sampling.stop_token_ids
        assert 0 < first.ms_left <= 600_000

    play(model, scenario)


@pytest.mark.covers("A01", "S05")
def test_max_tokens_is_16_for_completions_and_what_remains_for_chat(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        await router.post()
        await router.post("/v1/chat/completions", messages=HI)
        completion, chat = router.pair.prefill.dispatches
        assert completion.sampling.max_tokens == 16
        assert chat.sampling.max_tokens == MAX_MODEL_LEN - len(chat.prompt_token_ids)

    play(model, scenario)


@pytest.mark.covers("A01", "A08")
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_reads_like_the_whole_answer_and_never_splits_a_character(model: Path, path: str) -> None:
    async def scenario(router: LiveRouter) -> None:
        asked: dict[str, Any] = {"max_tokens": 9} | ({"messages": HI} if "chat" in path else {})
        whole = (await router.post(path, **asked)).json()["choices"][0]
        stream = await router.post(path, stream=True, stream_options={"include_usage": True}, **asked)
        assert stream.headers["content-type"].startswith("text/event-stream")
        *chunks, usage, done = events(stream.text)
        parts = [chunk["choices"][0] for chunk in chunks]
        texts = [part["delta"]["content"] if "chat" in path else part["text"] for part in parts]
        assert "".join(texts) == (whole["message"]["content"] if "chat" in path else whole["text"]) == "€5€5!"
        assert not any("\ufffd" in text for text in texts)
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
        assert (usage["choices"], usage["usage"]["completion_tokens"], done) == ([], 9, "[DONE]")
        assert all(chunk["usage"] is None for chunk in chunks)
        if "chat" in path:
            assert [part["delta"].get("role") for part in parts] == ["assistant"] + [None] * (len(parts) - 1)

    play(model, scenario, replying([*EURO, *EURO, ord("!")]))


@pytest.mark.covers("A01")
def test_the_openai_client_works_unchanged(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{router.port}/v1", api_key="none") as client:
            completion = await client.completions.create(model=MODEL_NAME, prompt="hi", max_tokens=5)
            assert completion.choices[0].text == "hello"
            chat = await client.chat.completions.create(model=MODEL_NAME, messages=HI)
            assert chat.choices[0].message.content == "hello"
            stream = await client.chat.completions.create(
                model=MODEL_NAME,
                messages=HI,
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hello"
            assert chunks[-1].usage is not None
            assert chunks[-1].usage.completion_tokens == 5
            assert [each.id async for each in await client.models.list()] == [MODEL_NAME]
            with pytest.raises(openai.NotFoundError, match="other"):
                await client.completions.create(model="other", prompt="hi")

    play(model, scenario)


@pytest.mark.covers("A01", "A05")
def test_a_stop_token_ends_the_text_and_is_counted(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        answer = (await router.post(max_tokens=9, return_token_ids=True)).json()
        choice = answer["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("ok", "stop")
        assert choice["prompt_token_ids"] == [BOS_ID, *b"hi"]
        assert choice["completion_token_ids"] == [*b"ok", TURN_ID]
        assert answer["usage"]["completion_tokens"] == 3

    play(model, scenario, replying([*b"ok", TURN_ID], pb.FINISH_STOP))


@pytest.mark.covers("A01", "A05")
def test_a_stream_with_token_ids_gives_every_id_once_also_before_its_text_is_complete(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        stream = await router.post(max_tokens=4, stream=True, return_token_ids=True)
        choices = [event["choices"][0] for event in events(stream.text)[:-1]]
        assert choices[0]["prompt_token_ids"] == [BOS_ID, *b"hi"]
        assert [token for choice in choices for token in choice["completion_token_ids"]] == EURO
        assert "".join(choice["text"] for choice in choices) == "€5"

    play(model, scenario, replying(EURO))


@pytest.mark.covers("A06")
def test_the_status_waits_for_the_first_token_or_the_error(model: Path) -> None:
    async def script(attempt: ScriptedAttempt) -> None:
        attempt.prefill_fails(pb.INCOMPATIBLE, retryable=False)

    async def scenario(router: LiveRouter) -> None:
        for stream in (False, True):
            answer = await router.post(stream=stream)
            assert answer.status_code == 502
            assert answer.json()["error"]["code"] == "INCOMPATIBLE"
            assert answer.json()["error"]["message"].startswith("PD Error")

    play(model, scenario, script)


@pytest.mark.covers("A06")
def test_a_failure_after_the_first_token_is_an_event_and_no_done(model: Path) -> None:
    async def script(attempt: ScriptedAttempt) -> None:
        attempt.prefill_says(0, b"a")
        attempt.decode_says(0, b"ab")
        await until(lambda: router_saw["text"] != "")
        attempt.decode_fails(pb.INTERNAL, retryable=False)

    router_saw = {"text": ""}

    async def scenario(router: LiveRouter) -> None:
        body = {"model": MODEL_NAME, "prompt": "hi", "stream": True}
        async with router.client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            async for text in answer.aiter_text():
                router_saw["text"] += text
        *chunks, error = events(router_saw["text"])
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ab"
        assert error["error"]["code"] == "INTERNAL"
        assert "[DONE]" not in router_saw["text"]
        whole = await router.post()
        assert (whole.status_code, whole.json()["error"]["code"]) == (500, "INTERNAL")

    play(model, scenario, script)


@pytest.mark.covers("A10")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 2])
def test_a_client_that_leaves_has_its_attempt_cancelled_at_both_nodes(
    model: Path, stream: bool, num_tokens: int
) -> None:
    async def script(attempt: ScriptedAttempt) -> None:
        if num_tokens:
            attempt.prefill_says(0, b"a")
            attempt.decode_says(0, b"ab")

    async def scenario(router: LiveRouter) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        body = json.dumps({"model": MODEL_NAME, "prompt": "hi", "stream": stream}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await until(lambda: len(router.pair.prefill.dispatches) == 1)
        if stream and num_tokens:
            assert b"200 OK" in await reader.readline()
        writer.close()
        nodes = (router.pair.prefill, router.pair.decode)
        await until(lambda: all(node.cancels for node in nodes))
        assert {node.cancels[0].key.request_id for node in nodes} == {router.pair.prefill.dispatches[0].request_id}
        assert all(node.cancels[0].ms_left > 0 for node in nodes)
        await until(lambda: "aborted" in router.shell.metrics.render().decode())

    play(model, scenario, script)


@pytest.mark.covers("R17")
def test_at_its_deadline_a_request_ends_everywhere_with_no_traffic(model: Path) -> None:
    async def script(attempt: ScriptedAttempt) -> None:
        attempt.prefill_says(0, b"a")

    async def scenario(router: LiveRouter) -> None:
        while (
            not router.pair.prefill.dispatches
        ):  # held up, this process may be past it before a node hears of the request
            answer = await router.post()
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "DEADLINE")
        await until(lambda: bool(router.pair.prefill.cancels and router.pair.decode.cancels))

    silent = SessionTiming(keepalive_s=60, silence_s=120, grace_s=120)
    play(model, scenario, script, timeout_s=0.3, timing=silent)


@pytest.mark.covers("R17")
def test_a_client_can_have_less_time_than_the_router_gives_and_never_more(model: Path) -> None:
    async def script(attempt: ScriptedAttempt) -> None:
        if attempt.dispatch.ms_left > 1000:
            await replying(b"x")(attempt)

    async def scenario(router: LiveRouter) -> None:
        answer = await router.post(timeout_s=0.2)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "DEADLINE")
        for timeout_s, least_ms, most_ms in ((9.5, 5_000, 9_500), (1e9, 15_000, 20_000), (None, 15_000, 20_000)):
            assert (await router.post(timeout_s=timeout_s)).status_code == 200
            assert least_ms < router.pair.prefill.dispatches[-1].ms_left <= most_ms

    play(model, scenario, script, timeout_s=20.0)


@pytest.mark.covers("A12")
def test_over_the_queues_bound_a_request_is_turned_away_at_once(model: Path) -> None:
    async def script(attempt: ScriptedAttempt) -> None:
        await until(lambda: is_released["now"])
        await replying(b"x")(attempt)

    is_released = {"now": False}

    async def scenario(router: LiveRouter) -> None:
        waiting = [asyncio.create_task(router.post()) for _ in range(3)]
        await until(lambda: router.shell.snapshot()["queued"] == 2)
        refused = await router.post()
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
        assert refused.json()["error"]["code"] == "OVERLOADED"
        is_released["now"] = True
        assert [(await each).status_code for each in waiting] == [200, 200, 200]

    play(model, scenario, script, core_config=RouterCoreConfig(max_queue=2, max_inflight_prefills=1))


def test_a_refused_handoff_is_tried_again_and_the_client_sees_one_answer(model: Path) -> None:
    async def script(attempt: ScriptedAttempt) -> None:
        if attempt.dispatch.attempt == 0:
            attempt.prefill_says(0, b"h")
            attempt.prefill_fails(pb.NO_BLOCKS)
        else:
            assert list(attempt.dispatch.branches[0].generated_token_ids) == [ord("h")]
            attempt.prefill_says(1, b"i", pb.FINISH_LENGTH)

    async def scenario(router: LiveRouter) -> None:
        answer = (await router.post()).json()
        assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("hi", 2)
        assert [dispatch.attempt for dispatch in router.pair.prefill.dispatches] == [0, 1]

    play(model, scenario, script)


@pytest.mark.covers("A04")
def test_the_operators_endpoints_answer(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        assert (await router.client.get("/health")).json() == {"status": "ok"}
        assert (await router.client.get("/ready")).json() == {"ready": True, "missing": [], "degraded": []}
        (listed,) = (await router.client.get("/v1/models")).json()["data"]
        assert (await router.client.get(f"/v1/models/{MODEL_NAME}")).json() == listed and listed["id"] == MODEL_NAME
        assert listed["max_model_len"] == MAX_MODEL_LEN
        for other in ("other", "or/other", ""):
            unknown = await router.client.get(f"/v1/models/{other}")
            assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "model_not_found"
        await router.post()
        metrics = (await router.client.get("/metrics")).text
        assert 'baton_router_requests_total{outcome="length"} 1.0' in metrics
        assert 'baton_router_node_up{node="decode",role="decode"} 1.0' in metrics
        schema = (await router.client.get("/openapi.json")).json()
        assert "/v1/chat/completions" in schema["paths"]
        assert {"CompletionBody", "ChatBody", "Message"} <= set(schema["components"]["schemas"])

    play(model, scenario)


@pytest.mark.covers("A04")
def test_without_a_decode_node_the_router_is_not_ready_and_says_so(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        router.shell.on_unlisted(router.pair.decode.peer)
        ready = await router.client.get("/ready")
        assert (ready.status_code, ready.json()["missing"]) == (503, ["no decode node can take work"])
        answer = await router.post()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "NO_NODES")
        assert answer.headers["Retry-After"] == "1"

    play(model, scenario)


@pytest.mark.covers("A05")
def test_the_clients_request_id_is_echoed_and_never_a_key(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        body = {"model": MODEL_NAME, "prompt": "hi"}
        headers = {"X-Request-Id": "mine"}
        answers = [await router.client.post("/v1/completions", json=body, headers=headers) for _ in range(2)]
        assert [answer.headers["X-Request-Id"] for answer in answers] == ["mine", "mine"]
        ids = {dispatch.request_id for dispatch in router.pair.prefill.dispatches}
        assert len(ids) == 2
        assert "mine" not in ids
        refused = await router.client.post("/v1/completions", json={}, headers=headers)
        assert (refused.status_code, refused.headers["X-Request-Id"]) == (400, "mine")
        assert (await router.post(request_id="body")).headers["X-Request-Id"] == "body"

    play(model, scenario)


@pytest.mark.covers("A01")
def test_head_is_answered_where_get_is_without_a_body(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        for path in ("/health", "/ready", "/v1/models", f"/v1/models/{MODEL_NAME}", "/metrics"):
            head, get = await router.client.head(path), await router.client.get(path)
            assert (head.status_code, head.content, get.status_code) == (200, b"", 200)
            assert head.headers["content-type"] == get.headers["content-type"]
        assert (await router.client.head("/v1/completions")).status_code == 405

    play(model, scenario)


@pytest.mark.covers("A11")
def test_a_refused_request_has_an_id_the_clients_or_the_routers(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        bad: dict[str, Any] = {"model": MODEL_NAME, "prompt": "hi", "n": 0}
        own, other = [(await router.post(**bad)).headers["X-Request-Id"] for _ in range(2)]
        assert own != other and len(own) == 24
        mine = await router.client.post("/v1/completions", json=bad, headers={"X-Request-Id": "mine"})
        assert mine.headers["X-Request-Id"] == "mine"

    play(model, scenario)


@pytest.mark.covers("A11")
def test_an_http_1_0_client_gets_whole_answers_unchunked(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        body = json.dumps({"model": MODEL_NAME, "prompt": "hi", "max_tokens": 5})
        writer.write(f"POST /v1/completions HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        head, _, content = (await asyncio.wait_for(reader.read(), 60)).decode().partition("\r\n\r\n")
        writer.close()
        assert "transfer-encoding" not in head.lower()
        assert (head.split()[1], json.loads(content)["choices"][0]["text"]) == ("200", "hello")

    play(model, scenario)
