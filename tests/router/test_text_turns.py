"""Large texts take turns: so many bytes at once, in order, none lost by whoever gives up; and which are too long is told before."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from router import text as text_of_model
from router.json_reading import LARGE
from router.text_turns import AT_ONCE, LONG, TextTurns
from router.token_bounds import characters_of_longest_token
from tests.router.live_router import live_router
from tests.router.tiny_model import byte_level_tokenizer, write_model_text


class Gauge:
    """How many bytes are worked on at once, of texts that are long and of those that are not."""

    def __init__(self) -> None:
        self.now = {True: 0, False: 0}
        self.most = {True: 0, False: 0}
        self._lock = threading.Lock()

    def work(self, size: int, seconds: float) -> int:
        is_long = size >= LONG
        with self._lock:
            self.now[is_long] += size
            self.most[is_long] = max(self.most[is_long], self.now[is_long])
        threading.Event().wait(seconds)
        with self._lock:
            self.now[is_long] -= size
        return size


@pytest.mark.covers("A13")
def test_no_more_bytes_are_worked_on_at_once_than_may_be_whoever_gives_up(fresh_seed: int) -> None:
    draw, gauge, turns = random.Random(fresh_seed), Gauge(), TextTurns()

    async def run() -> None:
        sizes = [draw.choice([draw.randrange(1, LONG), draw.randrange(LONG, 2 * AT_ONCE)]) for _ in range(150)]
        tasks = [asyncio.create_task(turns.call(size, partial(gauge.work, size, 0.002))) for size in sizes]
        for task in draw.sample(tasks, 50):
            await asyncio.sleep(0.001)
            task.cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(
            each == size or isinstance(each, asyncio.CancelledError) for each, size in zip(answers, sizes, strict=True)
        )
        assert sum(each == size for each, size in zip(answers, sizes, strict=True)) >= 100
        while any(gauge.now.values()):  # threads of who has given up  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert await turns.call(AT_ONCE, lambda: "all of it") == "all of it"

    asyncio.run(run())
    assert gauge.most[False] <= AT_ONCE and gauge.most[True] <= 2 * AT_ONCE, "one text alone may be larger"


def test_what_is_refused_leaves_nothing_of_its_text_that_only_a_walk_would_find() -> None:
    """Walks over all objects are seldom (runtime/collecting.py), and a client may send what is refused as often as it likes."""

    class Body:
        pass

    def refuse(body: Body) -> None:
        raise ValueError("no")

    async def run() -> list[weakref.ref[Body]]:
        turns, bodies = TextTurns(), list[weakref.ref[Body]]()
        for _ in range(5):
            body = Body()
            bodies.append(weakref.ref(body))
            with pytest.raises(ValueError, match="no"):
                await turns.call(LARGE, partial(refuse, body))
            del body
        while turns._num_working:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        return bodies

    gc.disable()
    try:
        assert not any(body() for body in asyncio.run(run()))
    finally:
        gc.enable()


@pytest.mark.covers("P04")
def test_a_small_text_waits_for_none_that_may_sleep_in_its_thread() -> None:
    turns, may_end = TextTurns(), threading.Event()

    async def run() -> None:
        parsed = [asyncio.create_task(turns.call(LARGE, lambda: may_end.wait(20))) for _ in range(200)]
        await asyncio.sleep(0)  # all of them have asked
        async with asyncio.timeout(10):
            assert await turns.call(LARGE - 1, lambda: "small") == "small"
        may_end.set()
        assert all(await asyncio.gather(*parsed))

    asyncio.run(run())


@pytest.mark.covers("P04")
def test_a_short_text_waits_for_no_long_ones() -> None:
    turns, may_end = TextTurns(), threading.Event()

    async def run() -> None:
        long = [asyncio.create_task(turns.call(AT_ONCE, lambda: may_end.wait(20))) for _ in range(20)]
        await asyncio.sleep(0)  # all of them have asked
        async with asyncio.timeout(10):
            assert await turns.call(LONG - 1, lambda: "short") == "short"
        may_end.set()
        assert all(await asyncio.gather(*long))

    asyncio.run(run())


def test_a_turn_outlives_the_loop_that_asked_for_it() -> None:
    turns, may_end, begun = TextTurns(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        may_end.wait(20)

    async def leave() -> None:
        task = asyncio.create_task(turns.call(AT_ONCE, work))
        while not begun.is_set():  # noqa: ASYNC110 - a thread's
            await asyncio.sleep(0.001)
        task.cancel()

    asyncio.run(leave())
    may_end.set()

    async def come() -> str:
        async with asyncio.timeout(10):
            return await turns.call(LONG, lambda: "there is room")

    ends_at = time.monotonic() + 10
    while turns._long._taken:
        assert time.monotonic() < ends_at, "its thread has ended long ago"
        time.sleep(0.001)
    assert asyncio.run(come()) == "there is room"


# ---------------------------------------------------------------- what is told before


def sentence_piece(fallback: bool = True) -> Tokenizer:
    """As Llama 2's: spaces are a character, what the vocabulary lacks is spelled in bytes."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for token in ("▁", "a", "b", "ab", "▁ab", "abab", "é"):
        vocabulary[token] = len(vocabulary)
    merges = [("a", "b"), ("▁", "ab"), ("ab", "ab")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=fallback, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def composing() -> Tokenizer:
    tokenizer = byte_level_tokenizer()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


@pytest.mark.parametrize("make", [byte_level_tokenizer, sentence_piece, composing])
def test_no_text_has_fewer_tokens_than_its_length_says(make: Callable[[], Tokenizer], fresh_seed: int) -> None:
    tokenizer, draw = make(), random.Random(fresh_seed)
    longest = characters_of_longest_token(tokenizer)
    assert longest is not None and longest < 40
    for _ in range(300):
        text = "".join(
            draw.choices(["th", "a", "b", "ab", " ", "\n", "é", "😀", "ᾂ", "각", "<s>", "\u0301", "x"], k=30)
        )
        num_tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
        assert len(text) <= longest * num_tokens, text


def without_spaces(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), tokenizer.pre_tokenizer])
    return tokenizer


