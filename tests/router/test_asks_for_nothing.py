"""What asks for nothing is taken, of the API's parameters that are not served, and of what other servers' clients send along."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.router.live_router import LiveRouter
from tests.router.test_bad_requests import CHAT, COMPLETION, play
from tests.router.tiny_model import write_model_text


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_text(tmp_path_factory.mktemp("model"))


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
            "top_k": -1,
            "best_of": 1,
            "tools": [],
            "user": "me",
            "prompt_cache_key": "mine",
            "safety_identifier": "me",
            "prompt_cache_retention": "in_memory",
            "verbosity": "medium",
            "reasoning_effort": "none",
            "include_stop_str_in_output": False,
            "spaces_between_special_tokens": True,
            "priority": 0,
            "use_beam_search": False,
            "length_penalty": 1.0,
            "metadata": {"a" * 64: "x" * 512},
        }
        assert (await router.client.post("/v1/completions", json=COMPLETION | harmless)).status_code == 200
        del harmless["best_of"], harmless["logprobs"]
        assert (await router.client.post("/v1/chat/completions", json=CHAT | harmless)).status_code == 200

    play(model, scenario)


@pytest.mark.covers("A11")
def test_stream_options_of_openais_that_ask_for_nothing_are_taken(model: Path) -> None:
    async def scenario(router: LiveRouter) -> None:
        options = {"include_usage": True, "include_obfuscation": False}
        answer = await router.post(stream=True, stream_options=options)
        assert answer.status_code == 200 and '"usage":{"prompt_tokens"' in answer.text

    play(model, scenario)
