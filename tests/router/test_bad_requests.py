"""Bad requests: 4xx in OpenAI's shape, one sentence that names field, value and bound, and no node hears of them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from router.api import Api, ApiSettings
from router.shell import RouterShell
from router.text import ModelText
from tests.plain_http import NO_CERTIFICATES
from tests.router.live_router import MAX_MODEL_LEN, MODEL_NAME, LiveRouter, live_router
from tests.router.tiny_model import EOS_ID, VOCAB_SIZE, write_model_text

COMPLETION: dict[str, Any] = {"model": MODEL_NAME, "prompt": "hi"}
CHAT: dict[str, Any] = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "hi"}]}

HUGE = int("7" * 4200)

# (fields that replace those of a good body, the field that the error names, words of its sentence)
BAD_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": 2.5}, "temperature", "less than or equal to 2, not 2.5"),
    ({"temperature": -0.1}, "temperature", "greater than or equal to 0"),
    ({"temperature": "hot"}, "temperature", "must be a number"),
    ({"temperature": True}, "temperature", "must be a number"),
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1, not 0"),
    ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0, not -1"),
    ({"max_tokens": "9"}, "max_tokens", "must be a whole number"),
    ({"max_tokens": 10**30}, "max_tokens", str(MAX_MODEL_LEN)),
    ({"max_tokens": MAX_MODEL_LEN - 2}, "max_tokens", "more than the 253 that 3 prompt tokens leave of 256"),
    ({"seed": -(2**63) - 1}, "seed", "greater than or equal to -9223372036854775808"),
    ({"seed": 2**63}, "seed", "less than or equal to 9223372036854775807"),
    ({"stream": "yes"}, "stream", "must be true or false"),
    ({"stream_options": {"usage": True}}, "stream_options.usage", "unknown parameter"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", "not supported"),
    ({"stream_options": {"include_obfuscation": 0}}, "stream_options.include_obfuscation", "must be true or false"),
    ({"prompt": None}, "prompt", "is required"),
    ({"prompt": ""}, "prompt", "must not be empty"),
    ({"prompt": []}, "prompt", "must not be empty"),
    ({"prompt": 5}, "prompt", "a text, a list of token ids, or a list of either, not 5"),
    ({"prompt": [1, "a"]}, "prompt.1", 'a token id, not "a"'),
    ({"prompt": ["a", [1]]}, "prompt.1", "a text, not a list of 1"),
    ({"prompt": [[1], "a"]}, "prompt.1", 'a list of token ids, not "a"'),
    ({"prompt": [[1], [2, True]]}, "prompt.1.1", "a token id, not true"),
    ({"prompt": [1.5]}, "prompt.0", "a text or a token id, not 1.5"),
    ({"prompt": ["a", ""]}, "prompt.1", "must not be empty"),
    ({"prompt": [[1], []]}, "prompt.1", "must not be empty"),
    ({"prompt": [[1], [VOCAB_SIZE]]}, "prompt.1", f"token id {VOCAB_SIZE}"),
    ({"prompt": ["a", "x" * MAX_MODEL_LEN]}, "prompt.1", "257 tokens leave no room"),
    ({"prompt": ["a"] * 513, "n": 2}, "prompt", "more than the 1024 choices"),
    ({"prompt": [1, VOCAB_SIZE]}, "prompt", f"token id {VOCAB_SIZE} is not between 0 and {VOCAB_SIZE - 1}"),
    ({"prompt": [1, -1]}, "prompt", "token id -1"),
    ({"prompt": [1, 10**40]}, "prompt", "token id 1000"),
    ({"prompt": "x" * MAX_MODEL_LEN}, "prompt", "257 tokens leave no room"),
    ({"prompt": "\ud800"}, "prompt", "half a surrogate pair"),
    ({"top_p": -0.1}, "top_p", "must be greater than or equal to 0, not -0.1"),
    ({"top_p": 7}, "top_p", "less than or equal to 1, not 7"),
    ({"top_k": -2}, "top_k", "greater than or equal to -1, not -2"),
    ({"top_k": 1.5}, "top_k", "must be a whole number"),
    ({"min_p": 1.1}, "min_p", "less than or equal to 1"),
    ({"presence_penalty": 2.1}, "presence_penalty", "less than or equal to 2"),
    ({"frequency_penalty": -2.1}, "frequency_penalty", "greater than or equal to -2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", "less than or equal to 100"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "its keys are token ids, not 'a'"),
    ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias", f"token id {VOCAB_SIZE} is not between"),
    ({"logit_bias": {"01": 1, "1": 2}}, "logit_bias", "its keys are token ids, not '01'"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "at most 1024 items, not 1025"),
    ({"logit_bias": [5]}, "logit_bias", "must be an object"),
    ({"logit_bias": {str(i): "x" for i in range(1025)}}, "logit_bias", "at most 1024 items, not 1025"),
    ({"generated_token_ids": [1, "a", "b"]}, "generated_token_ids.1", 'a whole number, not "a"'),
    ({"stream_options": {f"x{i}": 1 for i in range(65)}}, "stream_options", "at most 64 items, not 65"),
    ({"min_tokens": 17}, "min_tokens", "at most max_tokens, 16, not 17"),
    ({"max_tokens": 0, "min_tokens": 1, "echo": True}, "min_tokens", "at most max_tokens, 0, not 1"),
    ({"prompt": [1] * MAX_MODEL_LEN, "max_tokens": 0, "echo": True}, "prompt", "one token is always generated"),
    ({"max_tokens": HUGE}, "max_tokens", "7777... is more than the 253"),
    ({"min_tokens": HUGE}, "min_tokens", "at most max_tokens, 16, not 7777"),
    ({"best_of": HUGE}, "best_of", "must equal n, 1, not 7777"),
    ({"top_p": HUGE}, "top_p", "7777"),
    ({"seed": HUGE}, "seed", "7777..."),
    ({"suffix": HUGE}, "suffix", "(got 7777"),
    ({"prompt": HUGE}, "prompt", "not 7777"),
    ({"max_tokens": 0, "echo": False}, "max_tokens", "greater than or equal to 1, not 0, without echo"),
    ({"n": 0}, "n", "greater than or equal to 1, not 0"),
    ({"n": 17}, "n", "less than or equal to 16, not 17"),
    ({"n": 2, "best_of": 3}, "best_of", "must equal n, 2, not 3"),
    ({"best_of": True}, "best_of", "must be a whole number"),
    ({"stop": ["x"] * 17}, "stop", "at most 16 items, not a list of 17"),
    ({"stop": ["x", ""]}, "stop.1", "must not be empty"),
    ({"stop": ""}, "stop", "must not be empty"),
    ({"stop": "x" * 1001}, "stop", "at most 1000 characters, not 1001"),
    ({"stop": 5}, "stop", "must be a text or a list of texts, not 5"),
    ({"stop": "\ud800"}, "stop", "holds half a surrogate pair"),
    ({"structured_outputs": {"regex": "[\ud83c-\udbff]"}}, "structured_outputs.regex", "holds half a surrogate pair"),
    ({"structured_outputs": {"grammar": "\ud800"}}, "structured_outputs.grammar", "holds half a surrogate pair"),
    ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids", f"token id {VOCAB_SIZE}"),
    ({"stop_token_ids": [1] * 257}, "stop_token_ids", "at most 256 items"),
    ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
    ({"logprobs": True}, "logprobs", "must be a whole number"),
    ({"top_logprobs": 1}, "top_logprobs", "not supported by this version"),
    ({"suffix": "x"}, "suffix", "not supported by this version"),
    ({"priority": 1}, "priority", "not supported by this version (got 1)"),
    ({"use_beam_search": True}, "use_beam_search", "not supported by this version (got true)"),
    ({"include_stop_str_in_output": True}, "include_stop_str_in_output", "not supported by this version"),
    ({"metadata": {"a": 1}}, "metadata.a", "must be a text, not 1"),
    ({"metadata": {"a": "x" * 513}}, "metadata.a", "at most 512 characters, not 513"),
    ({"metadata": {"a" * 65: "x"}}, "metadata", "a name may have 64 characters, not 65"),
    ({"metadata": {str(i): "x" for i in range(17)}}, "metadata", "at most 16 items, not 17"),
    ({"generated_token_ids": [VOCAB_SIZE]}, "generated_token_ids", f"token id {VOCAB_SIZE}"),
    ({"generated_token_ids": [1] * 17}, "generated_token_ids", "17 tokens are more than max_tokens, 16"),
    ({"generated_token_ids": [1] * 3, "max_tokens": 2}, "generated_token_ids", "3 tokens are more than max_tokens, 2"),
    ({"generated_token_ids": "abc"}, "generated_token_ids", "must be a list"),
    ({"generated_token_ids": [1, True]}, "generated_token_ids.1", "must be a whole number"),
    ({"generated_token_ids": [1, -1]}, "generated_token_ids", "token id -1 is not between"),
    ({"generated_token_ids": [1], "n": 2}, "generated_token_ids", "need one prompt and n = 1"),
    ({"generated_token_ids": [1], "prompt": ["a", "b"]}, "generated_token_ids", "need one prompt and n = 1"),
    ({"generated_token_ids": [1], "echo": True}, "generated_token_ids", "cannot be given with echo"),
    ({"generated_token_ids": [EOS_ID, 1]}, "generated_token_ids", f"stop token {EOS_ID} at index 0, which ends a"),
    (
        {"generated_token_ids": [1, EOS_ID], "min_tokens": 2},
        "generated_token_ids",
        f"hold the stop token {EOS_ID} at index 1, before min_tokens, 2",
    ),
    ({"timeout_s": 0}, "timeout_s", "greater than 0, not 0"),
    ({"timeout_s": "5"}, "timeout_s", "must be a number"),
    ({"timeout_s": HUGE}, "timeout_s", "7777"),
    ({"no_such_thing": 1}, "no_such_thing", "unknown parameter"),
    ({"request_id": "a b"}, "request_id", 'must be 1 to 256 visible ASCII characters, not "a b"'),
    ({"model": None}, "model", "is required"),
    ({"tools": [{"type": "function"}]}, "tools", "not supported by this version"),
]
BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "must not be empty"),
    ({"messages": "hi"}, "messages", "must be a list"),
    ({"messages": [{"role": "king", "content": "hi"}]}, "messages.0.role", '"king"'),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "is required"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type", "image_url"),
    (
        {"messages": [{"role": "user", "content": "hi", "tool_calls": [1]}]},
        "messages.0.tool_calls.0",
        "must be an object, not 1",
    ),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content", "is required"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "a text or a list of text parts, not 5"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages.0.content.0", "must be an object, not 5"),
    ({"messages": ["hi"]}, "messages.0", 'must be an object, not "hi"'),
    ({"messages": [{"role": "tool", "content": "hi"}]}, "messages", "no tools here"),
    ({"messages": [{"role": "user", "content": "\udfff"}]}, "messages", "half a surrogate pair"),
    ({"messages": [{"role": "user", "content": "x" * MAX_MODEL_LEN}]}, "messages", "leave no room"),
    ({"tools": [{"type": "function"}]}, "tools.0.function", "is required"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "contradicts max_tokens"),
    ({"max_completion_tokens": 99999}, "max_completion_tokens", "99999 is more than"),
    ({"prompt": "hi"}, "prompt", "unknown parameter"),
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1, not 0"),
    ({"logprobs": 1}, "logprobs", "must be true or false"),
    ({"top_logprobs": 2}, "top_logprobs", "needs logprobs to be true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    ({"echo": True}, "echo", "not supported by this version"),
    ({"verbosity": "low"}, "verbosity", 'not supported by this version (got "low")'),
    ({"reasoning_effort": "medium"}, "reasoning_effort", 'not supported by this version (got "medium")'),
    ({"response_format": {"type": "xml"}}, "response_format.type", "must be 'text', 'json_object' or 'json_schema'"),
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
def test_what_is_no_json_is_described_in_plain_words(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        for content, words in (
            (b"[" * 100_000, "nested too deeply"),
            (b'{"seed": ' + b"9" * 5000 + b"}", "a number in it has more than 4300 digits"),
            (b'{"model": "\xff"}', "it is no UTF-8"),
            (b'{"model": NaN}', "not JSON: NaN is no number."),
        ):
            answer = await router.client.post("/v1/completions", content=content)
            assert_is_error(answer, 400, None, words)
            assert not any(word in answer.text for word in ("sys.", "recursion", "codec"))
        huge = await router.client.post("/v1/completions", json=COMPLETION | {"temperature": 10**400})
        assert_is_error(huge, 400, "temperature", "must be a finite number, not 1000")

    play(model, scenario)


@pytest.mark.covers("A11", "A01")
def test_a_message_of_the_server_can_be_sent_back_with_its_empty_fields(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        path = "/v1/chat/completions"
        answered = (await router.client.post(path, json=CHAT)).json()["choices"][0]["message"]
        empty = dict.fromkeys(("annotations", "audio", "function_call", "tool_calls", "refusal", "name"))
        by_litellm = {name: value for name, value in answered.items() if name != "refusal"}
        by_litellm["provider_specific_fields"] = {"refusal": answered["refusal"]}
        for message in (answered, answered | empty, answered | {"tool_calls": [], "annotations": []}, by_litellm):
            again = CHAT | {"messages": [*CHAT["messages"], message, *CHAT["messages"]]}
            answer = await router.client.post(path, json=again | {"stream_options": {"include_usage": None}})
            assert answer.status_code == 200, answer.text
        prompts = [list(each.prompt_token_ids) for each in router.pair.prefill.dispatches[1:]]
        assert prompts[0] == prompts[1] == prompts[2] == prompts[3]
        by_litellm["provider_specific_fields"] = {"thinking": "deep"}
        said = CHAT | {"messages": [*CHAT["messages"], by_litellm]}
        refused = await router.client.post(path, json=said)
        assert_is_error(refused, 400, "messages.1.provider_specific_fields", "unknown parameter")
        silent = CHAT | {"messages": [*CHAT["messages"], {"role": "assistant", "content": None}]}
        assert (await router.client.post(path, json=silent)).status_code == 200

    play(model, scenario)


@pytest.mark.covers("A11", "A14")
def test_a_number_that_is_not_finite_is_refused_wherever_its_object_is_handed_on(model: Path) -> None:
    """1e400 is JSON; who repeats it as Infinity, to a client or to a node, writes none."""
    schema = '{"type": "object", "default": 1e400}'
    named = f'"name": "f", "parameters": {schema}'
    chat, input_ = json.dumps(CHAT)[:-1], f'{{"model": "{MODEL_NAME}", "input": "hi"'
    cases = [
        ("/v1/chat/completions", f'{chat}, "tools": [{{"type": "function", "function": {{{named}}}}}]}}', "tools"),
        ("/v1/responses", f'{input_}, "tools": [{{"type": "function", {named}}}], "tool_choice": "none"}}', "tools"),
        ("/v1/chat/completions", f'{chat}, "structured_outputs": {{"json": {schema}}}}}', "structured_outputs.json"),
        (
            "/v1/responses",
            f'{input_}, "text": {{"format": {{"type": "json_schema", "name": "a", "schema": {schema}}}}}}}',
            "text.format.schema",
        ),
    ]

    async def scenario(router: LiveRouter) -> None:
        for path, content, field in cases:
            assert_is_error(await router.client.post(path, content=content), 400, field, "a number that is not finite")
        assert not router.pair.prefill.dispatches

    play(model, scenario)


@pytest.mark.covers("A11")
def test_a_huge_body_is_refused_while_it_is_read(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        announced = await router.client.post("/v1/completions", content=b" " * (2 << 20))
        assert_is_error(announced, 413, None, "larger than 1048576 bytes")
        largest = json.dumps(COMPLETION).encode().ljust(1 << 20)
        assert (await router.client.post("/v1/completions", content=largest + b" ")).status_code == 413
        assert not router.pair.prefill.dispatches
        assert (await router.client.post("/v1/completions", content=largest)).status_code == 200

        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1048577\r\n\r\n")  # and no body
        assert b"413" in await asyncio.wait_for(reader.readline(), 60)
        writer.close()

        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(17):  # never says that it is complete
            writer.write(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
        assert b"413" in await asyncio.wait_for(reader.readline(), 60)
        writer.close()
        assert len(router.pair.prefill.dispatches) == 1, "the largest one that is taken"

    play(model, scenario)


@pytest.mark.covers("A06", "A11")
def test_unknown_paths_and_methods_have_the_same_shape(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        nowhere, wrong = [await router.client.get(f"/v1/{path}") for path in ("engines", "completions")]
        assert_is_error(nowhere, 404, None, "GET /v1/engines: Not Found.")
        assert_is_error(wrong, 405, None, "Method Not Allowed")
        assert [each.json()["error"]["code"] for each in (nowhere, wrong)] == ["not_found", "method_not_allowed"]
        assert wrong.headers["Allow"] == "POST"
        slashed = await router.client.post("/v1/completions/", json=COMPLETION)
        assert_is_error(
            slashed, 404, None, "POST /v1/completions/: Not Found."
        )  # no way elsewhere, to a host that it names
        ids = [each.headers["X-Request-Id"] for each in (nowhere, wrong)]
        assert len(set(ids)) == 2 and all(len(each) == 24 for each in ids)
        for path in ("engines", "completions", "models/other"):
            named = await router.client.get(f"/v1/{path}", headers={"X-Request-Id": "mine"})
            assert (named.headers["X-Request-Id"], named.status_code) == ("mine", 405 if path == "completions" else 404)
        unprintable = await router.client.get("/v1/engines", headers={"X-Request-Id": "a b"})
        assert len(unprintable.headers["X-Request-Id"]) == 24

    play(model, scenario)


class _BrokenShell:
    """Has a bug."""

    def missing(self) -> list[str]:
        raise RuntimeError("as scripted")


@pytest.mark.covers("A06")
def test_a_bug_is_one_500_in_the_same_shape_under_an_id_that_the_log_has(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> httpx.Response:
        api = Api(cast(RouterShell, _BrokenShell()), ModelText(model), ApiSettings(MODEL_NAME, 30.0, 1 << 20))
        transport = httpx.ASGITransport(api.app(), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://router", verify=NO_CERTIFICATES) as client:
            return await client.get("/ready")

    answer = asyncio.run(run())
    assert_is_error(answer, 500, None, "Internal error")
    assert "scripted" not in answer.text
    assert f"request={answer.headers['X-Request-Id']} path=/ready" in caplog.text


def play(model: Path, scenario: Any) -> None:
    async def run() -> None:
        async with live_router(model) as router:
            await scenario(router)

    asyncio.run(run())
