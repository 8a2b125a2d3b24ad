"""The official Python client, unchanged, against a cluster of real processes: what it parses, and what it raises."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, Final

import openai
import pytest
from openai.types import CompletionUsage

from tests.e2e.cluster import BATON, Cluster, started_cluster

MODEL: Final = "llama-tiny"
MESSAGES: Final[list[Any]] = [
    {"role": "system", "content": "You are old."},
    {"role": "user", "content": "Grüß dich, 世界!"},
]
TEXT: Final = "Il était une fois 😀"
MAX_TOKENS: Final = 24
DRAWN: Final[dict[str, Any]] = {"model": MODEL, "max_tokens": MAX_TOKENS, "seed": 11, "temperature": 0.8}
WITH_USAGE: Final[Any] = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One of each role."""
    with started_cluster(tiny_model, tmp_path_factory.mktemp("openai"), "--max-model-len", "512") as running:
        yield running


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    """As a user makes it."""
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none") as running:
        yield running


def assert_counts(usage: CompletionUsage | None, prompt_tokens: int, completion_tokens: int) -> None:
    """Whole numbers that add up."""
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (prompt_tokens, completion_tokens)
    assert usage.total_tokens == prompt_tokens + completion_tokens
    assert usage.prompt_tokens_details is not None and usage.prompt_tokens_details.cached_tokens is not None
    assert 0 <= usage.prompt_tokens_details.cached_tokens < prompt_tokens, "the last one is always computed"


@pytest.mark.covers("A01", "A04")
def test_it_lists_and_retrieves_the_model_and_no_other(client: openai.OpenAI) -> None:
    (listed,) = client.models.list().data
    assert (listed.id, listed.object) == (MODEL, "model") and listed.created > 1_700_000_000
    assert client.models.retrieve(MODEL) == listed
    for name in ("llama", "some/other"):
        with pytest.raises(openai.NotFoundError, match=f'serves {MODEL}, not "{name}"') as caught:
            client.models.retrieve(name)
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.covers("A01", "A11")
def test_the_clients_own_message_goes_back_for_the_next_turn(client: openai.OpenAI) -> None:
    said = client.chat.completions.create(**DRAWN, messages=MESSAGES).choices[0].message
    for message in (said, said.model_dump(), {"role": "assistant", "content": said.content}):
        turns = [*MESSAGES, message, {"role": "user", "content": "And?"}]
        assert client.chat.completions.create(**DRAWN, messages=turns).choices[0].message.content


