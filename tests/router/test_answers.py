"""One answer on its way out: what has no text, what a slow reader gets, and what is left when the way breaks."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from starlette.types import Message

from proto import baton_pb2 as pb
from router.answer import Arrival, Asked, Delivery, Echo, Piece
from router.choice_text import TextRules
from router.events import RESCHEDULED, GenerationRequest, Sampling
from router.openai_answers import AnswerForm, AnswerOptions, AnswerWriter, ChatForm, CompletionForm
from router.shell import RouterShell
from router.stop_strings import Stops
from router.streaming import GenerationResponse
from router.text import ModelText
from router.tool_calls import ToolUse
from router.tool_syntax import HERMES
from tests.router.live_router import live_router, until
from tests.router.scripted_nodes import ScriptedAttempt, scores
from tests.router.tiny_model import write_model_text

ARRIVAL = Arrival(0.0, None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_text(tmp_path_factory.mktemp("model"))


def asked(
    model: Path, deadline: float = 60.0, *, stop: str = "!", stop_strings: tuple[str, ...] = (), scores: bool = False
) -> Asked:
    sampling = Sampling(
        0.0, 20, tuple(map(ord, stop)), num_logprobs=0 if scores else None, wants_prompt_logprobs=scores
    )
    request = GenerationRequest("id", (1, 2), 5, sampling, deadline)
    return Asked(request, [ModelText(model).choice_text(TextRules(sampling.stop_token_ids, Stops(stop_strings)))])


def writer(model: Path, each: Asked) -> AnswerWriter:
    options = AnswerOptions("tiny", includes_usage=False, returns_token_ids=False, num_logprobs=None)
    return AnswerWriter([each], CompletionForm(), options, ModelText(model).spelling)


@pytest.mark.parametrize(("stop", "text"), [("!", "ok"), ("", "ok!")])
def test_a_stop_token_is_no_text_even_if_it_is_an_ordinary_token(model: Path, stop: str, text: str) -> None:
    async def scenario() -> None:
        each = asked(model, stop=stop)
        delivery, answer = Delivery([each], ARRIVAL), writer(model, each)
        delivery.answers[0].choices[0].put(tuple(b"ok!"), (), 0.0)
        delivery.answers[0].choices[0].finish("stop", ())
        for index, piece in await delivery.take():
            answer.collect(index, piece)
        whole = json.loads(b"".join(answer.whole()))
        assert whole["choices"][0]["text"] == text
        assert whole["usage"]["completion_tokens"] == 3

    asyncio.run(scenario())


def test_the_first_chunk_comes_with_the_first_token_even_if_its_character_is_incomplete(model: Path) -> None:
    async def scenario() -> None:
        each = asked(model)
        delivery, answer = Delivery([each], ARRIVAL), writer(model, each)
        chunks = []
        for byte in "€".encode():
            delivery.answers[0].choices[0].put((byte,), (), 0.0)
            chunks += [b"".join(answer.chunk(index, piece)) for index, piece in await delivery.take()]
        first = json.loads(chunks[0].removeprefix(b"data: "))
        assert first["choices"][0]["text"] == ""
        assert chunks[1] == b""
        assert "€" in chunks[2].decode()

    asyncio.run(scenario())


@pytest.mark.covers("A09")
def test_tokens_that_arrive_while_the_reader_is_busy_come_as_one_piece_and_none_behind_a_stop_string(
    model: Path,
) -> None:
    async def scenario() -> None:
        delivery = Delivery([asked(model, stop_strings=("END",))], ARRIVAL)
        choice = delivery.answers[0].choices[0]
        reader = asyncio.create_task(delivery.take())
        await asyncio.sleep(0)
        assert choice.put(tuple(b"ab"), (), 0.0) is None
        assert choice.put(tuple(b"cE"), (), 0.0) is None
        assert await reader == [(0, Piece("abc", [*b"abcE"], [0, 1, 2, 3]))]
        assert choice.put(tuple(b"NDxyz"), (), 0.0) == 6
        assert choice.put(tuple(b"more"), (), 0.0) is None
        choice.finish("length", ())
        assert await delivery.take() == [(0, Piece("", [*b"ND"], [4, 5], finish_reason="stop"))]
        assert delivery.is_complete
        assert choice.num_tokens == 6

    asyncio.run(scenario())


@pytest.mark.covers("A05", "A09")
def test_behind_given_tokens_a_stop_string_counts_those_too_for_the_branch_and_not_for_the_answer(model: Path) -> None:
    each = asked(model)
    text = ModelText(model).choice_text(TextRules((), Stops(("END",))), b"abE")
    choice = Delivery([Asked(each.request, [text])], ARRIVAL).answers[0].choices[0]
    assert choice.put(b"NDx", (), 0.0) == 5
    assert choice.num_tokens == 2
    assert choice.take().text == ""


@pytest.mark.covers("A02", "R08")
def test_who_asked_for_no_token_needs_nobody_to_go_on(model: Path) -> None:
    choice = Delivery([replace(asked(model), drops_tokens=True)], ARRIVAL).answers[0].choices[0]
    choice.finish(RESCHEDULED, ())
    assert choice.take() == Piece(finish_reason="length")


@pytest.mark.covers("O01")
def test_the_time_per_token_is_that_between_tokens_and_none_before_there_are_two(model: Path) -> None:
    choice = Delivery([asked(model)], ARRIVAL).answers[0].choices[0]
    assert choice.seconds_per_token is None
    choice.put(b"a", (), 10.0)
    assert choice.seconds_per_token is None
    choice.put(b"bc", (), 10.5)
    choice.put(b"d", (), 11.5)
    assert choice.seconds_per_token == 0.5


@pytest.mark.covers("A02", "A09")
def test_a_choice_is_not_over_before_its_prompts_logprobs_are_there(model: Path) -> None:
    async def scenario() -> None:
        delivery = Delivery([asked(model, stop_strings=("b",), scores=True), asked(model)], ARRIVAL)
        first, second = (answer.choices[0] for answer in delivery.answers)
        scored = [pb.TokenLogprobs(logprob=-1)]
        assert first.put(b"ab", scored * 2, 0.0) == 2
        second.finish("length", ())
        assert await delivery.take() == [(1, Piece(finish_reason="length"))]
        assert not delivery.is_complete
        assert not delivery.answers[0].is_complete
        first.put_prompt_logprobs(scored)
        expected = Piece("a", [*b"ab"], [0, 1], scored * 2, scored, "stop")
        assert await delivery.take() == [(0, expected)]
        assert delivery.is_complete

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
            each = asked(model, asyncio.get_running_loop().time() + 30)
            delivery = Delivery([each], ARRIVAL)
            response = GenerationResponse(router.shell, delivery, writer(model, each), is_stream=True, headers={})
            with pytest.raises(ConnectionError):
                await response({"type": "http"}, never, broken)
            await until(lambda: not router.shell.snapshot()["requests"])
            await until(lambda: bool(router.pair.prefill.cancels and router.pair.decode.cancels))

    asyncio.run(scenario())


@pytest.mark.covers("A03", "A06")
def test_the_others_are_cancelled_before_a_slow_client_takes_the_error(model: Path) -> None:
    sent: list[Message] = []

    async def script(attempt: ScriptedAttempt) -> None:
        attempt.prefill_says(0, b"a")
        if attempt.dispatch.request_id == "1":
            await until(lambda: len(sent) >= 2)
            attempt.prefill_fails(pb.INTERNAL, retryable=False)

    async def never() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def scenario() -> None:
        async with live_router(model, script) as router:

            async def send(message: Message) -> None:
                sent.append(message)
                if b"error" in message.get("body", b""):
                    await until(lambda: not router.shell.snapshot()["requests"])  # this client takes nothing meanwhile

            first = asked(model, asyncio.get_running_loop().time() + 30)
            both = [replace(first, request=replace(first.request, request_id=name)) for name in "01"]
            both = [replace(each, texts=[ModelText(model).choice_text(TextRules(()))]) for each in both]
            options = AnswerOptions("tiny", includes_usage=False, returns_token_ids=False, num_logprobs=None)
            answer = AnswerWriter(both, CompletionForm(), options, ModelText(model).spelling)
            delivery = Delivery(both, ARRIVAL)
            await GenerationResponse(router.shell, delivery, answer, is_stream=True, headers={})({}, never, send)
            assert b"INTERNAL" in sent[-1]["body"]

    asyncio.run(scenario())


class _NoShell:
    """Nothing is asked of any node: the tokens are there."""

    def submit(self, answer: object) -> None: ...

    def abort(self, answer: object) -> None: ...

    def note_written(self, *written: object) -> None: ...


class _NotingShell(_NoShell):
    """Keeps what it is told of tokens that were written."""

    def __init__(self) -> None:
        self.written: list[object] = []

    def note_written(self, *written: object) -> None:
        self.written.append(written)


def test_the_first_two_tokens_of_a_choice_are_noted_however_short_the_way_of_the_second(model: Path) -> None:
    async def scenario() -> None:
        each = asked(model, asyncio.get_running_loop().time() + 60)
        delivery, shell = Delivery([each], ARRIVAL), _NotingShell()
        choice, sent = delivery.answers[0].choices[0], list[Message]()

        async def never() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Message) -> None:
            """Each token comes once the client has the one before it."""
            sent.append(message)
            if len(sent) in (2, 3, 4):
                choice.put(b"a", (), 0.0)
            elif len(sent) == 5:
                choice.finish("length", ())

        choice.put(b"a", (), 0.0)
        response = GenerationResponse(
            cast(RouterShell, shell), delivery, writer(model, each), is_stream=True, headers={}
        )
        await response({}, never, send)
        assert shell.written == [("id", 0, 1), ("id", 0, 2)]
        assert b"".join(message["body"] for message in sent[1:]).count(b'"text":"a"') == 4

    asyncio.run(scenario())


def test_a_whole_answer_asks_whether_it_is_complete_only_where_a_choice_has_ended(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks at every choice of every prompt for that."""
    looks = list[bool]()
    is_complete = vars(Delivery)["is_complete"].fget

    def looked(delivery: Delivery) -> bool:
        looks.append(is_complete(delivery))
        return looks[-1]

    monkeypatch.setattr(Delivery, "is_complete", property(looked))

    async def scenario() -> None:
        each = asked(model, asyncio.get_running_loop().time() + 60)
        delivery, sent = Delivery([each], ARRIVAL), list[Message]()
        choice = delivery.answers[0].choices[0]

        async def never() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Message) -> None:
            sent.append(message)

        response = GenerationResponse(
            cast(RouterShell, _NoShell()), delivery, writer(model, each), is_stream=False, headers={}
        )
        answer = asyncio.create_task(response({}, never, send))
        for _ in range(9):
            await asyncio.sleep(0)
            choice.put(b"a", (), 0.0)
        await asyncio.sleep(0.01)
        choice.finish("length", ())
        await answer
        assert looks == [True]
        assert json.loads(sent[-1]["body"])["choices"][0]["text"] == "a" * 9

    asyncio.run(scenario())


