"""Choices that are handed up with `pd_reschedule`, and their resubmission: shapes, and what needs no node any more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from router.answer import Arrival, Asked, Delivery
from router.choice_text import TextRules
from router.events import RESCHEDULED, GenerationRequest, Sampling
from router.json_parts import IDS_PER_SLICE
from router.openai_answers import AnswerForm, AnswerOptions, AnswerWriter, ChatForm, CompletionForm
from router.stop_strings import Stops
from router.text import ModelText
from tests.router.live_router import live_router
from tests.router.scripted_nodes import scores
from tests.router.test_api import events
from tests.router.test_gate import KEY, ask, count, guarded_router
from tests.router.tiny_model import EOS_ID, TURN_ID, write_model_text

EURO = "€".encode()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_text(tmp_path_factory.mktemp("model"))


class Handed:
    """An answer of two choices, written without nodes: the first finishes, the second is handed up."""

    def __init__(
        self,
        model: Path,
        form: AnswerForm,
        *,
        ids: bool = False,
        num_logprobs: int | None = None,
        num_prompt_tokens: int = 2,
    ) -> None:
        text = ModelText(model)
        sampling = Sampling(0.0, 20, (), num_logprobs=num_logprobs)
        request = GenerationRequest("id", tuple([1] * num_prompt_tokens), 5, sampling, 60.0, num_choices=2)
        asked = Asked(request, [text.choice_text(TextRules((), Stops(("STOP",)))) for _ in range(2)])
        self.num_logprobs = num_logprobs
        self.delivery = Delivery([asked], Arrival(0.0, None))
        self.writer = AnswerWriter([asked], form, AnswerOptions("tiny", True, ids, num_logprobs), text.spelling)

    def put(self, choice: int, token_ids: Sequence[int]) -> None:
        scored = [] if self.num_logprobs is None else [scores(each, self.num_logprobs) for each in token_ids]
        self.delivery.answers[0].choices[choice].put(token_ids, scored, 0.0)

    def finish(self, choice: int, reason: str, token_ids: Sequence[int]) -> None:
        self.delivery.answers[0].choices[choice].finish(reason, tuple(token_ids))

    async def chunks(self) -> list[dict[str, Any]]:
        """What a stream says now, one choice to each."""
        parts = [b"".join(self.writer.chunk(*news)) for news in await self.delivery.take()]
        return [chunk["choices"][0] for chunk in events(b"".join(parts).decode())]

    async def whole(self) -> dict[str, Any]:
        for index, piece in await self.delivery.take():
            self.writer.collect(index, piece)
        assert self.delivery.is_complete
        return cast("dict[str, Any]", json.loads(b"".join(self.writer.whole())))


@pytest.mark.covers("A06", "A07", "R08")
@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("form", [CompletionForm(), ChatForm()])
def test_a_choice_that_is_handed_up_has_all_its_tokens_and_its_seed_and_the_others_are_as_ever(
    model: Path, form: AnswerForm, ids: bool
) -> None:
    async def scenario() -> None:
        answer = Handed(model, form, ids=ids)
        answer.put(0, b"ok")
        answer.finish(0, "length", b"ok")
        answer.put(1, [*b"x", *EURO, *b"ST", EURO[0]])
        answer.finish(1, RESCHEDULED, [7, *b"x", *EURO, *b"ST", EURO[0]])  # 7 had been given by the client
        answer.finish(1, "length", [])
        content = await answer.whole()
        first, second = content["choices"]
        text = second["message"]["content"] if isinstance(form, ChatForm) else second["text"]
        assert text == "x€", "neither what may begin a stop string nor half a character"
        assert (first["finish_reason"], second["finish_reason"]) == ("length", "pd_reschedule")
        assert second["completion_token_ids"] == [7, *b"x", *EURO, *b"ST", EURO[0]]
        assert first.get("completion_token_ids") == ([*b"ok"] if ids else None)
        assert type(second["seed"]) is int and second["seed"] != first["seed"] == 5
        assert content["usage"].pop("prompt_tokens_details") == {"cached_tokens": 0}
        assert content["usage"] == {"prompt_tokens": 2, "completion_tokens": 9, "total_tokens": 11}

    asyncio.run(scenario())


@pytest.mark.covers("A06", "A08", "R08")
@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("form", [CompletionForm(), ChatForm()])
def test_in_a_stream_the_tokens_of_a_choice_that_is_handed_up_come_in_a_last_chunk_without_text(
    model: Path, form: AnswerForm, ids: bool
) -> None:
    def text_of(chunk: dict[str, Any]) -> str:
        return str(chunk["delta"]["content"] if isinstance(form, ChatForm) else chunk["text"])

    async def scenario() -> None:
        answer = Handed(model, form, ids=ids, num_logprobs=0)
        answer.put(1, b"ab")
        answer.finish(1, RESCHEDULED, b"ab")  # before the reader took anything
        *opening, first, last = await answer.chunks()
        if isinstance(form, ChatForm):
            assert [(each["index"], text_of(each)) for each in opening] == [(0, ""), (1, "")]
        assert (text_of(first), first["finish_reason"], text_of(last)) == ("ab", None, "")
        assert last["finish_reason"] == "pd_reschedule"
        assert (last["completion_token_ids"], last["seed"]) == (
            [*b"ab"],
            [*opening, first][1 if opening else 0]["seed"],
        )
        assert first.get("completion_token_ids") == ([*b"ab"] if ids else None)
        counts = [len(next(iter(chunk["logprobs"].values()))) for chunk in (first, last)]
        assert counts == [2, 0], "logprobs of each token once"
        answer.put(0, b"cS")
        (told,) = await answer.chunks()
        answer.finish(0, RESCHEDULED, b"cS")
        (only,) = await answer.chunks()
        assert (text_of(told), text_of(only), only["completion_token_ids"]) == ("c", "", [*b"cS"])
        assert answer.delivery.is_complete

    asyncio.run(scenario())


def test_the_chunks_that_open_choices_are_written_one_after_the_other_and_long_prompts_in_parts(model: Path) -> None:
    async def scenario() -> None:
        answer = Handed(model, ChatForm(), ids=True, num_prompt_tokens=3 * IDS_PER_SLICE)
        answer.put(1, b"ab")
        ((index, piece),) = await answer.delivery.take()
        parts = iter(answer.writer.chunk(index, piece))
        first = next(parts)
        assert len(first) < 3 * IDS_PER_SLICE, "the ids are yet to come"
        assert [each.is_first for each in answer.writer._choices] == [False, True], "and so is the other choice"
        chunks = [each["choices"][0] for each in events(b"".join([first, *parts]).decode())]
        assert [each["index"] for each in chunks] == [0, 1, 1]
        assert [len(each.get("prompt_token_ids", ())) for each in chunks] == [3 * IDS_PER_SLICE] * 2 + [0]
        assert chunks[2]["delta"]["content"] == "ab"

    asyncio.run(scenario())


@pytest.mark.covers("A05", "A07", "A08", "A09", "R08")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("given", "asked", "text", "reason"),
    [
        (b"ab", {"max_tokens": 2}, "", "length"),
        (b"a" + EURO[:2], {"max_tokens": 3}, "\ufffd", "length"),
        (b"abST", {"max_tokens": 4, "stop": "STOP"}, "ST", "length"),
        ([*b"ab", TURN_ID], {}, "", "stop"),
        ([*b"abS", TURN_ID], {"stop": "STOP"}, "S", "stop"),
        ([*b"ab", ord("!")], {"stop_token_ids": [ord("!")]}, "", "stop"),
        ([*b"ab", TURN_ID], {"ignore_eos": True, "max_tokens": 3}, "", "length"),
        (b"xSTOP", {"stop": "STOP"}, "", "stop"),
        (b"xSTOPyz", {"stop": "STOP"}, "", "stop"),
        ([*b"ab", EOS_ID], {"min_tokens": 2}, "", "stop"),
        # Where a grammar lets nothing follow the end comes whatever min_tokens says.
        ([*b"ab", EOS_ID], {"min_tokens": 8, "structured_outputs": {"regex": "ab"}}, "", "stop"),
    ],
)
def test_a_resubmission_that_is_complete_is_answered_at_once_and_no_node_hears_of_it(
    model: Path, given: Sequence[int], asked: dict[str, Any], text: str, reason: str, stream: bool
) -> None:
    async def scenario() -> None:
        async with live_router(model) as router:
            options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            body = asked | options | {"generated_token_ids": list(given), "seed": 9, "logprobs": 1}
            answer = await router.post(**body, return_token_ids=True)
            assert answer.status_code == 200, answer.text
            chunks = events(answer.text) if stream else [answer.json()]
            choice = chunks[0]["choices"][0]
            assert (choice["text"], choice["finish_reason"], choice["seed"]) == (text, reason, 9)
            assert choice["completion_token_ids"] == choice["logprobs"]["tokens"] == []
            usage = chunks[-2 if stream else 0]["usage"]
            assert usage.pop("prompt_tokens_details") == {"cached_tokens": 0}
            assert usage == {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}
            assert not stream or (len(chunks), chunks[-1]) == (3, "[DONE]")
            assert not router.pair.prefill.dispatches
            metrics = router.shell.metrics.render().decode()
            assert f'baton_router_requests_total{{outcome="{reason}"}} 1.0' in metrics

    asyncio.run(scenario())


@pytest.mark.covers("X02")
def test_what_a_resubmission_brings_counts_as_tokens_of_its_key(model: Path) -> None:
    """Nodes compute it again; else a prompt could be had for nothing under that name."""

    async def run() -> None:
        async with guarded_router(model, f"{KEY} name=alice tokens_per_minute=8\n") as (router, _):
            asked = {"generated_token_ids": list(b"hell")}
            assert (await ask(router, KEY, **asked)).status_code == 200  # 3 tokens and these 4, and 1 more
            assert count(router, "client_tokens", client="alice", kind="prompt") == 7
            assert (await ask(router, KEY, **asked)).status_code == 429

    asyncio.run(run())


@pytest.mark.parametrize(("is_scored", "num_given"), [(False, 8), (True, 14)])
def test_a_prompt_that_is_scored_is_computed_for_each_choice(is_scored: bool, num_given: int) -> None:
    sampling = Sampling(0.0, 9, (), num_logprobs=0, wants_prompt_logprobs=is_scored)
    request = GenerationRequest("r", (1, 2, 3, 4, 5, 6), 1, sampling, 0.0, num_choices=2, generated_token_ids=(7, 8))
    assert request.num_given == num_given
