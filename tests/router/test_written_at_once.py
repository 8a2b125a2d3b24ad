"""Tokens that go out where they arrive, without a turn of the handler's task, and in which order."""

from __future__ import annotations

import asyncio
import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from starlette.types import Message

from router.answer import Asked, Delivery
from router.core import RouterCore
from router.shell import RouterShell
from router.streaming import GenerationResponse
from runtime.http_protocol import DIRECT, DirectWay
from runtime.session import Peer, SessionTiming
from tests.router.live_router import live_router, until
from tests.router.test_answers import ARRIVAL, asked, writer
from tests.router.tiny_model import write_model_text


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_text(tmp_path_factory.mktemp("model"))


class _NoShell:
    """Nothing is asked of any node: the tokens are there."""

    def submit(self, answer: object) -> None: ...

    def abort(self, answer: object) -> None: ...

    def note_written(self, *written: object) -> None: ...


class _Way:
    """A connection that takes what is written at once while it is told to."""

    def __init__(self) -> None:
        self.takes_more, self.written = True, list[bytes]()

    def write(self, part: bytes) -> None:
        self.written.append(part)

    def when_lost(self, call: object) -> None: ...


async def _never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.covers("A08")
def test_a_usual_token_is_written_where_it_arrives_and_none_before_one_that_waits(model: Path) -> None:
    async def scenario() -> None:
        each = asked(model, asyncio.get_running_loop().time() + 60)
        delivery, way, told = Delivery([each], ARRIVAL), _Way(), list[bytes]()
        choice = delivery.answers[0].choices[0]

        async def send(message: Message) -> None:
            told.append(message.get("body", b""))

        def put(text: bytes) -> None:
            way.written = told  # one order of both ways
            choice.put(text, (), 0.0)

        shell = cast(RouterShell, _NoShell())
        response = GenerationResponse(shell, delivery, writer(model, each), is_stream=True, headers={})
        answer = asyncio.create_task(response({"extensions": {DIRECT: way}}, _never, send))
        for text in (b"a", b"b"):
            await asyncio.sleep(0.01)
            put(text)
        await asyncio.sleep(0.01)
        before = len(told)
        put(b"c")
        assert len(told) == before + 1 and b'"text":"c"' in told[-1], "without a turn"
        way.takes_more = False
        put(b"d")
        way.takes_more = True
        put(b"e")
        assert len(told) == before + 1, "the one before it waits for the handler"
        await asyncio.sleep(0.01)
        put("€".encode()[:2])  # nothing that can be shown
        put("€".encode()[2:])
        await asyncio.sleep(0.01)
        put(b"f")
        choice.finish("length", ())
        await answer
        events = [part for part in b"".join(told).decode().split("\n\n") if part.startswith("data: {")]
        assert "".join(json.loads(part[6:])["choices"][0]["text"] for part in events) == "abcde€f"

    asyncio.run(scenario())


@pytest.mark.covers("A08")
@pytest.mark.parametrize("num_tokens", [0, 1, 2])
def test_a_choice_that_ends_with_few_tokens_takes_the_short_way_from_no_other(model: Path, num_tokens: int) -> None:
    async def scenario() -> None:
        one = asked(model, asyncio.get_running_loop().time() + 60)
        texts = [*one.texts, *asked(model).texts]
        each = Asked(replace(one.request, num_choices=2), texts, None)
        delivery, way, told = Delivery([each], ARRIVAL), _Way(), list[bytes]()
        long, short = delivery.answers[0].choices

        async def send(message: Message) -> None:
            told.append(message.get("body", b""))

        shell = cast(RouterShell, _NoShell())
        response = GenerationResponse(shell, delivery, writer(model, each), is_stream=True, headers={})
        answer = asyncio.create_task(response({"extensions": {DIRECT: way}}, _never, send))
        await asyncio.sleep(0.01)
        for choice, number in ((short, num_tokens), (long, 2)):
            for _ in range(number):
                choice.put(b"a", (), 0.0)
                await asyncio.sleep(0.01)
        short.finish("length", ())
        await asyncio.sleep(0.01)
        before = len(told)
        for text in (b"b", b"c"):
            long.put(text, (), 0.0)
            await asyncio.sleep(0.01)
        assert len(way.written) == 2 and len(told) == before
        long.finish("length", ())
        await answer

    asyncio.run(scenario())


def test_a_bug_in_writing_is_its_answers_and_not_that_of_who_brought_the_token(model: Path) -> None:
    async def scenario() -> None:
        each = asked(model, asyncio.get_running_loop().time() + 60)
        delivery, way = Delivery([each], ARRIVAL), _Way()
        choice = delivery.answers[0].choices[0]

        def broken(part: bytes) -> None:
            raise RuntimeError("scripted")

        async def send(message: Message) -> None: ...

        way.write = broken  # type: ignore[method-assign]
        shell = cast(RouterShell, _NoShell())
        response = GenerationResponse(shell, delivery, writer(model, each), is_stream=True, headers={})
        answer = asyncio.create_task(response({"extensions": {DIRECT: way}}, _never, send))
        for text in (b"a", b"b", b"c"):
            await asyncio.sleep(0.01)
            choice.put(text, (), 0.0)
        with pytest.raises(RuntimeError, match="scripted"):
            await answer

    asyncio.run(scenario())


class SilentCore:
    """Takes events and does nothing."""

    def __init__(self) -> None:
        self.received = list[object]()

    def receive(self, event: object, now: float) -> list[object]:
        self.received.append(event)
        return []

    def tick(self, now: float) -> list[object]:
        return []

    def next_deadline(self) -> None: ...

    def snapshot(self) -> dict[str, object]:
        return {}


def test_what_one_message_brings_goes_out_before_the_next_is_taken() -> None:
    async def scenario() -> None:
        core = SilentCore()
        shell = RouterShell(cast(RouterCore, core), Peer("router", 1), SessionTiming())
        for name in ("a", "b", "c", "d"):
            shell.on_broken(Peer(name, 1))
        for number in (1, 2):
            await asyncio.sleep(0)
            assert len(core.received) == number, "one in each turn of the loop"
        await shell.close()
        assert len(core.received) == 4

    asyncio.run(scenario())


def test_an_answer_that_has_ended_leaves_nothing_to_the_collector(model: Path) -> None:
    def is_left() -> bool:
        return any(
            type(each) in (Delivery, DirectWay) for each in gc.get_objects()
        )  # isinstance asks some objects more

    async def scenario() -> None:
        async with live_router(model) as router:
            gc.collect()
            gc.disable()
            try:
                for is_stream in (True, False):
                    answer = await router.post(stream=is_stream, max_tokens=5)
                    assert answer.status_code == 200
                await until(lambda: not is_left())
            finally:
                gc.enable()

    asyncio.run(scenario())
