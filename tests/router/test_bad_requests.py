"""Bad requests: 4xx in OpenAI's shape, one sentence that names field, value and bound, and no node hears of them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.router.live_router import MAX_MODEL_LEN, MODEL_NAME, LiveRouter, live_router
from tests.router.tiny_model import VOCAB_SIZE, write_model_text

COMPLETION: dict[str, Any] = {"model": MODEL_NAME, "prompt": "hi"}
CHAT: dict[str, Any] = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "hi"}]}

# (fields that replace those of a good body, the field that the error names, words of its sentence)
BAD_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": 2.5}, "temperature", "less than or equal to 2, not 2.5"),
    ({"temperature": -0.1}, "temperature", "greater than or equal to 0"),
    ({"temperature": "hot"}, "temperature", "valid number"),
    ({"temperature": True}, "temperature", "valid number"),
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1, not 0"),
    ({"max_tokens": "9"}, "max_tokens", "valid integer"),
    ({"max_tokens": 10**30}, "max_tokens", str(MAX_MODEL_LEN)),
    ({"max_tokens": MAX_MODEL_LEN - 2}, "max_tokens", "more than the 253 that 3 prompt tokens leave of 256"),
    ({"seed": -1}, "seed", "greater than or equal to 0"),
    ({"seed": 2**63}, "seed", "less than or equal to 9223372036854775807"),
    ({"stream": "yes"}, "stream", "valid boolean"),
    ({"stream_options": {"usage": True}}, "stream_options.usage", "unknown parameter"),
    ({"prompt": None}, "prompt", "is required"),
    ({"prompt": ""}, "prompt", "must not be empty"),
    ({"prompt": []}, "prompt", "must not be empty"),
    ({"prompt": 5}, "prompt", "a text or a list of token ids, not 5"),
    ({"prompt": ["hi"]}, "prompt", "a list of prompts is not supported"),
    ({"prompt": [[1]]}, "prompt", "a list of prompts is not supported"),
    ({"prompt": [1, "a"]}, "prompt.1", "valid integer"),
    ({"prompt": [1, VOCAB_SIZE]}, "prompt", f"token id {VOCAB_SIZE} is not between 0 and {VOCAB_SIZE - 1}"),
    ({"prompt": [1, -1]}, "prompt", "token id -1"),
    ({"prompt": [1, 10**40]}, "prompt", "token id 1000"),
    ({"prompt": "x" * MAX_MODEL_LEN}, "prompt", "257 tokens leave no room"),
    ({"prompt": "\ud800"}, "prompt", "half a surrogate pair"),
    ({"top_p": 0.5}, "top_p", "not supported by this version"),
    ({"n": 2}, "n", "not supported by this version"),
    ({"stop": ["x"]}, "stop", "not supported by this version"),
    ({"logprobs": 1}, "logprobs", "not supported by this version"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "not supported by this version"),
    ({"frequency_penalty": 0.1}, "frequency_penalty", "not supported by this version"),
    ({"best_of": True}, "best_of", "not supported by this version"),
    ({"no_such_thing": 1}, "no_such_thing", "unknown parameter"),
    ({"request_id": "a b"}, "request_id", "must match"),
    ({"model": None}, "model", "is required"),
]
BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "must not be empty"),
    ({"messages": "hi"}, "messages", "valid list"),
    ({"messages": [{"role": "king", "content": "hi"}]}, "messages.0.role", '"king"'),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "is required"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type", "image_url"),
    ({"messages": [{"role": "user", "content": "hi", "tool_calls": []}]}, "messages.0.tool_calls", "unknown parameter"),
    ({"messages": [{"role": "tool", "content": "hi"}]}, "messages", "no tools here"),
    ({"messages": [{"role": "user", "content": "\udfff"}]}, "messages", "half a surrogate pair"),
    ({"messages": [{"role": "user", "content": "x" * MAX_MODEL_LEN}]}, "messages", "leave no room"),
    ({"tools": [{"type": "function"}]}, "tools", "not supported by this version"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "contradicts max_tokens"),
    ({"prompt": "hi"}, "prompt", "unknown parameter"),
]
BAD_BODIES = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"hi"',
    b"\xff\xfe\x00",
    b"[" * 100_000,
    b'{"model": NaN}',
    b'{"seed": ' + b"9" * 5000 + b"}",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_text(tmp_path_factory.mktemp("model"))


def assert_is_error(answer: httpx.Response, status: int, param: str | None, words: str) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    assert set(error) == {"message", "type", "param", "code"}
    assert words in error["message"]
    assert "\n" not in error["message"]
    assert len(error["message"]) < 400


@pytest.mark.covers("A11")
def test_each_bad_request_is_answered_with_the_one_thing_that_is_wrong(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        for path, good, bad in (
            ("/v1/completions", COMPLETION, BAD_COMPLETIONS),
            ("/v1/chat/completions", CHAT, BAD_CHATS),
        ):
            for fields, param, words in bad:
                content = json.dumps(good | fields).encode()
                assert_is_error(await router.client.post(path, content=content), 400, param, words)
        for content in BAD_BODIES:
            assert_is_error(await router.client.post("/v1/completions", content=content), 400, None, "body")
        unknown_model = json.dumps(COMPLETION | {"model": "\ud800other"})
        other = await router.client.post("/v1/completions", content=unknown_model)
        assert_is_error(other, 404, "model", MODEL_NAME)
        assert not router.pair.prefill.dispatches, "no node hears of a bad request"
        good_answer = await router.client.post("/v1/completions", json=COMPLETION | {"max_tokens": MAX_MODEL_LEN - 3})
        assert good_answer.status_code == 200

    play(model, scenario)


@pytest.mark.covers("A11")
def test_parameters_that_ask_for_nothing_are_taken(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        harmless: dict[str, Any] = {
            "top_p": 1.0,
            "n": 1,
            "stop": None,
            "logprobs": None,
            "presence_penalty": 0,
            "logit_bias": {},
            "user": "me",
        }
        assert (await router.client.post("/v1/completions", json=COMPLETION | harmless)).status_code == 200

    play(model, scenario)


@pytest.mark.covers("A11")
def test_a_huge_body_is_refused_while_it_is_read(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        announced = await router.client.post("/v1/completions", content=b" " * (2 << 20))
        assert_is_error(announced, 413, None, "larger than 1048576 bytes")

        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1048577\r\n\r\n")  # and no body
        assert b"413" in await asyncio.wait_for(reader.readline(), 10)
        writer.close()

        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(17):  # never says that it is complete
            writer.write(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
        assert b"413" in await asyncio.wait_for(reader.readline(), 10)
        writer.close()
        assert not router.pair.prefill.dispatches

    play(model, scenario)


@pytest.mark.covers("A06", "A11")
def test_unknown_paths_and_methods_have_the_same_shape(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        assert_is_error(await router.client.get("/v1/engines"), 404, None, "GET /v1/engines: Not Found.")
        assert_is_error(await router.client.get("/v1/completions"), 405, None, "Method Not Allowed")

    play(model, scenario)


def play(model: Path, scenario: Any) -> None:
    async def run() -> None:
        async with live_router(model) as router:
            await scenario(router)

    asyncio.run(run())
