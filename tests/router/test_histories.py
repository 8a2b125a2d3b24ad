"""Conversations that other servers have had: what an assistant thought or refused is told on, or said to be in the wrong place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from router.text import ModelText
from tests.router.live_router import LiveRouter
from tests.router.test_api import HI, play
from tests.router.tiny_model import write_model_text

CHAT: Final = "/v1/chat/completions"
# Of Qwen3's template what is about thinking: how it finds it, and that only of turns behind the last question it is told.
QWEN: Final = """
{%- set ns = namespace(last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and loop.first %}{%- set ns.last_query_index = index - 1 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<think>' + reasoning_content.strip('\\n') + '</think>' + content + '|' }}
    {%- else %}
        {{- message.role + ':' + content + '|' }}
    {%- endif %}
{%- endfor %}"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_model_text(tmp_path_factory.mktemp("model"))
    settings = json.loads((directory / "tokenizer_config.json").read_text()) | {"chat_template": QWEN}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def after(message: dict[str, Any]) -> dict[str, Any]:
    """A conversation in which an assistant has said that."""
    return {"messages": [*HI, {"role": "assistant"} | message, *HI], "max_tokens": 5}


@pytest.mark.covers("A11")
@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"content": "x", "reasoning_content": "\nt"}, "<think>t</think>x|"),
        ({"content": "x", "reasoning": "t"}, "<think>t</think>x|"),
        ({"content": "x", "reasoning": "t", "reasoning_content": "t"}, "<think>t</think>x|"),
        ({"content": "<think>t</think>x"}, "<think>t</think>x|"),
        ({"content": "<think>t</think>x", "reasoning_content": ""}, "<think></think><think>t</think>x|"),
        ({"content": "x", "reasoning_content": None, "reasoning": None, "refusal": None}, "<think></think>x|"),
        (
            {
                "content": "x",
                "reasoning_content": "t",
                "provider_specific_fields": {"reasoning_content": "t", "a": None},
            },
            "<think>t</think>x|",
        ),
        ({"content": None, "refusal": "No."}, "<think></think>No.|"),
        ({"refusal": "No."}, "<think></think>No.|"),
        ({"content": "", "refusal": "No."}, "<think></think>No.|"),
        ({"content": "x", "refusal": ""}, "<think></think>x|"),
        ({"content": [{"type": "refusal", "refusal": "No"}, {"type": "text", "text": "!"}]}, "<think></think>No!|"),
    ],
)
def test_what_an_assistant_thought_or_refused_is_told_to_the_template(
    model: Path, message: dict[str, Any], told: str
) -> None:
    async def scenario(router: LiveRouter) -> None:
        answer = await router.post(CHAT, **after(message))
        assert answer.status_code == 200, answer.text
        (dispatch,) = router.pair.prefill.dispatches
        assert ModelText(model).decode(dispatch.prompt_token_ids) == f"user:hi|{told}user:hi|"
        tokens = await router.post("/tokenize", messages=after(message)["messages"])
        assert tokens.json()["tokens"] == list(dispatch.prompt_token_ids)

    play(model, scenario)


@pytest.mark.covers("A11", "A16")
def test_refusals_among_a_responses_items_are_what_was_said(model: Path) -> None:
    refused = [{"type": "refusal", "refusal": "No"}, {"type": "output_text", "text": "!", "annotations": []}]
    asked = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": refused}]

    async def scenario(router: LiveRouter) -> None:
        assert (await router.post("/v1/responses", input=asked, max_output_tokens=5)).status_code == 200
        (dispatch,) = router.pair.prefill.dispatches
        assert ModelText(model).decode(dispatch.prompt_token_ids) == "user:hi|<think></think>No!|"
        of_user = await router.post("/v1/responses", input=[{"role": "user", "content": refused}])
        assert of_user.json()["error"]["param"] == "input.0.content.0.type", of_user.text

    play(model, scenario)


BAD: Final[list[tuple[dict[str, Any], str, str]]] = [
    ({"role": "user", "content": "x", "reasoning_content": "t"}, "reasoning_content", "only an assistant has it"),
    ({"role": "user", "content": "x", "reasoning": "t"}, "reasoning", "only an assistant has it, not a user"),
    ({"role": "user", "content": "x", "refusal": "t"}, "refusal", "only an assistant has one, not a user"),
    ({"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}, "content.0.type", "must be 'text', not \"ref"),
    ({"content": "x", "refusal": "t"}, "refusal", "stands in place of content; give one of them"),
    ({"content": "x", "reasoning": "t", "reasoning_content": "u"}, "reasoning", "contradicts reasoning_content"),
    ({"content": "x", "reasoning_content": 5}, "reasoning_content", "must be a text, not 5"),
    ({"content": [{"type": "refusal", "refusal": 5}]}, "content.0.type", "must be 'text', not \"refusal\""),
    ({"content": "x", "provider_specific_fields": {"refusal": "t"}}, "provider_specific_fields", "unknown parameter"),
    ({}, "content", "is required"),
]


@pytest.mark.covers("A11")
def test_what_is_in_the_wrong_place_is_named(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        for message, name, words in BAD:
            for path in (CHAT, "/tokenize"):
                messages = after(message)["messages"]
                answer = await router.post(path, messages=messages)
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, f"messages.1.{name}"), error
                assert words in error["message"]
        assert not router.pair.prefill.dispatches

    play(model, scenario)
