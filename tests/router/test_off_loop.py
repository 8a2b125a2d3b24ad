"""What a large body takes to be understood is done beside the loop, however it is cut, and once."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from router import answer_grammar, intake, stop_strings, tokenizing, tool_calls
from router.json_parts import dump_ascii
from router.openai_types import prompts_of
from router.structured import grammar_of
from router.text import ModelText
from router.tool_calls import ChoiceCalls, ToolUse
from router.tool_syntax import HERMES, digest_of
from tests.router.live_router import LiveRouter
from tests.router.test_api import play
from tests.router.tiny_model import VOCAB_SIZE, write_model_text
from tests.router.tool_model import WEATHER, write_tool_model

BYTES = 100_000  # above what is done on the loop
TOO_LONG: Final = {"max_tokens": 1 << 20}  # refused once the prompt is understood: nobody waits for a thousand answers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_text(tmp_path_factory.mktemp("model"))


def threads_of(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """On which a method of ModelText is called from now on."""
    threads: list[int] = []
    own: Callable[..., Any] = getattr(ModelText, name)

    def noted(*args: Any, **named: Any) -> Any:
        threads.append(threading.get_ident())
        return own(*args, **named)

    monkeypatch.setattr(ModelText, name, noted)
    return threads


@pytest.mark.covers("A11")
@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/completions", {"prompt": ["a" * 100] * (BYTES // 100)} | TOO_LONG, "encode_prompt"),
        ("/v1/completions", {"prompt": "a" * (BYTES // 20)} | TOO_LONG, "encode_prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * (BYTES // 20)}]}, "encode_chat"),
        ("/v1/completions", {"prompt": [[97] * 100] * (BYTES // 300), "echo": True, "logprobs": 0}, "offsets"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}] * (BYTES // 30)}, "encode_chat"),
        ("/v1/responses", {"input": [{"role": "user", "content": ""}] * (BYTES // 30)}, "encode_chat"),
        ("/tokenize", {"messages": [{"role": "user", "content": ""}] * (BYTES // 30)}, "encode_chat"),
        ("/tokenize", {"prompt": "a" * BYTES, "return_token_strs": True}, "token_string"),
    ],
    ids=["prompts", "a prompt", "a message", "offsets", "chat", "responses", "tokenize", "token strings"],
)
def test_it_is_the_size_of_the_body_that_counts(
    model: Path, path: str, body: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = threads_of(monkeypatch, name)

    async def scenario(router: LiveRouter) -> None:
        content = {"model": "tiny"} | body
        await router.client.post(path, json=content)
        assert threads and threading.get_ident() not in threads

    play(model, scenario)


@pytest.mark.covers("A11")
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/tokenize"])
def test_a_conversation_of_many_turns_is_written_beside_the_loop_however_short_they_are(
    model: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = threads_of(monkeypatch, "encode_chat")

    async def scenario(router: LiveRouter) -> None:
        field = "input" if path == "/v1/responses" else "messages"
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        for num_turns, is_beside in ((2, False), (40, True)):
            threads.clear()
            await router.client.post(path, json={"model": "tiny", field: turns * (num_turns // 2)})
            assert [each != threading.get_ident() for each in threads] == [is_beside]

    play(model, scenario)


@pytest.mark.covers("A11", "A15")
def test_text_that_may_have_called_tools_is_read_beside_the_loop_however_few_bytes_its_tokens_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    own = ChoiceCalls.push

    def noted(calls: ChoiceCalls, text: str) -> Any:
        threads.append(threading.get_ident())
        return own(calls, text)

    monkeypatch.setattr(ChoiceCalls, "push", noted)

    async def scenario(router: LiveRouter) -> None:
        for said, is_beside in ((b"hi", False), (b"[" * 600, True)):
            threads.clear()
            fields = {"messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER], "max_tokens": len(said)}
            answer = await router.post("/v1/chat/completions", **fields, generated_token_ids=[*said])
            assert answer.status_code == 200, answer.text
            assert [each != threading.get_ident() for each in threads][:1] == [is_beside]

    play(write_tool_model(tmp_path / "model"), scenario, max_model_len=1024)


class NotedSize:
    """In place of ModelText's vocab_size, which is asked for where token ids are judged: the threads that ask."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        self._value = 0

    def __get__(self, text: ModelText | None, owner: type[ModelText]) -> int:
        self.threads.append(threading.get_ident())
        return self._value

    def __set__(self, text: ModelText, value: int) -> None:
        self._value = value


