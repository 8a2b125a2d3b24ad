"""An answer on its way to the client: as one JSON object or as server-sent events, and what happens when the client leaves.

The HTTP status is held back until the first token or the error is known: an error before it is an ordinary error answer;
after it, an event of its own, and no `[DONE]`. One request of several that fails fails the answer, and the others are cancelled.
A client that disconnects, streaming or not, aborts its requests at once.
A client that reads too slowly holds up nobody: its tokens are merged into larger chunks, and past the deadline it is cut off.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Any, Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.answer import Delivery
from router.events import Failed
from router.openai_answers import AnswerWriter, event
from router.openai_types import ApiError
from router.shell import RouterShell
from runtime.logs import log_event

_LOG: Final = logging.getLogger(__name__)
_LAST_WRITE_S: Final = 5.0  # beyond the deadline, for a client to take what is there


def json_answer(content: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response; ASCII, since an error may repeat what no UTF-8 can hold."""
    return Response(json.dumps(content, separators=(",", ":")), status, headers, "application/json")


def error_answer(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    """The response that an ApiError stands for."""
    retry = {} if error.retry_after_s is None else {"Retry-After": str(max(1, round(error.retry_after_s)))}
    return json_answer(error.body(), error.status, {**(headers or {}), **retry})


class GenerationResponse(Response):
    """Runs the requests of one answer to their ends, whatever those are."""

    def __init__(
        self,
        shell: RouterShell,
        delivery: Delivery,
        writer: AnswerWriter,
        *,
        is_stream: bool,
        headers: dict[str, str],
    ) -> None:
        super().__init__()
        self._shell = shell
        self._delivery = delivery
        self._writer = writer
        self._is_stream = is_stream
        self._answer_headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Submit, answer, and leave nothing behind."""
        first = self._delivery.answers[0].request
        for answer in self._delivery.answers:
            if self._delivery.failure is None:  # else one before it was turned away
                self._shell.submit(answer)
        watcher = asyncio.create_task(self._abort_on_disconnect(receive))
        try:
            async with asyncio.timeout_at(first.deadline + _LAST_WRITE_S):
                response = await (self._stream(send) if self._is_stream else self._collect())
                if response is not None:
                    await response(scope, receive, send)
        except TimeoutError:
            log_event(_LOG, logging.WARNING, "client_too_slow", request=first.request_id)
        finally:
            watcher.cancel()
            self._abort()

    async def _abort_on_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._abort()

    def _abort(self) -> None:
        """End what has not ended, the last one first: else the room that one leaves goes to the next, for nothing."""
        for answer in reversed(self._delivery.answers):
            self._shell.abort(answer)

    async def _collect(self) -> Response | None:
        while self._delivery.failure is None:
            for index, piece in await self._delivery.take():
                self._writer.collect(index, piece)
            if self._delivery.is_complete:
                return json_answer(self._writer.whole(), headers=self._answer_headers)
        return self._error_answer()

    def _error_answer(self) -> Response | None:
        """The others are cancelled before the client hears of the one that failed."""
        self._abort()
        failure = self._delivery.failure
        return error_answer(_as_api_error(failure), self._answer_headers) if isinstance(failure, Failed) else None

    async def _stream(self, send: Send) -> Response | None:
        is_begun = is_over = False
        while not is_over:
            pieces = await self._delivery.take()
            failure = self._delivery.failure
            if failure is not None and not (is_begun and isinstance(failure, Failed)):
                return self._error_answer()
            body = b"".join([self._writer.chunk(index, piece) for index, piece in pieces])
            if isinstance(failure, Failed):
                self._abort()
                body += event(_as_api_error(failure).body())
            elif self._delivery.is_complete:
                body += self._writer.stream_end()
            is_over = failure is not None or self._delivery.is_complete
            if not is_begun:
                is_begun = True
                await send({"type": "http.response.start", "status": 200, "headers": self._stream_headers()})
            if body or is_over:
                await send({"type": "http.response.body", "body": body, "more_body": not is_over})
        return None

    def _stream_headers(self) -> list[tuple[bytes, bytes]]:
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
        } | self._answer_headers
        return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


def _as_api_error(failed: Failed) -> ApiError:
    return ApiError(failed.status, failed.message, code=failed.code, retry_after_s=failed.retry_after_s)
