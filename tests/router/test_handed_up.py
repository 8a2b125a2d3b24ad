"""Requests whose budget is spent, over real sockets: what is handed up, and what goes on with it, are the run without faults."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any, Final

import openai
import pytest

from proto import baton_pb2 as pb
from router.entrance import RouterCoreConfig
from tests.router.live_router import MODEL_NAME, LiveRouter
from tests.router.scripted_nodes import Script, ScriptedAttempt, replying
from tests.router.test_api import HI, events, play
from tests.router.test_stream_equals_whole import completion, drawn_body, joined
from tests.router.tiny_model import write_model_text
from tests.router.upper_router import UpperRouter

NUM_REQUESTS: Final = 60
NO_RETRY: Final = RouterCoreConfig(preempt_retry_count=0)
USAGE: Final[dict[str, Any]] = {"stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_text(tmp_path_factory.mktemp("model"))


class Breaking:
    """Completes, and while it breaks, preempts anywhere behind an attempt's first token; some tokens only the error names."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.breaks = False

    async def script(self, attempt: ScriptedAttempt) -> None:
        tokens, finish = completion(attempt.dispatch)
        first = attempt.num_generated
        end = self.rng.randint(first + 1, len(tokens)) if self.breaks else len(tokens)
        is_whole = end == len(tokens)
        if is_whole and end == first + 1:
            attempt.prefill_says(first, tokens[first:], finish)
            return
        attempt.prefill_says(first, tokens[first : first + 1])
        told = end if is_whole else self.rng.randint(first + 1, end)
        attempt.decode_says(first, tokens[first:told], finish if is_whole else pb.FINISH_UNSPECIFIED)
        if not is_whole:
            attempt.decode_fails(pb.PREEMPTED, token_ids=tokens[:end])