async def _delays(seconds: list[float]) -> None:
    """What the loop computes before others have their turn, again and again; other processes' time does not count."""
    while True:
        start = time.thread_time()
        await asyncio.sleep(0.001)
        seconds.append(time.thread_time() - start)


async def _written(model: Path, form: AnswerForm, num_choices: int, num_tokens: int, is_stream: bool) -> bytes:
    """The body of an answer with 20 logprobs per token and, of a stream, per prompt token; others never wait for it."""
    top = scores(2, 20)
    sampling = Sampling(0.0, num_tokens, (), num_logprobs=20, wants_prompt_logprobs=is_stream)
    request = GenerationRequest("id", (1,) * num_tokens, 5, sampling, asyncio.get_running_loop().time() + 60)
    text = ModelText(model)
    texts = [text.choice_text(TextRules(())) for _ in range(num_choices)]
    echo = Echo("x" * num_tokens, range(num_tokens)) if is_stream else None
    each = Asked(replace(request, num_choices=num_choices), texts, echo)
    delivery = Delivery([each], ARRIVAL)
    for choice in delivery.answers[0].choices:
        choice.put(b"a" * num_tokens, [top] * num_tokens, 0.0)
        if is_stream:
            choice.put_prompt_logprobs([top] * (num_tokens - 1))
        choice.finish("length", ())
    answer = AnswerWriter([each], form, AnswerOptions("tiny", False, True, 20), text.spelling)
    shell, sent, delays = cast(RouterShell, _NoShell()), list[Message](), list[float]()

    async def never() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    gc.freeze()  # what other tests left in this process is not the router's, and looking through it can take a second
    try:
        probe = asyncio.create_task(_delays(delays))
        await GenerationResponse(shell, delivery, answer, is_stream=is_stream, headers={})({}, never, send)
        probe.cancel()
    finally:
        gc.unfreeze()
    assert len(delays) > 5 and max(delays) < 0.3
    assert [message.get("more_body") for message in sent[1:]] == [True] * (len(sent) - 2) + [False]
    body = b"".join(message["body"] for message in sent[1:])
    assert is_stream or dict(sent[0]["headers"])[b"content-length"] == str(len(body)).encode()
    return body


