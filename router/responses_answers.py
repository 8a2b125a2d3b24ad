"""Answers of /v1/responses: the response as one object, and the typed events of its stream. Pure, but for `created_at`.

    response.created, response.in_progress
      response.output_item.added              a message, a thought or a function call
        response.content_part.added           of a message or a thought
          response.output_text.delta …        or response.reasoning_text.delta …, response.function_call_arguments.delta …
          response.output_text.done           or response.reasoning_text.done, response.function_call_arguments.done
        response.content_part.done
      response.output_item.done
    response.completed | response.incomplete | response.failed

The same items are told either way: a whole answer is what the stream's last event has. Shapes: OpenAI's API reference, and the
types of its Python client.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from router.answer import Asked, Piece
from router.choice_reader import reader_of
from router.json_parts import dump_ascii, dump_unicode
from router.openai_answers import unix_seconds
from router.openai_types import ApiError
from router.responses_types import ResponsesBody, renamed
from router.tool_answers import told_of
from router.tool_text import Called, Said, Thought, Told

_REASONS: Final = {"length": "max_output_tokens"}  # why one is incomplete
_COMPLETE: Final = ("stop", "tool_calls")

Event = dict[str, Any]


class ResponsesWriter:
    """Turns the pieces of an answer's one choice into what the client reads."""

    def __init__(self, asked: Asked, body: ResponsesBody, model_name: str) -> None:
        self._body = body
        self._model_name = model_name
        self._asked = asked
        self._request_id = asked.request.request_id
        self._created_at = unix_seconds()
        self._reader = reader_of(asked, 0)
        self._items: list[dict[str, Any]] = []  # the last one may be open
        self._is_open = False
        self._num_tokens = 0
        self._num_cached = 0  # of the prompt's tokens
        self._num_events = 0
        self._status = "in_progress"
        self._incomplete: dict[str, str] | None = None
        self._error: dict[str, str] | None = None

    # ---------------------------------------------------------------- a stream

    def is_usual(self, index: int, piece: Piece) -> bool:
        """No event here is written in a shorter way."""
        return False

    def usual_event(self, index: int, piece: Piece) -> bytes:
        """As `chunk`."""
        return b"".join(self.chunk(index, piece))

    def chunk(self, index: int, piece: Piece) -> Iterable[bytes]:
        """The events that a piece brings."""
        begins = [] if self._num_events else [self._of_response("created"), self._of_response("in_progress")]
        return [self._encoded(each) for each in [*begins, *self._take(piece)]]

    def stream_end(self) -> bytes:
        """The last event."""
        return self._encoded(self._of_response(self._status))

    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that failed."""
        self._status, self._error = "failed", {"code": "server_error", "message": f"{error.code}: {error.message}"}
        return self.stream_end()

    def named(self, error: ApiError) -> ApiError:
        """What a chat calls otherwise."""
        return renamed(error)

    # ---------------------------------------------------------------- a whole answer

    def collect(self, index: int, piece: Piece) -> None:
        """Keep the next piece for `whole`."""
        for _ in self._take(piece):
            pass

    def whole(self) -> Iterator[bytes]:
        """The response."""
        yield dump_ascii(self._response()).encode()

    # ---------------------------------------------------------------- what is told

    def _take(self, piece: Piece) -> list[Event]:
        self._num_tokens += len(piece.token_ids)
        self._num_cached = piece.num_cached
        told: Sequence[Told] = [Said(piece.text)] if piece.text else []
        if self._reader is not None:
            told = told_of(self._reader, piece)
        events: list[Event] = []
        for each in told:
            match each:
                case Said():
                    events += self._said(each.text)
                case Called():
                    events += self._called(each)
                case Thought():
                    events += self._thought(each.text)
        if piece.finish_reason is not None:
            events += self._finish(piece.finish_reason)
        return events

    def _said(self, text: str) -> list[Event]:
        events: list[Event] = []
        if not (self._is_open and self._items[-1]["type"] == "message"):
            events += self._close("completed")
            item = {"id": self._item_id("msg"), "type": "message", "role": "assistant", "content": []}
            events.append(self._open(item))
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._items[-1]["content"] = [part]
            events.append(self._of_item("content_part.added", content_index=0, part=dict(part)))
        self._items[-1]["content"][0]["text"] += text
        if text:
            events.append(self._of_item("output_text.delta", content_index=0, delta=text, logprobs=[]))
        return events

    def _thought(self, text: str) -> list[Event]:
        events: list[Event] = []
        if not self._items:
            events.append(self._open({"id": self._item_id("rs"), "type": "reasoning", "summary": [], "content": []}))
            part = {"type": "reasoning_text", "text": ""}
            self._items[-1]["content"] = [part]
            events.append(self._of_item("content_part.added", content_index=0, part=dict(part)))
        self._items[-1]["content"][0]["text"] += text
        return [*events, self._of_item("reasoning_text.delta", content_index=0, delta=text)]

    def _called(self, told: Called) -> list[Event]:
        events: list[Event] = []
        if told.name is not None:
            assert self._reader is not None
            events += self._close("completed")
            call_id = self._reader.calls[told.index].id
            item = {"id": self._item_id("fc"), "type": "function_call", "call_id": call_id, "name": told.name}
            events.append(self._open(item | {"arguments": ""}))
        self._items[-1]["arguments"] += told.arguments
        events.append(self._of_item("function_call_arguments.delta", delta=told.arguments))
        return events

    def _finish(self, reason: str) -> list[Event]:
        is_complete = reason in _COMPLETE
        self._status = "completed" if is_complete else "incomplete"
        self._incomplete = None if is_complete else {"reason": _REASONS.get(reason, reason)}
        has_said = bool(self._items) and (self._items[-1]["type"] != "reasoning" or not is_complete)
        events = [] if has_said else self._said("")  # nothing is an empty message
        return [*events, *self._close(self._status)]

    # ---------------------------------------------------------------- items

    def _open(self, item: dict[str, Any]) -> Event:
        self._items.append(item | {"status": "in_progress"})
        self._is_open = True
        return self._event("output_item.added", output_index=len(self._items) - 1, item=dict(self._items[-1]))

    def _close(self, status: str) -> list[Event]:
        """End the item that is open, if one is."""
        if not self._is_open:
            return []
        self._is_open = False
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "message":
            part = item["content"][0]
            events = [
                self._of_item("output_text.done", content_index=0, text=part["text"], logprobs=[]),
                self._of_item("content_part.done", content_index=0, part=part),
            ]
        elif item["type"] == "reasoning":
            part = item["content"][0]
            events = [
                self._of_item("reasoning_text.done", content_index=0, text=part["text"]),
                self._of_item("content_part.done", content_index=0, part=part),
            ]
        else:
            name, arguments = item["name"], item["arguments"]
            events = [self._of_item("function_call_arguments.done", name=name, arguments=arguments)]
        return [*events, self._event("output_item.done", output_index=len(self._items) - 1, item=item)]

    def _item_id(self, kind: str) -> str:
        return f"{kind}_{self._request_id}_{len(self._items)}"

    # ---------------------------------------------------------------- events

    def _of_item(self, kind: str, **fields: Any) -> Event:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)

    def _of_response(self, kind: str) -> Event:
        return self._event(kind, response=self._response())

    def _event(self, kind: str, **fields: Any) -> Event:
        number = self._num_events
        self._num_events += 1
        return {"type": f"response.{kind}", "sequence_number": number, **fields}

    @staticmethod
    def _encoded(event: Event) -> bytes:
        written = f"event: {event['type']}\ndata: {dump_unicode(event)}\n\n"
        return written.encode(
            errors="backslashreplace"
        )  # half a surrogate pair of what the client said: as JSON escapes it

    def _response(self) -> dict[str, Any]:
        body, sampling = self._body, self._asked.request.sampling
        return {
            "id": f"resp_{self._request_id}",
            "object": "response",
            "created_at": self._created_at,
            "status": self._status,
            "background": False,
            "error": self._error,
            "incomplete_details": self._incomplete,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "model": self._model_name,
            "output": list(self._items),
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "prompt_cache_key": body.prompt_cache_key,
            "safety_identifier": body.safety_identifier,
            "seed": self._asked.request.seed,
            "service_tier": "default",
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": body.text.format},
            "tool_choice": body.tool_choice,
            "tools": [{"description": None, "parameters": None, "strict": False} | each.told() for each in body.tools],
            "top_p": sampling.top_p or 1.0,
            "truncation": "disabled",
            "usage": None if self._status == "in_progress" else self._usage(),
            "user": body.user,
        }

    def _usage(self) -> dict[str, Any]:
        num_prompt = len(self._asked.request.prompt_token_ids)
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": self._num_cached, "cache_write_tokens": 0},
            "output_tokens": self._num_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reader.num_thought_tokens if self._reader else 0},
            "total_tokens": num_prompt + self._num_tokens,
        }
