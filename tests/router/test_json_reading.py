"""Of JSON so much is read at once that the loop can wait for it; what is within texts counts nothing."""

from __future__ import annotations

import json
import threading
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from router.json_reading import LARGE, MAX_NUMBERS, MAX_VALUES, MOST_REST_S, TooManyValues, Turns, read_json
from tests.router.live_router import LiveRouter
from tests.router.test_api import play
from tests.router.tiny_model import write_model_text

MANY: Final = MAX_VALUES // 500 + 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_text(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    "text",
    [
        "[" + "[]," * MAX_VALUES + "1]",
        "[" + ("[" * 500 + "]" * 500 + ",") * MANY + "1]",
        "[" + "{}," * MAX_VALUES + "1]",
        "[" + '"",' * (MAX_VALUES + 1) + "1]",
        "{" + '"":1,' * (MAX_VALUES + 1) + '"":1}',
        "[" + "1e9," * (MAX_VALUES + 1) + "1]",
        "[" + "0.5," * (MAX_VALUES + 1) + "1]",
        "[" + "true," * (MAX_VALUES + 1) + "1]",
        "[" + "1," * (MAX_NUMBERS + 1) + "1]",
        '["\\"\\\\",' + "[]," * MAX_VALUES + "1]",
        "[" * (MAX_VALUES + 1),
    ],
    ids=["arrays", "nested", "objects", "texts", "names", "powers", "fractions", "flags", "numbers", "quotes", "open"],
)
def test_what_would_take_long_to_read_is_not_read(text: str) -> None:
    with pytest.raises(TooManyValues, match="are more than the"):
        read_json(text)


@pytest.mark.parametrize("piece", ["[", "{", ",", "e", "\\", '"', '\\"[', '",[', 'é"'])
def test_what_stands_within_texts_is_no_value(piece: str) -> None:
    value = [piece * (MAX_NUMBERS + 1), {"a": [piece]}]
    assert read_json(json.dumps(value)) == value
    assert read_json(json.dumps(value, ensure_ascii=False)) == value


def test_as_much_as_there_may_be_is_read() -> None:
    assert read_json("[" + "[]," * (MAX_VALUES - 2) + "1]") == [*([[]] * (MAX_VALUES - 2)), 1]
    assert read_json("[" + "1," * MAX_NUMBERS + "1]") == [1] * (MAX_NUMBERS + 1)


@pytest.mark.covers("A11")
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": [[[]] * MAX_VALUES]}, "The body has too much in it: 131"),
        (
            {"prompt": "a", "structured_outputs": {"json": "[" * (MAX_VALUES + 1)}},
            "structured_outputs.json: 131073 names, texts, objects and the like are more",
        ),
    ],
    ids=["body", "schema in a text"],
)
def test_a_client_is_told_that_it_is_too_much(model: Path, body: dict[str, Any], message: str) -> None:
    async def scenario(router: LiveRouter) -> None:
        response = await router.client.post("/v1/completions", json={"model": "tiny"} | body)
        assert response.status_code == 400
        assert message in response.json()["error"]["message"]

    play(model, scenario)


def test_large_texts_are_read_one_by_one_with_as_long_a_rest_behind_each() -> None:
    turns, spans = Turns(), list[tuple[float, float]]()

    def read() -> None:
        began_s = time.monotonic()
        threading.Event().wait(0.05)
        spans.append((began_s, time.monotonic()))

    threads = [threading.Thread(target=turns.call, args=(LARGE, read)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for (began_s, ended_s), (next_s, _) in pairwise(spans):
        assert next_s - ended_s >= ended_s - began_s


def test_the_rest_behind_a_process_that_stood_still_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, rests = Turns(), list[float]()
    instants = iter([0.0, 0.0, 600.0, 600.0, 600.5, 600.6])
    # Not time's own: threads of other tests may ask it.
    clock = SimpleNamespace(monotonic=lambda: next(instants), sleep=rests.append)
    monkeypatch.setattr("router.json_reading.time", clock)
    for _ in range(2):
        turns.call(LARGE, lambda: None)
    assert rests == [0.0, MOST_REST_S]


def test_a_short_text_waits_for_no_turn() -> None:
    turns = Turns()
    assert turns.call(LARGE, lambda: turns.call(LARGE - 1, lambda: "read")) == "read"