@pytest.mark.covers("A02", "A09")
def test_writing_many_logprobs_keeps_nobody_else_waiting(model: Path) -> None:
    async def scenario() -> None:
        completions = json.loads(await _written(model, CompletionForm(), 6, 3000, is_stream=False))
        for choice in completions["choices"]:
            logprobs: dict[str, list[Any]] = choice["logprobs"]
            assert [len(values) for values in logprobs.values()] == [3000] * 4
            assert logprobs["text_offset"] == [*range(3000)]
        chat = json.loads(await _written(model, ChatForm(), 4, 3000, is_stream=False))
        entries = [entry for choice in chat["choices"] for entry in choice["logprobs"]["content"]]
        assert len(entries) == 12000
        assert all(entry["token"] == "a" and len(entry["top_logprobs"]) == 20 for entry in entries)
        first, done, nothing = (await _written(model, CompletionForm(), 1, 8000, is_stream=True)).split(b"\n\n")
        assert (done, nothing) == (b"data: [DONE]", b"")
        (part,) = json.loads(first.removeprefix(b"data: "))["choices"]
        assert [len(values) for values in part["logprobs"].values()] == [16000] * 4
        assert part["logprobs"]["token_logprobs"][:2] == [None, -0.25]

    asyncio.run(scenario())


@pytest.mark.covers("A15")
def test_a_long_call_is_read_as_it_comes_so_that_its_whole_answer_is_written_at_once(model: Path) -> None:
    each = asked(model)
    with_tools = replace(each, tools=ToolUse(HERMES, frozenset({"now"}), is_parallel=True))
    options = AnswerOptions("tiny", includes_usage=False, returns_token_ids=False, num_logprobs=None)
    answer = AnswerWriter([with_tools], ChatForm(), options, ModelText(model).spelling)
    for text in ('<tool_call>{"name": "now", "arguments": {"a": [0', *[', "a", {}'] * 2000):
        answer.collect(0, Piece(text, [1]))
    num_calls = 0

    def count(*_: object) -> None:
        nonlocal num_calls
        num_calls += 1

    sys.setprofile(count)
    try:
        answer.collect(0, Piece("]}}</tool_call>", [1], finish_reason="stop"))
        whole = b"".join(answer.whole())
    finally:
        sys.setprofile(None)
    (choice,) = json.loads(whole)["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == json.dumps({"a": [0, *["a", {}] * 2000]})
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    assert num_calls < 30_000, "some calls for each piece, none for what is in it"
