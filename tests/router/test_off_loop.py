"""What a large body takes to be understood is done beside the loop, however it is cut, and once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from router import tool_calls
from router.text import ModelText
from router.tool_calls import ChoiceCalls, ToolUse
from router.tool_syntax import HERMES, digest_of
from tests.router.live_router import LiveRouter
from tests.router.test_api import play
from tests.router.tiny_model import write_model_text

BYTES = 100_000  # above what is done on the loop


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
        ("/v1/completions", {"prompt": ["a" * 100] * (BYTES // 100)}, "encode_prompt"),
        ("/v1/completions", {"prompt": [[97] * 100] * (BYTES // 300), "echo": True, "logprobs": 0}, "offsets"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}] * (BYTES // 30)}, "encode_chat"),
        ("/v1/responses", {"input": [{"role": "user", "content": ""}] * (BYTES // 30)}, "encode_chat"),
        ("/tokenize", {"messages": [{"role": "user", "content": ""}] * (BYTES // 30)}, "encode_chat"),
    ],
    ids=["prompts", "offsets", "chat", "responses", "tokenize"],
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
