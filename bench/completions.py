"""Requests for completions, of a prompt or of a chat, and what their answers say: tokens, errors, and when each part came.

Works with any server of OpenAI's API; what only some of them know (token ids as a prompt, `ignore_eos`) can be left out. Tokens are
as many as the server says (usage, or the ids that it was asked for): an event of a stream may hold several, or none.
Not here: sending (http_exchange.py), when to send (load.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, Literal

from bench.distribution import time_per_output_token
from bench.workload import PromptForm

Api = Literal["completions", "chat"]

OK: Final = "200"
_GIVEN_UP: Final = ("pd_reschedule", "abort", "error")  # finish reasons: Baton's own, and those of vLLM and SGLang
_SAID: Final = 200  # characters of an error that are kept
_UNREADABLE: Final = (  # whatever a server may send: not what it should, too deep, a count without end
    *(ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, OverflowError),
)
PATHS: Final[Mapping[Api, str]] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class Asking:
    """What all requests of a run have in common."""

    model: str
    prompt_form: PromptForm
    is_stream: bool = True
    ignores_eos: bool = True
    temperature: float = 0.0
    api: Api = "completions"
    wants_token_ids: bool = False

    @property
    def path(self) -> str:
        """Where requests go."""
        return PATHS[self.api]

    def body(self, prompt: str, output_tokens: int) -> bytes:
        """One request; the prompt is JSON already, a text or a list of token ids."""
        fields: dict[str, Any] = {"model": self.model, "max_tokens": output_tokens, "temperature": self.temperature}
        if self.is_stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.ignores_eos:
            fields["ignore_eos"] = True
        if self.wants_token_ids:
            fields["return_token_ids"] = True
        asked = f'"messages":[{{"role":"user","content":{prompt}}}]' if self.api == "chat" else f'"prompt":{prompt}'
        return f"{json.dumps(fields, separators=(',', ':'))[:-1]},{asked}}}".encode()


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
    # "unfinished" or "interrupted"
    error: str = ""  # the first words of what was said about it
    connect_s: float | None = None
    end_s: float = 0.0
    chunk_at_s: list[float] = field(default_factory=list)  # of a stream: each event that carries something of a choice
    prompt_tokens: int | None = None  # as the server counts them
    output_tokens: int | None = None
    token_ids: list[int] = field(default_factory=list)  # of a stream that was asked for `return_token_ids`
    code: str = ""  # of the server's error

    @property
    def is_ok(self) -> bool:
        """Answered completely."""
        return self.status == OK

    @property
    def kind(self) -> str:
        """Of its failure: the status, and the error's code where there is one."""
        return f"{self.status} {self.code}".rstrip()

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
                record.code, record.error = _error_of(whole)
            elif self._is_stream:
                self._read_stream(record)
            else:
                _read_whole(record, whole)
        except _UNREADABLE as error:
            record.status, record.error = "malformed", one_line(f"{type(error).__name__}: {error}")

    def _read_stream(self, record: Record) -> None:
        is_done = False
        for data, at in self._events():
            if data == b"[DONE]":
                is_done = True
                continue
            event = json.loads(data)
            if event.get("error"):
                record.status = "stream_error"
                record.code, record.error = _error_of(data)
                return
            if (choices := event.get("choices")) and _says_something(choice := choices[0]):
                record.chunk_at_s.append(at - self._begun_at)
                record.token_ids += choice.get("completion_token_ids") or choice.get("token_ids") or ()
                _read_finish(record, choice)
            _read_usage(record, event)
        if not is_done:
            record.status, record.error = "stream_error", "the stream ended without [DONE]"
        elif not record.chunk_at_s:
            record.status, record.error = "stream_error", "the stream has no event with anything of a choice"
        elif record.output_tokens is None and record.token_ids:
            record.output_tokens = len(record.token_ids)

    def _events(self) -> Sequence[tuple[bytes, float]]:
        """The data of each server-sent event with the instant when its last byte came; the last line may lack its end."""
        events: list[tuple[bytes, float]] = []
        rest = b""
        for data, at in self._parts:
            *lines, rest = (rest + data).split(b"\n")
            events += [(line[5:].strip(), at) for line in lines if line.startswith(b"data:")]
        if rest.startswith(b"data:") and rest[5:].strip() == b"[DONE]":
            events.append((b"[DONE]", self._parts[-1][1]))
        return events


def _says_something(choice: dict[str, Any]) -> bool:
    """Not the event that only opens a chat's answer: it may come long before the first token."""
    delta = choice.get("delta")
    return delta is None or bool(choice.get("finish_reason")) or any(delta[key] for key in delta if key != "role")


def _read_whole(record: Record, body: bytes) -> None:
    """An answer that is no stream. A gateway's error may come with status 200, too."""
    content = json.loads(body)
    if content.get("error") or not content.get("choices"):
        record.status = "malformed"
        record.code, record.error = _error_of(body)
        return
    _read_finish(record, content["choices"][0])
    _read_usage(record, content)


def _read_finish(record: Record, choice: dict[str, Any]) -> None:
    """A choice that the server itself gave up is no quick success, however well its stream ended."""
    if (reason := choice.get("finish_reason")) in _GIVEN_UP:
        record.status, record.code = "unfinished", reason
        record.error = "the server ended the answer early"


def _read_usage(record: Record, content: dict[str, Any]) -> None:
    """Counts that are left out, or null, are not known."""
    usage = content.get("usage") or {}
    counts = [None if usage.get(name) is None else int(usage[name]) for name in ("prompt_tokens", "completion_tokens")]
    if any(count is not None and count < 0 for count in counts):
        raise ValueError(f"usage {usage!r:.100} has a count below 0")
    prompt, output = counts
    record.prompt_tokens = record.prompt_tokens if prompt is None else prompt
    record.output_tokens = record.output_tokens if output is None else output


def _error_of(body: bytes) -> tuple[str, str]:
    """Code and sentence of an error in OpenAI's shape; of another one no code, and its first words."""
    try:
        error = json.loads(body)["error"]
        if not isinstance(error, dict):
            return "", one_line(str(error))
        return one_line(str(error.get("code") or ""))[:40], one_line(str(error["message"]))
    except _UNREADABLE:
        return "", one_line(body[:_SAID].decode("utf-8", "replace"))


def one_line(text: str) -> str:
    """The first words of what a server said, as a terminal can show them: no ends of lines, escapes or half characters."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text[:_SAID]).split())
