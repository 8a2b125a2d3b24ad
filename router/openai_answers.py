"""What clients get: the JSON of whole answers and of stream chunks, in OpenAI's shapes.

Beyond those shapes every choice names the effective `seed` (whole answers; a stream's first and last chunk), so that an
answer can be drawn again; and with `return_token_ids`, `prompt_token_ids` (whole answers; first chunk) and
`completion_token_ids` (whole answers: all; chunks: the chunk's own, the stop token included although it has no text).
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any, Final, Protocol

from router.events import GenerationRequest
from router.text import ModelText

STREAM_END: Final = b"data: [DONE]\n\n"


def unix_seconds() -> int:
    """The API's field `created`: the one reading of a wall clock, by which nothing is decided."""
    return int(time.time())


def event(content: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


class AnswerForm(Protocol):
    """Where an endpoint puts the text of a choice."""

    id_prefix: str
    object_name: str
    chunk_object_name: str

    def whole(self, text: str) -> dict[str, Any]:
        """Fields of a finished choice."""

    def part(self, text: str, is_first: bool) -> dict[str, Any]:
        """Fields of a chunk's choice."""


class CompletionForm:
    """/v1/completions."""

    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def whole(self, text: str) -> dict[str, Any]:
        """A text."""
        return {"text": text, "logprobs": None}

    def part(self, text: str, is_first: bool) -> dict[str, Any]:
        """The text's next part."""
        return {"text": text, "logprobs": None}


class ChatForm:
    """/v1/chat/completions."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def whole(self, text: str) -> dict[str, Any]:
        """A message of the assistant."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}, "logprobs": None}

    def part(self, text: str, is_first: bool) -> dict[str, Any]:
        """The message's next part; the first one says who speaks."""
        return {"delta": ({"role": "assistant"} if is_first else {}) | {"content": text}, "logprobs": None}


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How the client wants its answer."""

    model_name: str
    is_stream: bool
    includes_usage: bool  # of a stream; a whole answer always does
    returns_token_ids: bool


class AnswerWriter:
    """Turns one request's tokens into its answer; gets them piece by piece in either case, so both read the same."""

    def __init__(self, request: GenerationRequest, form: AnswerForm, options: AnswerOptions, text: ModelText) -> None:
        self._request = request
        self._form = form
        self._options = options
        self._detokenizer = text.detokenizer()
        self._silent_ids = request.stop_token_ids  # a stop token ends the text, it is not in it
        self._frame = {
            "id": form.id_prefix + request.request_id,
            "created": unix_seconds(),
            "model": options.model_name,
        }
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._is_first = True

    def chunk(self, token_ids: list[int]) -> bytes:
        """The event for new tokens; empty if they complete no text that could be shown yet."""
        text = self._push(token_ids)
        if not text and not self._is_first and not self._options.returns_token_ids:
            return b""
        return self._chunk(text, token_ids, None)

    def last_chunks(self, token_ids: list[int], finish_reason: str) -> bytes:
        """The events that end a stream that went well."""
        text = self._push(token_ids) + self._detokenizer.finish()
        chunks = self._chunk(text, token_ids, finish_reason)
        if self._options.includes_usage:
            frame = {**self._frame, "object": self._form.chunk_object_name}
            chunks += event({**frame, "choices": [], "usage": self._usage()})
        return chunks + STREAM_END

    def collect(self, token_ids: list[int]) -> None:
        """Keep new tokens for `whole`."""
        self._texts.append(self._push(token_ids))

    def whole(self, finish_reason: str) -> dict[str, Any]:
        """The whole answer."""
        text = "".join([*self._texts, self._detokenizer.finish()])
        choice = {"index": 0, **self._form.whole(text), "finish_reason": finish_reason, "seed": self._request.seed}
        if self._options.returns_token_ids:
            choice["prompt_token_ids"] = self._request.prompt_token_ids
            choice["completion_token_ids"] = self._token_ids
        return {**self._frame, "object": self._form.object_name, "choices": [choice], "usage": self._usage()}

    def _push(self, token_ids: list[int]) -> str:
        self._token_ids += token_ids
        silent_ids = self._silent_ids
        return self._detokenizer.push([each for each in token_ids if each not in silent_ids])

    def _chunk(self, text: str, token_ids: list[int], finish_reason: str | None) -> bytes:
        is_first, self._is_first = self._is_first, False
        choice = {"index": 0, **self._form.part(text, is_first), "finish_reason": finish_reason}
        if is_first or finish_reason is not None:
            choice["seed"] = self._request.seed
        if self._options.returns_token_ids:
            if is_first:
                choice["prompt_token_ids"] = self._request.prompt_token_ids
            choice["completion_token_ids"] = token_ids
        content = {**self._frame, "object": self._form.chunk_object_name, "choices": [choice]}
        if self._options.includes_usage:
            content["usage"] = None
        return event(content)

    def _usage(self) -> dict[str, int]:
        num_prompt, num_completion = len(self._request.prompt_token_ids), len(self._token_ids)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
        }
