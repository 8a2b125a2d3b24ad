"""The usage so far in each chunk of a stream, as guidellm asks for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.router.live_router import LiveRouter
from tests.router.test_api import events, play
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
