"""One answer on its way out: what has no text, what a slow reader gets, and what is left when the way breaks."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from starlette.types import Message

from router.answer import Answer, Arrival, Piece
from router.events import Finished, GenerationRequest
from router.openai_answers import AnswerOptions, AnswerWriter, CompletionForm
from router.streaming import GenerationResponse
from router.text import ModelText
from tests.router.live_router import live_router, until
from tests.router.scripted_nodes import ScriptedAttempt
from tests.router.tiny_model import write_model_text

ARRIVAL = Arrival(0.0, None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_text(tmp_path_factory.mktemp("model"))


def request(deadline: float = 60.0, *, stop: str = "!") -> GenerationRequest:
    return GenerationRequest("id", (1, 2), 5, 0.0, 20, tuple(map(ord, stop)), deadline)


def writer(model: Path, generation: GenerationRequest) -> AnswerWriter:
    return AnswerWriter(generation, CompletionForm(), AnswerOptions("tiny", False, False, False), ModelText(model))


@pytest.mark.parametrize(("stop", "text"), [("!", "ok"), ("", "ok!")])
def test_a_stop_token_is_no_text_even_if_it_is_an_ordinary_token(model: Path, stop: str, text: str) -> None:
    answer = writer(model, request(stop=stop))
    answer.collect([*b"ok!"])
    whole = answer.whole("stop")
    assert whole["choices"][0]["text"] == text
    assert whole["usage"]["completion_tokens"] == 3


def test_the_first_chunk_comes_with_the_first_token_even_if_its_character_is_incomplete(model: Path) -> None:
    answer = writer(model, request())
    euro = "€".encode()
    first = json.loads(answer.chunk([euro[0]]).removeprefix(b"data: "))
    assert first["choices"][0]["text"] == ""
    assert answer.chunk([euro[1]]) == b""
    assert "€" in answer.chunk([euro[2]]).decode()


def test_tokens_that_arrive_while_the_reader_is_busy_come_as_one_piece() -> None:
    async def scenario() -> None:
        answer = Answer(request(), ARRIVAL)
        reader = asyncio.create_task(answer.take())
        await asyncio.sleep(0)
        answer.put((1, 2), 0.0)
        answer.put((3,), 0.0)
        assert await reader == Piece([1, 2, 3], None)
        answer.put((4,), 0.0)
        answer.finish(end := Finished("id", "stop", (1, 2, 3, 4)))
        assert await answer.take() == Piece([4], end)

    asyncio.run(scenario())


@pytest.mark.covers("A10")
def test_when_the_way_to_the_client_breaks_the_request_is_aborted(model: Path) -> None:
    async def script(attempt: ScriptedAttempt) -> None:
        attempt.prefill_says(0, b"a")

    async def never() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def broken(message: Message) -> None:
        raise ConnectionError("scripted")

    async def scenario() -> None:
        async with live_router(model, script) as router:
            generation = request(asyncio.get_running_loop().time() + 30)
            response = GenerationResponse(
                router.shell, generation, ARRIVAL, writer(model, generation), is_stream=True, headers={}
            )
            with pytest.raises(ConnectionError):
                await response({"type": "http"}, never, broken)
            await until(lambda: not router.shell.snapshot()["requests"])
            await until(lambda: bool(router.pair.prefill.cancels and router.pair.decode.cancels))

    asyncio.run(scenario())
