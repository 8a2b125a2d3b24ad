"""Requests to /v1/completions, and what their answers say: tokens, errors, and when each part came.

Works with any server of OpenAI's API; what only some of them know (token ids as a prompt, `ignore_eos`) can be left out.
Not here: sending (http_exchange.py), when to send (load.py).
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, Literal

from bench.distribution import time_per_output_token

PromptForm = Literal["token_ids", "words"]

OK: Final = "200"
_WORDS: Final = (
    "a river stone under the old bridge and seven birds that never learned to sing before winter came home with "
    "green letters from harbour towns where nobody reads what is written on the walls of empty stations at night"
).split()


@dataclass(frozen=True, slots=True)
class Asking:
    """What all requests of a run have in common."""

    model: str
    prompt_form: PromptForm
    vocab_size: int  # token ids are drawn below it
    is_stream: bool
    ignores_eos: bool
    temperature: float

    def body(self, rng: random.Random, prompt_tokens: int, output_tokens: int) -> bytes:
        """One request with a random prompt. Words are about a token each, which the server's usage then tells exactly."""
        prompt: list[int] | str
        if self.prompt_form == "token_ids":
            prompt = [rng.randrange(self.vocab_size) for _ in range(prompt_tokens)]
        else:
            prompt = " ".join(rng.choice(_WORDS) for _ in range(prompt_tokens))
        fields: dict[str, Any] = {"model": self.model, "prompt": prompt, "max_tokens": output_tokens}
        fields["temperature"] = self.temperature
        if self.is_stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.ignores_eos:
            fields["ignore_eos"] = True
        return json.dumps(fields, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, ready to be sent."""

    index: int
    body: bytes
    prompt_tokens: int
    output_tokens: int


@dataclass(slots=True)
class Record:
    """What became of one request. Seconds from when it was begun, unless said otherwise; the fields are keys of the JSON result."""

    index: int
    prompt_tokens_asked: int
    output_tokens_asked: int
    arrival_s: float  # from the run's start: when it was due
    lag_s: float = 0.0  # how much later than that it was begun; a timer may fire a millisecond early
    status: str = ""  # "200", another HTTP status, or "connect", "broken", "malformed", "timeout", "stream_error"
    error: str = ""  # the first words of what was said about it
    connect_s: float | None = None
    end_s: float = 0.0
    chunk_at_s: list[float] = field(default_factory=list)  # of a stream: each event that carries a choice
    prompt_tokens: int | None = None  # as the server counts them
    output_tokens: int | None = None
    token_ids: list[int] = field(default_factory=list)  # of a stream that was asked for `return_token_ids`

    @property
    def is_ok(self) -> bool:
        """Answered completely."""
        return self.status == OK

    @property
    def ttft_s(self) -> float | None:
        """To the first token, of a stream."""
        return self.chunk_at_s[0] if self.is_ok and self.chunk_at_s else None

    @property
    def tpot_s(self) -> float | None:
        """Per token behind the first, of a stream."""
        if not self.is_ok or not self.chunk_at_s:
            return None
        return time_per_output_token(self.chunk_at_s[0], self.chunk_at_s[-1], self.output_tokens or 0)

    @property
    def itl_s(self) -> list[float]:
        """Between neighbouring events of a stream; a server that merges tokens into one event has fewer and longer ones."""
        return [b - a for a, b in pairwise(self.chunk_at_s)] if self.is_ok else []


class AnswerReader:
    """Collects one answer while it comes, and reads it when it is complete: parsing meanwhile would delay other answers' clocks."""

    def __init__(self, is_stream: bool, begun_at: float) -> None:
        self._is_stream = is_stream
        self._begun_at = begun_at
        self._parts: list[tuple[bytes, float]] = []

    def take(self, data: bytes, now: float) -> None:
        """A part of the body."""
        self._parts.append((data, now))

    def read(self, record: Record, status: int) -> None:
        """Fill the record from a complete answer."""
        record.status = str(status)
        whole = b"".join(part for part, _ in self._parts)
        try:
            if status != 200:
                record.error = _error_text(whole)
            elif self._is_stream:
                self._read_stream(record)
            else:
                _read_usage(record, json.loads(whole))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:  # whatever a server may send
            record.status, record.error = "malformed", f"{type(error).__name__}: {error}"[:200]

    def _read_stream(self, record: Record) -> None:
        is_done = False
        for data, at in self._events():
            if data == b"[DONE]":
                is_done = True
                continue
            event = json.loads(data)
            if "error" in event:
                record.status, record.error = "stream_error", _error_text(data)
                return
            if event["choices"]:
                record.chunk_at_s.append(at - self._begun_at)
                record.token_ids += event["choices"][0].get("completion_token_ids", ())
            _read_usage(record, event)
        if not is_done:
            record.status, record.error = "stream_error", "the stream ended without [DONE]"
        elif record.output_tokens is None:
            record.output_tokens = len(record.chunk_at_s)  # the best guess where the server sends no usage

    def _events(self) -> Sequence[tuple[bytes, float]]:
        """The data of each server-sent event with the instant when its last byte came."""
        events: list[tuple[bytes, float]] = []
        rest = b""
        for data, at in self._parts:
            *lines, rest = (rest + data).split(b"\n")
            events += [(line[5:].strip(), at) for line in lines if line.startswith(b"data:")]
        return events


def _read_usage(record: Record, content: dict[str, Any]) -> None:
    usage = content.get("usage")
    if usage:
        record.prompt_tokens, record.output_tokens = int(usage["prompt_tokens"]), int(usage["completion_tokens"])


def _error_text(body: bytes) -> str:
    """The sentence of an error in OpenAI's shape, or the first words of another one."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:200]
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")
