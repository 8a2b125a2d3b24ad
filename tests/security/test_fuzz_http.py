"""The HTTP API against requests that schemathesis makes of its own description: every answer is in the API's shape, none is a 5xx.

The router is real, its nodes are scripted and say whatever is asked for. `FUZZ_EXAMPLES` says how many for each operation.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings

from proto import baton_pb2 as pb
from router.api import ApiSettings
from tests.router.live_router import MODEL_NAME, live_router
from tests.router.scripted_nodes import ScriptedAttempt
from tests.router.tiny_model import write_model_text

EXAMPLES: Final = int(os.environ.get("FUZZ_EXAMPLES", "30"))
MIB: Final = 1 << 20
_ROUNDS: Final = 10
FUZZ: Final = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), print_blob=False)
OPERATIONS: Final = (
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/metrics"),
    ("GET", "/state"),
    ("GET", "/v1/requests"),
    ("GET", "/v1/requests/{name}/timeline"),
)


async def obliging(attempt: ScriptedAttempt) -> None:
    """All the tokens that were asked for."""
    number = attempt.dispatch.sampling.max_tokens
    first = attempt.num_generated
    tokens = [65 + index % 26 for index in range(first, number)]
    attempt.prefill_says(first, tokens, pb.FINISH_LENGTH)


class Running:
    """A router on a loop of its own thread."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._is_up = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()))
        self.url = ""

    async def _serve(self) -> None:
        settings = ApiSettings(MODEL_NAME, 20.0, max_body_bytes=MIB)
        async with live_router(self._model, obliging, settings=settings) as router:
            self.url = f"http://127.0.0.1:{router.port}"
            self._is_up.set()
            await self._stop.wait()

    def __enter__(self) -> Running:
        self._thread.start()
        assert self._is_up.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(write_model_text(tmp_path_factory.mktemp("fuzzed") / "model")) as running:
        yield running


def described(router: Running) -> Any:
    """The router's own description, the model's name and lengths narrowed: else nothing would get past the first check."""
    description = requests.get(f"{router.url}/openapi.json", timeout=20).json()
    for name in ("CompletionBody", "ChatBody", "ResponsesBody"):
        properties = description["components"]["schemas"][name]["properties"]
        properties["model"] = {"const": MODEL_NAME}
        properties["max_output_tokens" if name == "ResponsesBody" else "max_tokens"] = {
            "type": "integer",
            "minimum": 1,
            "maximum": 20,
        }
        properties["timeout_s"] = {"type": "number", "minimum": 5}
    schemas = description["components"]["schemas"]
    schemas["DetokenizeBody"]["properties"]["model"] = {"const": MODEL_NAME}
    prompts = schemas["TokenizeBody"]  # conversations are asked for as chats
    narrowed = {"model": {"const": MODEL_NAME}, "messages": {"type": "null"}, "tools": {"type": "array", "maxItems": 0}}
    prompts["properties"] |= narrowed | {"prompt": {"type": "string"}}
    prompts["required"] = ["prompt"]
    return schemathesis.openapi.from_dict(description)


@contextmanager
def no_more_memory(bound_bytes: int) -> Iterator[None]:
    """What is left behind by everything inside."""
    process = psutil.Process()
    before = process.memory_info().rss
    yield
    grown = process.memory_info().rss - before
    assert grown < bound_bytes, f"{grown >> 20} MiB more"


def check(response: Any, statuses: set[int]) -> None:
    """An answer of the API, whatever was asked."""
    status = response.status_code
    statuses.add(status)
    kind = response.headers.get("content-type", [""])[0]
    assert status < 500, response.text
    if status >= 400:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"] and error["message"].isprintable(), error
        assert len(error["message"]) < 1000
    elif kind.startswith("text/event-stream"):
        events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
        if "event: " in response.text:
            assert json.loads(events[-1])["type"] in ("response.completed", "response.incomplete"), events[-1]
            return
        assert events[-1] == "[DONE]", events[-1]
        assert all("error" not in json.loads(event) for event in events[:-1])
    elif kind == "application/json" and response.request.method != "HEAD":
        assert response.json().get("error") is None


@pytest.mark.covers("X05", "A02")
@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [
        (method, path, mode)
        for method, path in OPERATIONS
        for mode in schemathesis.GenerationMode
        if method == "POST"
        or mode is schemathesis.GenerationMode.POSITIVE  # a page that takes nothing takes nothing wrong
    ],
)
def test_whatever_is_asked_is_answered_in_the_apis_shape(
    router: Running, method: str, path: str, mode: schemathesis.GenerationMode
) -> None:
    statuses: set[int] = set()
    operation = described(router)[path][method]

    @FUZZ
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        check(case.call(base_url=router.url, timeout=30), statuses)

    wanted = {200} if mode is schemathesis.GenerationMode.POSITIVE else {400, 404, 422}
    for _ in range(_ROUNDS):  # a description says little of what goes with what: of chats, one in ten is answered
        with no_more_memory(200 * MIB):
            ask()
        if method != "POST" or statuses & wanted:
            break
    else:
        pytest.fail(f"only {statuses}")
    assert requests.get(f"{router.url}/ready", timeout=20).status_code == 200


def test_the_operations_are_all_that_the_description_has(router: Running) -> None:
    """A new page is fuzzed, too."""
    description = requests.get(f"{router.url}/openapi.json", timeout=20).json()
    found = {(method.upper(), path) for path, methods in description["paths"].items() for method in methods}
    assert {(method, path.replace("{name:path}", "{name}")) for method, path in found} == set(OPERATIONS)
