"""Clients of a cluster whose processes come and go: plain requests, streams that a thread reads, errors in OpenAI's shape."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import httpx

from tests.e2e.role_by_role import BOUND_S
from tests.plain_http import NO_CERTIFICATES


class Serves(Protocol):
    """What clients need to know of a router or a cluster."""

    @property
    def url(self) -> str:
        """Of the API."""


def body(rng: random.Random, prompt_len: int, max_tokens: int) -> dict[str, Any]:
    """A completion of exactly `max_tokens` tokens, with a prompt of its own."""
    return {
        "model": "llama-tiny",
        "prompt": [rng.randrange(256) for _ in range(prompt_len)],
        "max_tokens": max_tokens,
        "temperature": rng.choice((0.0, 1.0)),
        "seed": rng.getrandbits(53),
        "ignore_eos": True,
        "return_token_ids": True,
    }


def ask(cluster: Serves, fields: dict[str, Any]) -> httpx.Response:
    """One plain request on a connection of its own; may run on any thread."""
    return httpx.post(
        f"{cluster.url}/v1/completions", json=fields, timeout=120, trust_env=False, verify=NO_CERTIFICATES
    )


def tokens_of(response: httpx.Response) -> list[int]:
    """The completion of a plain answer that went well."""
    assert response.status_code == 200, response.text
    token_ids: list[int] = response.json()["choices"][0]["completion_token_ids"]
    return token_ids


class Stream:
    """A streamed completion that a thread reads: the tokens taken so far, and what followed them."""

    def __init__(self, cluster: Serves, threads: ThreadPoolExecutor, fields: dict[str, Any]) -> None:
        self.token_ids: list[int] = []
        self.request_id = ""
        self.last = ""  # the event that was taken last
        self.heard_at: list[float] = []  # by time.monotonic, of each event that has come, taken or not
        self._is_over = False
        self._events: SimpleQueue[str | None] = SimpleQueue()
        self._end = threads.submit(self._read, f"{cluster.url}/v1/completions", fields | {"stream": True})

    @property
    def is_running(self) -> bool:
        """Whether its answer goes on, whatever has been taken of it."""
        return not self._end.done()

    def take_tokens(self, number: int) -> None:
        """Wait until there are so many."""
        while len(self.token_ids) < number:
            assert self._take(BOUND_S), f"it ended with {self.last}"

    def take_until_quiet(self, quiet_s: float) -> None:
        """Take what comes until nothing has come for so long."""
        try:
            while self._take(quiet_s):
                pass
        except Empty:
            return
        raise AssertionError(f"it did not pause, it ended with {self.last}")

    def take_all(self) -> None:
        """Take what comes until the connection's end; raises what went wrong with it."""
        while self._take(BOUND_S):
            pass
        self._end.result()

    def take_the_error(self) -> dict[str, Any]:
        """The one error that ends it, checked to be one: an event in OpenAI's shape, and nothing behind it."""
        self.take_all()
        return checked_error(json.loads(self.last))

    def _take(self, patience_s: float) -> bool:
        """Take the next event; False at the end; raises Empty if none comes in time."""
        event = None if self._is_over else self._events.get(timeout=patience_s)
        if event is None:
            self._is_over = True
            return False
        assert "error" not in self.last, f"behind the error came {event}"
        self.last = event
        for choice in [] if event == "[DONE]" else json.loads(event).get("choices", ()):
            self.token_ids += choice["completion_token_ids"]
        return True

    def _read(self, url: str, fields: dict[str, Any]) -> None:
        try:
            with httpx.stream(
                "POST", url, json=fields, timeout=120, trust_env=False, verify=NO_CERTIFICATES
            ) as response:
                assert response.status_code == 200, response.read()
                self.request_id = response.headers["X-Request-Id"]
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        self.heard_at.append(time.monotonic())
                        self._events.put(line.removeprefix("data: "))
        finally:
            self._events.put(None)


def checked_error(content: dict[str, Any]) -> dict[str, Any]:
    """The error of an answer or of an event, in OpenAI's shape."""
    assert set(content) == {"error"}
    error: dict[str, Any] = content["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and isinstance(error["type"], str)
    return error
