"""An answer on its way to the client: as one JSON object or as server-sent events, and what happens when the client leaves.

The HTTP status is held back until the first token or the error is known: an error before it is an ordinary error answer;
after it, an event of its own, and no `[DONE]`. A client that disconnects, streaming or not, aborts its request at once.
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

from router.answer import Answer, Arrival, ClientGone
from router.events import Failed, Finished, GenerationRequest
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
    """Runs one request to its end, whatever the end is."""

    def __init__(
        self,
        shell: RouterShell,
        request: GenerationRequest,
        arrival: Arrival,
        writer: AnswerWriter,
        *,
        is_stream: bool,
        headers: dict[str, str],
    ) -> None:
        super().__init__()
        self._shell = shell
        self._request = request
        self._arrival = arrival
        self._writer = writer
        self._is_stream = is_stream
        self._answer_headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Submit, answer, and leave nothing behind."""
        answer = self._shell.submit(self._request, self._arrival)
        watcher = asyncio.create_task(self._abort_on_disconnect(receive, answer))
        try:
            async with asyncio.timeout_at(self._request.deadline + _LAST_WRITE_S):
                response = await self._stream(answer, send) if self._is_stream else await self._collect(answer)
                if response is not None:
                    await response(scope, receive, send)
        except TimeoutError:
            log_event(_LOG, logging.WARNING, "client_too_slow", request=self._request.request_id)
        finally:
            watcher.cancel()
            self._shell.abort(answer)  # without effect if it ended

    async def _abort_on_disconnect(self, receive: Receive, answer: Answer) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._shell.abort(answer)

    async def _collect(self, answer: Answer) -> Response | None:
        while True:
            piece = await answer.take()
            self._writer.collect(piece.token_ids)
            match piece.end:
                case Finished(finish_reason=reason):
                    return json_answer(self._writer.whole(reason), headers=self._answer_headers)
                case Failed():
                    return error_answer(_as_api_error(piece.end), self._answer_headers)
                case ClientGone():
                    return None

    async def _stream(self, answer: Answer, send: Send) -> Response | None:
        is_begun = False
        while True:
            piece = await answer.take()
            match piece.end:
                case ClientGone():
                    return None
                case Failed() if not is_begun:
                    return error_answer(_as_api_error(piece.end), self._answer_headers)
                case Failed():
                    body = self._writer.chunk(piece.token_ids) if piece.token_ids else b""
                    body += event(_as_api_error(piece.end).body())
                case Finished(finish_reason=reason):
                    body = self._writer.last_chunks(piece.token_ids, reason)
                case None:
                    body = self._writer.chunk(piece.token_ids)
            if not is_begun:
                is_begun = True
                await send({"type": "http.response.start", "status": 200, "headers": self._stream_headers()})
            if body or piece.end is not None:
                await send({"type": "http.response.body", "body": body, "more_body": piece.end is None})
            if piece.end is not None:
                return None

    def _stream_headers(self) -> list[tuple[bytes, bytes]]:
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
        } | self._answer_headers
        return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


def _as_api_error(failed: Failed) -> ApiError:
    return ApiError(failed.status, failed.message, code=failed.code, retry_after_s=failed.retry_after_s)