@pytest.mark.covers("A05", "A07", "A08", "A09", "R08", "R09", "R20")
def test_what_is_handed_up_and_what_goes_on_with_it_are_together_the_run_without_faults(
    model: Path, fresh_seed: int
) -> None:
    rng = random.Random(fresh_seed)
    nodes = Breaking(rng)

    async def scenario(router: LiveRouter) -> None:
        paths = ["/v1/completions", "/v1/chat/completions"] * (NUM_REQUESTS // 2)
        bodies = [
            drawn_body(rng, is_chat=bool(number % 2)) | {"return_token_ids": True} for number in range(len(paths))
        ]
        upper = UpperRouter(router.client, MODEL_NAME, rng)
        whole = await asyncio.gather(*map(upper.answer, paths, bodies))
        assert upper.num_handed_up == 0
        nodes.breaks = True
        parts = await asyncio.gather(*map(upper.answer, paths, bodies))
        for body, expected, got in zip(bodies, whole, parts, strict=True):
            assert got == expected, body
        assert upper.num_handed_up > NUM_REQUESTS

    play(model, scenario, nodes.script, core_config=NO_RETRY)


@pytest.mark.covers("A07", "A08", "A09", "R03", "R05", "R09", "R20")
def test_what_the_router_itself_retries_looks_to_its_client_as_if_nothing_had_happened(
    model: Path, fresh_seed: int
) -> None:
    rng = random.Random(fresh_seed)
    nodes = Breaking(rng)

    async def scenario(router: LiveRouter) -> None:
        paths = ["/v1/completions", "/v1/chat/completions"] * (NUM_REQUESTS // 4)
        bodies = [
            drawn_body(rng, is_chat=bool(number % 2)) | {"return_token_ids": True} for number in range(len(paths))
        ]
        upper = UpperRouter(router.client, MODEL_NAME, rng)
        whole = await asyncio.gather(*map(upper.answer, paths, bodies))
        nodes.breaks = True
        assert await asyncio.gather(*map(upper.answer, paths, bodies)) == whole
        assert upper.num_handed_up == upper.num_turned_away == 0
        assert max(dispatch.attempt for dispatch in router.pair.prefill.dispatches) > 2

    play(model, scenario, nodes.script, core_config=RouterCoreConfig(min_refusal_wait_s=0.001))


def preempted_after(token_ids: bytes, whole: bytes) -> Script:
    """The first attempt of a choice gets so far; a resubmission goes on to the end."""

    async def script(attempt: ScriptedAttempt) -> None:
        if attempt.num_generated:
            await replying(whole)(attempt)
        else:
            attempt.prefill_says(0, token_ids[:1])
            attempt.decode_says(0, token_ids)
            attempt.decode_fails(pb.PREEMPTED, token_ids=token_ids)

    return script


@pytest.mark.covers("A01", "A05", "R08")
@pytest.mark.parametrize("stream", [False, True])
def test_the_openai_client_reads_what_is_handed_up_and_can_send_it_again(model: Path, stream: bool) -> None:
    async def scenario(router: LiveRouter) -> None:
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{router.port}/v1", api_key="none") as client:
            asked: dict[str, Any] = {"model": MODEL_NAME, "messages": HI, "max_tokens": 9}
            text, last = "", None
            if stream:
                async for chunk in await client.chat.completions.create(**asked, stream=True):
                    last = chunk.choices[0]
                    text += last.delta.content or ""
            else:
                last = (await client.chat.completions.create(**asked)).choices[0]
                text = last.message.content or ""
            assert last is not None and last.model_extra is not None
            assert (text, str(last.finish_reason)) == ("a", "pd_reschedule")
            ids, seed = last.model_extra["completion_token_ids"], last.model_extra["seed"]
            again = await client.chat.completions.create(**asked, seed=seed, extra_body={"generated_token_ids": ids})
            assert (again.choices[0].message.content, again.choices[0].finish_reason) == ("€b", "length")
            assert again.usage is not None and again.usage.completion_tokens == 2
            completed = await client.completions.create(model=MODEL_NAME, prompt="x", max_tokens=9)
            assert (completed.choices[0].text, str(completed.choices[0].finish_reason)) == ("a", "pd_reschedule")

    whole = "a€b".encode()
    play(model, scenario, preempted_after(whole[:3], whole), core_config=NO_RETRY)


@pytest.mark.covers("A06", "R08")
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_of_which_some_choices_are_handed_up_has_status_200_and_a_done(model: Path, stream: bool) -> None:
    async def script(attempt: ScriptedAttempt) -> None:
        attempt.prefill_says(0, b"o")
        attempt.decode_says(0, b"ok", pb.FINISH_LENGTH if attempt.key.choice != 1 else pb.FINISH_UNSPECIFIED)
        if attempt.key.choice == 1:
            attempt.decode_fails(pb.PREEMPTED)

    async def scenario(router: LiveRouter) -> None:
        answer = await router.post(n=3, max_tokens=9, stream=stream, **(USAGE if stream else {}))
        assert answer.status_code == 200
        whole = joined(answer.text) if stream else answer.json()
        reasons = [choice["finish_reason"] for choice in whole["choices"]]
        assert reasons == ["length", "pd_reschedule", "length"]
        assert [choice.get("completion_token_ids") for choice in whole["choices"]] == [None, [*b"ok"], None]
        assert whole["usage"]["completion_tokens"] == 6
        assert not stream or events(answer.text)[-1] == "[DONE]"
        metrics = router.shell.metrics.render().decode()
        assert 'choices_total{finish_reason="pd_reschedule"} 1.0' in metrics
        assert 'requests_total{outcome="mixed"} 1.0' in metrics

    play(model, scenario, script, core_config=NO_RETRY)


@pytest.mark.covers("A06", "A12", "R08")
@pytest.mark.parametrize("stream", [False, True])
def test_where_nothing_was_generated_there_is_nothing_to_hand_up_but_a_time_to_come_back(
    model: Path, stream: bool
) -> None:
    async def script(attempt: ScriptedAttempt) -> None:
        attempt.prefill_fails(pb.CHECKSUM)

    async def scenario(router: LiveRouter) -> None:
        answer = await router.post(stream=stream)
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        assert answer.json()["error"]["code"] == "CHECKSUM"

    play(model, scenario, script, core_config=NO_RETRY)