@pytest.mark.covers("A01", "A02", "A07")
def test_a_chat_has_choices_logprobs_and_usage_and_its_stream_says_the_same(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = DRAWN | {"messages": MESSAGES, "n": 2, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert whole.choices[0].message.content != whole.choices[1].message.content
    chunks = list(client.chat.completions.create(**asked, **WITH_USAGE))
    num_tokens = 0
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert parts[0].delta.role == choice.message.role == "assistant"
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        assert [part.finish_reason for part in parts if part.finish_reason] == [choice.finish_reason]
        assert choice.logprobs is not None and choice.logprobs.content is not None
        streamed = [each for part in parts if part.logprobs for each in part.logprobs.content or ()]
        assert streamed == choice.logprobs.content
        for each in choice.logprobs.content:
            assert len(each.top_logprobs) == 3 and each.logprob <= each.top_logprobs[0].logprob <= 0
            if (spelled := bytes(each.bytes or [])).isascii():
                assert spelled.decode() == each.token
        num_tokens += len(streamed)
    assert whole.usage is not None
    assert_counts(whole.usage, whole.usage.prompt_tokens, num_tokens)
    assert whole.usage.prompt_tokens > len("".join(each["content"] for each in MESSAGES).encode())
    *others, last = chunks
    assert_counts(last.usage, whole.usage.prompt_tokens, num_tokens)
    assert last.choices == []
    assert all(chunk.usage is None for chunk in others)


@pytest.mark.covers("A01", "A02", "A03", "A07")
def test_a_completion_has_choices_logprobs_and_usage_and_its_stream_says_the_same(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = DRAWN | {"prompt": [TEXT, "b"], "n": 2, "logprobs": 2, "echo": True}
    whole = client.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    chunks = list(client.completions.create(**asked, **WITH_USAGE))
    prompt_tokens = (1 + len(TEXT.encode())) + (1 + len("b"))  # the tokenizer's own first token, and bytes
    num_tokens = 0
    for choice, prompt in zip(whole.choices, [TEXT, TEXT, "b", "b"], strict=True):
        assert choice.text.startswith(prompt)
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert choice.logprobs is not None
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            streamed = [each for part in parts if part.logprobs for each in getattr(part.logprobs, name)]
            assert streamed == getattr(choice.logprobs, name)
        first, *others = choice.logprobs.token_logprobs or []
        assert first is None and all(each is not None and each <= 0 and math.isfinite(each) for each in others)
        num_tokens += len(others) - len(prompt.encode())
    assert_counts(whole.usage, prompt_tokens, num_tokens)
    assert_counts(chunks[-1].usage, prompt_tokens, num_tokens)


@pytest.mark.covers("A01", "A02", "A09")
def test_a_seed_repeats_a_stop_string_ends_and_another_seed_differs(client: openai.OpenAI) -> None:
    def text(**fields: Any) -> tuple[str, str | None]:
        choice = client.completions.create(**(DRAWN | {"prompt": TEXT, "max_tokens": 64} | fields)).choices[0]
        return choice.text, choice.finish_reason

    spoken, _ = text()
    assert text() == text() and text(seed=12)[0] != spoken
    stop = spoken[20:23]
    before, _, _ = spoken.partition(stop)
    assert text(stop=stop) == text(stop=["never said \n", stop]) == (before, "stop")
    stream = client.completions.create(**(DRAWN | {"prompt": TEXT, "max_tokens": 64}), stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == before


@pytest.mark.covers("A06", "A11")
@pytest.mark.parametrize(
    ("fields", "kind", "status", "param", "code"),
    [
        ({"n": 0}, openai.BadRequestError, 400, "n", "invalid_value"),
        ({"temperature": -1}, openai.BadRequestError, 400, "temperature", "invalid_value"),
        ({"top_p": 7}, openai.BadRequestError, 400, "top_p", "invalid_value"),
        ({"stop": ["x"] * 17}, openai.BadRequestError, 400, "stop", "invalid_value"),
        ({"extra_body": {"no_such": 1}}, openai.BadRequestError, 400, "no_such", "unknown_parameter"),
        ({"max_tokens": 600}, openai.BadRequestError, 400, "max_tokens", "context_length_exceeded"),
        ({"model": "gpt-4"}, openai.NotFoundError, 404, "model", "model_not_found"),
        ({"user": "x" * (9 << 20)}, openai.APIStatusError, 413, None, "body_too_large"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_error_is_the_exception_that_its_users_know(
    client: openai.OpenAI,
    fields: dict[str, Any],
    kind: type[openai.APIStatusError],
    status: int,
    param: str | None,
    code: str,
) -> None:
    for is_chat, is_stream in product([False, True], [False, True]):
        prompt: dict[str, Any] = {"messages": MESSAGES} if is_chat else {"prompt": TEXT}
        create: Any = client.chat.completions.create if is_chat else client.completions.create
        with pytest.raises(kind) as caught:
            create(**(DRAWN | prompt | {"stream": is_stream} | fields))
        error = caught.value
        assert (error.status_code, error.type) == (status, "invalid_request_error")
        assert (error.param, error.code) == (param, code)
        assert "\n" not in error.message


@pytest.mark.covers("A11")
def test_a_body_of_seven_mib_is_not_too_large(client: openai.OpenAI) -> None:
    """The limit is eight unless the router is told another."""
    assert client.completions.create(**DRAWN, prompt=TEXT, user="x" * (7 << 20)).choices


@pytest.mark.covers("A06", "A11")
def test_an_unknown_path_is_404_and_a_wrong_method_405_each_with_a_code_of_its_own(
    cluster: Cluster, client: openai.OpenAI
) -> None:
    with pytest.raises(openai.NotFoundError) as not_there:
        client.embeddings.create(model=MODEL, input="x", encoding_format="float")
    assert not_there.value.code == "not_found"
    with pytest.raises(openai.APIStatusError) as not_so:
        client.get("/completions", cast_to=object)
    assert (not_so.value.status_code, not_so.value.code) == (405, "method_not_allowed")
    assert not_so.value.response.headers["Allow"] == "POST"


def test_baton_chat_says_what_the_official_client_gets(cluster: Cluster, client: openai.OpenAI) -> None:
    asked: list[Any] = [{"role": "system", "content": "You are old."}, {"role": "user", "content": "Grüß dich"}]
    answer = client.chat.completions.create(model=MODEL, messages=asked, max_tokens=9, temperature=0)
    flags = ("--system", "You are old.", "--max-tokens", "9", "--temperature", "0")
    command = [BATON, "chat", cluster.url, "Grüß dich", *flags]
    ended = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert ended.stdout.decode().removesuffix("\n") == (answer.choices[0].message.content or "").removesuffix("\n")