def stripped(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.normalizer = normalizers.Strip()
    return tokenizer


def greedy(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken("<eats spaces>", lstrip=True)])
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [
        sentence_piece(fallback=False),
        without_spaces(byte_level_tokenizer()),
        stripped(byte_level_tokenizer()),
        greedy(byte_level_tokenizer()),
        Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?")),
    ],
    ids=["unknown", "whitespace", "strip", "added", "words"],
)
def test_nothing_is_said_of_a_tokenizer_that_may_lose_characters(tokenizer: Tokenizer) -> None:
    assert characters_of_longest_token(tokenizer) is None


@pytest.mark.covers("A11")
@pytest.mark.parametrize(("path", "field"), [("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")])
def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(
    path: str, field: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "th " * 300_000
    body, shorter = (
        {"prompt": each} if field == "prompt" else {"messages": [{"role": "user", "content": each}]}
        for each in (text, "hi")
    )
    tokenized: list[int] = []

    class Noting:
        def __init__(self, tokenizer: Tokenizer) -> None:
            self._tokenizer = tokenizer

        def __getattr__(self, name: str) -> Any:
            return getattr(self._tokenizer, name)

        def encode_batch_fast(self, texts: list[str], **more: Any) -> Any:
            tokenized.append(sum(map(len, texts)))
            return self._tokenizer.encode_batch_fast(texts, **more)

    read = text_of_model._read_tokenizer
    monkeypatch.setattr(text_of_model, "_read_tokenizer", lambda path: Noting(read(path)))

    async def run() -> None:
        async with live_router(write_model_text(tmp_path_factory.mktemp("model"))) as router:
            refused = await router.post(path, **body)
            assert refused.status_code == 400, refused.text
            error = refused.json()["error"]
            assert (error["code"], error["param"]) == ("context_length_exceeded", field)
            assert "characters are more than the" in error["message"] and not tokenized
            assert (await router.post(path, **(body | shorter))).status_code == 200 and len(tokenized) == 1

    asyncio.run(run())


@pytest.mark.covers("A13")
def test_while_texts_are_worked_on_threads_give_way_to_the_loop_ten_times_as_soon() -> None:
    usual_s, turns, is_over = sys.getswitchinterval(), TextTurns(), threading.Event()

    def fails() -> float:
        is_over.wait(20)
        raise ValueError

    async def run() -> None:
        first = asyncio.create_task(turns.call(1, fails))
        within = [await turns.call(1, sys.getswitchinterval) for _ in range(3)]
        assert within == [pytest.approx(usual_s / 10)] * 3
        is_over.set()
        with pytest.raises(ValueError):
            await first
        await asyncio.sleep(0)  # behind the answer the turn ends
        assert sys.getswitchinterval() == usual_s

    asyncio.run(run())
