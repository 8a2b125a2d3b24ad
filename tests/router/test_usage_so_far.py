"""The usage so far in each chunk of a stream, as guidellm asks for it; what of the prompts was cached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from proto import baton_pb2 as pb
from router.entrance import RouterCoreConfig
from tests.router.live_router import LiveRouter
from tests.router.scripted_nodes import ScriptedAttempt
from tests.router.test_api import HI, events, play
from tests.router.tiny_model import write_model_text


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_text(tmp_path_factory.mktemp("model"))


@pytest.mark.covers("A01", "A08")
@pytest.mark.parametrize(
    "options", [{"include_usage": True, "continuous_usage_stats": True}, {"continuous_usage_stats": True}]
)
def test_who_asks_for_the_usage_so_far_has_it_in_each_chunk(model: Path, options: dict[str, bool]) -> None:
    """As with vLLM, where it is asked for beside the usage at the end, and not without."""

    async def scenario(router: LiveRouter) -> None:
        stream = await router.post(
            "/v1/completions", stream=True, stream_options=options, max_tokens=5, return_token_ids=True
        )
        *chunks, done = events(stream.text)
        assert done == "[DONE]"
        if "include_usage" not in options:
            assert not any("usage" in chunk for chunk in chunks)
            return
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        ids = [chunk["choices"][0]["completion_token_ids"] for chunk in chunks[:-1]]
        assert counts[:-1] == [sum(map(len, ids[: index + 1])) for index in range(len(ids))]
        assert (counts[-1], chunks[-1]["choices"]) == (5, [])

    play(model, scenario)


@pytest.mark.covers("A07")
@pytest.mark.parametrize("way", ["whole", "stream", "in chunks"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_tells_how_much_of_each_prompt_was_cached_counted_once_whatever_n_is(
    model: Path, path: str, way: str
) -> None:
    """What the first node had that computed it, however often it was computed."""

    async def script(attempt: ScriptedAttempt) -> None:
        cached_tokens = len(attempt.dispatch.prompt_token_ids) - 1 if attempt.dispatch.attempt == 0 else 1
        timing = pb.Timing(key=attempt.key, first_step_us=1, cached_tokens=cached_tokens)
        attempt.prefill.send(attempt.prefill.router, pb.NodeMessage(tokens=pb.TokenBatch(timings=[timing])))
        attempt.prefill_says(attempt.num_generated, b"a")
        if attempt.dispatch.attempt == 0:
            attempt.prefill_fails(pb.CHECKSUM)
        else:
            attempt.decode_says(attempt.num_generated, b"ab", pb.FINISH_LENGTH)

    async def scenario(router: LiveRouter) -> None:
        is_chat = path != "/v1/completions"
        asked: dict[str, Any] = {"messages": HI} if is_chat else {"prompt": [[1, 2, 3], [4, 5]]}
        options = {"include_usage": True, "continuous_usage_stats": way == "in chunks"}
        answer = await router.post(path, **asked, n=2, stream=way != "whole", stream_options=options)
        usages = [answer.json()["usage"]] if way == "whole" else [c["usage"] for c in events(answer.text)[:-1]]
        num_cached = usages[-1]["prompt_tokens"] - (1 if is_chat else 2)
        assert usages[-1]["prompt_tokens_details"] == {"cached_tokens": num_cached}
        if way == "in chunks":
            counts = [each["prompt_tokens_details"]["cached_tokens"] for each in usages]
            assert counts == sorted(counts)

    play(model, scenario, script, core_config=RouterCoreConfig(min_refusal_wait_s=0.001))