@pytest.mark.covers("A11", "A14")
@pytest.mark.parametrize(
    "asked",
    [
        {"structured_outputs": {"choice": ["a", "é" * BYTES]}},
        {"structured_outputs": {"json": json.dumps({"type": "string", "title": "a" * BYTES})}},
        {"structured_outputs": {"regex": "a" * 2000 + "(?=b)"}},
    ],
    ids=["choice", "json", "expression"],
)
def test_a_large_grammar_is_read_beside_the_loop(
    model: Path, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def noted(*args: Any, **named: Any) -> Any:
        threads.append(threading.get_ident())
        return grammar_of(*args, **named)

    monkeypatch.setattr(answer_grammar, "grammar_of", noted)

    async def scenario(router: LiveRouter) -> None:
        refused = await router.post(**asked)
        assert refused.status_code == 400 and ("than the 65536" in refused.text or "not supported" in refused.text)
        assert threads and threading.get_ident() not in threads

    play(model, scenario)


@pytest.mark.covers("A11")
def test_between_two_prompts_of_a_list_the_loop_has_its_turn(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_turns, seen = 0, list[int]()
    own = ModelText.choice_text

    def noted(*args: Any, **named: Any) -> Any:
        seen.append(num_turns)
        return own(*args, **named)

    monkeypatch.setattr(ModelText, "choice_text", noted)

    async def count() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    async def scenario(router: LiveRouter) -> None:
        counting = asyncio.create_task(count())
        answer = await router.post(prompt=["hi"] * 8, max_tokens=20)
        counting.cancel()
        assert answer.status_code == 200, answer.text
        assert len(set(seen)) == 8

    play(model, scenario)


@pytest.mark.covers("A09", "A11")
def test_what_stop_strings_take_to_be_looked_for_is_computed_once_for_all_choices(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[str] = []
    own = stop_strings._fallbacks

    def noted(stop: str) -> Any:
        computed.append(stop)
        return own(stop)

    monkeypatch.setattr(stop_strings, "_fallbacks", noted)

    async def scenario(router: LiveRouter) -> None:
        answer = await router.post(prompt=["hi", "ho", "hu"], n=4, max_tokens=20, stop=["STOP", "END"])
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["choices"]) == 12
        assert computed == ["STOP", "END"]

    play(model, scenario)


WRONG = [97] * BYTES + [VOCAB_SIZE]


@pytest.mark.covers("A11")
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": WRONG}),
        ("/v1/completions", {"prompt": [[97], WRONG]}),
        ("/v1/completions", {"prompt": "hi", "generated_token_ids": WRONG}),
        ("/detokenize", {"tokens": WRONG}),
    ],
    ids=["prompt", "prompts", "resubmission", "detokenize"],
)
def test_token_ids_of_a_large_body_are_judged_beside_the_loop(
    model: Path, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = NotedSize()
    monkeypatch.setattr(ModelText, "vocab_size", size, raising=False)
    forms: list[int] = []

    def noted(value: object) -> list[str | list[int]]:
        forms.append(threading.get_ident())
        return prompts_of(value)

    monkeypatch.setattr(intake, "prompts_of", noted)

    async def scenario(router: LiveRouter) -> None:
        refused = await router.post(path, **body)
        assert refused.status_code == 400 and f"token id {VOCAB_SIZE} is not between" in refused.text
        assert size.threads[-1] != threading.get_ident()  # the last one found it
        assert threading.get_ident() not in forms or body.get("prompt") == "hi"

    play(model, scenario)


@pytest.mark.covers("A11", "A13")
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a" * BYTES, "return_token_strs": True, "add_special_tokens": False}),
        ("/detokenize", {"tokens": [97] * BYTES}),
    ],
)
def test_an_answer_of_many_tokens_is_written_beside_the_loop_bit_by_bit(
    model: Path, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def noted(value: object) -> str:
        threads.append(threading.get_ident())
        assert not isinstance(value, list) or len(value) < BYTES // 10
        return dump_ascii(value)

    monkeypatch.setattr(tokenizing, "dump_ascii", noted)

    async def scenario(router: LiveRouter) -> None:
        told = (await router.post(path, **body)).json()
        if path == "/detokenize":
            assert told == {"prompt": "a" * BYTES}
        else:
            assert list(told) == ["count", "max_model_len", "tokens", "token_strs"]
            assert (told["tokens"], told["token_strs"]) == ([97] * BYTES, ["a"] * BYTES)
        assert threads and threading.get_ident() not in threads

    play(model, scenario)


@pytest.mark.covers("A15")
def test_a_prompt_is_hashed_once_however_many_calls_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[Sequence[int]] = []

    def noted(prompt: Sequence[int]) -> str:
        hashed.append(prompt)
        return digest_of(prompt)

    monkeypatch.setattr(tool_calls, "digest_of", noted)
    calls = ChoiceCalls(ToolUse(HERMES, frozenset({"f"}), True), 1, range(1000))
    assert not hashed
    calls.push('<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 20)
    assert len({call.id for call in calls.calls}) == 20 and len(hashed) == 1


@pytest.mark.covers("A11")
def test_a_prompt_with_more_logprobs_than_nodes_tell_is_refused_before_any_node_hears_of_it(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        refused = await router.post(prompt=[97] * 900, echo=True, logprobs=20, n=16, max_tokens=1)
        assert refused.status_code == 400 and "at most 262144 are told" in refused.json()["error"]["message"]
        assert not router.pair.prefill.dispatches

    play(model, scenario, max_model_len=1024)
