"""An answer on its way to the client: as one JSON object or as server-sent events, and what happens when the client leaves.

The HTTP status is held back until the first token or the error is known: an error before it is an ordinary error answer;
after it, an event of its own, and no `[DONE]`. One request of several that fails fails the answer, and the others are cancelled.
A client that disconnects, streaming or not, aborts its requests at once: the server calls (runtime/http_protocol.py, DirectWay).
Nearly all events of a stream are written where their tokens arrive, over the same way, without a turn of the handler's task, as
long as the client keeps up.
What is long (logprobs) is written bit by bit, with turns for everybody else between: the loop never waits for one answer.
A client that reads too slowly holds up nobody: its tokens are merged into larger chunks, and past the deadline it is cut off.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.answer import Choice, Delivery, Piece
from router.events import Failed
from router.json_parts import dump_ascii
from router.openai_types import ApiError, bad_request
from router.shell import RouterShell
from runtime.http_protocol import DIRECT, DirectWay
from runtime.logs import log_event

_LOG: Final = logging.getLogger(__name__)
LAST_WRITE_S: Final = 5.0  # beyond the deadline, for a client to take what is there
_TURN_S: Final = 0.005  # of writing, before others have theirs
_BLOCK_BYTES: Final = 64 << 10  # that are handed on together


class Writer(Protocol):
    """What turns an answer's pieces into what the client reads, as a stream or whole."""

    def is_usual(self, index: int, piece: Piece) -> bool:
        """Whether the piece is one that `usual_event` can write."""

    def usual_event(self, index: int, piece: Piece) -> bytes:
        """The event of such a piece."""

    def chunk(self, index: int, piece: Piece) -> Iterable[bytes]:
        """The events of any piece, in parts; there may be none."""

    def stream_end(self) -> bytes:
        """What ends a stream that went well."""

    def failed(self, error: ApiError) -> bytes:
        """What ends one that did not."""

    def named(self, error: ApiError) -> ApiError:
        """The error in the names that this client's API has."""

    def collect(self, index: int, piece: Piece) -> None:
        """Keep a piece for `whole`."""

    def whole(self) -> Iterator[bytes]:
        """The whole answer, in parts; ASCII."""


def json_answer(content: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response; ASCII, since an error may repeat what no UTF-8 can hold."""
    return Response(dump_ascii(content), status, headers, "application/json")


def error_answer(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    """The response that an ApiError stands for."""
    retry = {} if error.retry_after_s is None else {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
    return json_answer(error.body(), error.status, {**(headers or {}), **retry})


class GenerationResponse(Response):
    """Runs the requests of one answer to their ends, whatever those are."""

    def __init__(
        self,
        shell: RouterShell,
        delivery: Delivery,
        writer: Writer,
        *,
        is_stream: bool,
        headers: dict[str, str],
        on_end: Callable[[int], None] | None = None,
    ) -> None:
        """`on_end` hears how many tokens were generated, however it ended."""
        self.background = None  # and no more of Response's own: it makes a body and headers, and this one's come later
        self._shell = shell
        self._delivery = delivery
        self._writer = writer
        self._is_stream = is_stream
        self._answer_headers = headers
        # Tokens, of choices with fewer than two so far.
        self._num_written = dict.fromkeys(range(len(delivery.origins)), 0)
        self._on_end = on_end
        self._direct: DirectWay | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Submit, answer, and leave nothing behind."""
        first = self._delivery.answers[0].request
        for answer in self._delivery.answers:
            if self._delivery.failure is None:  # else one before it was turned away
                self._shell.submit(answer)
        direct = self._direct = scope.get("extensions", {}).get(DIRECT)
        if direct is not None:
            direct.when_lost(self._abort)
        try:
            async with asyncio.timeout_at(first.deadline + LAST_WRITE_S):
                response = await (self._stream(send) if self._is_stream else self._collect(send))
                if response is not None:
                    await response(scope, receive, send)
        except TimeoutError:
            log_event(_LOG, logging.WARNING, "client_too_slow", request=first.request_id)
            if direct is not None:
                direct.cut_off()
        finally:
            if direct is not None:
                direct.when_lost(None)
            self._abort()
            if self._on_end is not None:
                self._on_end(sum(answer.num_tokens for answer in self._delivery.answers))
            self._delivery.forget()
            scope.get("extensions", {}).pop(DIRECT, None)  # its way leads back to the scope

    def _abort(self) -> None:
        """End what has not ended, the last one first: else the room that one leaves goes to the next, for nothing."""
        for answer in reversed(self._delivery.answers):
            self._shell.abort(answer)

    async def _collect(self, send: Send) -> Response | None:
        while self._delivery.failure is None:
            pieces = await self._delivery.take()
            for index, piece in pieces:
                self._writer.collect(index, piece)
            if _has_an_end(pieces) and self._delivery.is_complete:
                await self._send_whole(send)
                return None
        return self._error_answer()

    async def _send_whole(self, send: Send) -> None:
        """All of it is there before the first byte leaves, so that it has a length, which HTTP/1.0 cannot do without."""
        blocks = [block async for block, _ in _paced(self._writer.whole())]
        length = str(sum(map(len, blocks)))
        await self._begin(send, {"content-type": "application/json", "content-length": length})
        for block in blocks:
            await send({"type": "http.response.body", "body": block, "more_body": block is not blocks[-1]})

    def _error_answer(self) -> Response | None:
        """The others are cancelled before the client hears of the one that failed."""
        self._abort()
        failure = self._delivery.failure
        return error_answer(self._as_api_error(failure), self._answer_headers) if isinstance(failure, Failed) else None

    async def _stream(self, send: Send) -> Response | None:
        is_begun = is_over = False
        if self._direct is not None:
            self._delivery.write_now = self._write_now
        while not is_over:
            pieces = await self._delivery.take()
            failure = self._delivery.failure
            if failure is not None and not (is_begun and isinstance(failure, Failed)):
                return self._error_answer()
            is_over = failure is not None or (_has_an_end(pieces) and self._delivery.is_complete)
            goes_on = not is_over and not self._num_written  # and the timelines have all that they want of it
            if goes_on and len(pieces) == 1 and self._writer.is_usual(*pieces[0]):
                await send(
                    {"type": "http.response.body", "body": self._writer.usual_event(*pieces[0]), "more_body": True}
                )
                continue
            events = self._events(pieces, failure if isinstance(failure, Failed) else None, is_over)
            async for block, is_last in _paced(events):
                if not is_begun:
                    is_begun = True
                    await self._begin(
                        send, {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
                    )
                if self._num_written:
                    self._note_written(pieces)
                    pieces = []
                is_end = is_over and is_last
                if block or is_end:
                    await send({"type": "http.response.body", "body": block, "more_body": not is_end})
        return None

    def _write_now(self, index: int, choice: Choice) -> bool:
        """Write what is new of a choice, if it is as usual and goes out at once."""
        if self._num_written or self._direct is None or not self._direct.takes_more:
            return False
        piece = choice.take()
        if self._writer.is_usual(index, piece):
            self._direct.write(self._writer.usual_event(index, piece))
            return True
        choice.put_back(piece)
        return False

    def _note_written(self, pieces: Sequence[tuple[int, Piece]]) -> None:
        """What the client is about to have of a choice whose first two tokens it did not have yet."""
        for index, piece in pieces:
            before = self._num_written.get(index, 2)
            after = min(before + len(piece.token_ids), 2)
            for number in range(before + 1, after + 1):
                self._shell.note_written(*self._delivery.origins[index], number)
            if after < 2 and piece.finish_reason is None:
                self._num_written[index] = after
            else:
                self._num_written.pop(index, None)

    def _as_api_error(self, failed: Failed) -> ApiError:
        if failed.status != 400:
            return ApiError(failed.status, failed.message, code=failed.code, retry_after_s=failed.retry_after_s)
        # Of what is the client's own fault it need not hear who noticed it.
        told = failed.message.split(": ", 1)[-1]
        grammar = self._delivery.answers[0].request.sampling.grammar
        field = (
            grammar.field if grammar is not None and failed.code == "INVALID" else None
        )  # nodes refuse nothing else so
        return self._writer.named(bad_request(field, told, failed.code))

    def _events(self, pieces: Sequence[tuple[int, Piece]], failed: Failed | None, is_over: bool) -> Iterator[bytes]:
        """What a stream says next, in parts."""
        for index, piece in pieces:
            yield from self._writer.chunk(index, piece)
        if failed is not None:
            self._abort()
            yield self._writer.failed(self._as_api_error(failed))
        elif is_over:
            yield self._writer.stream_end()

    async def _begin(self, send: Send, headers: dict[str, str]) -> None:
        lines = [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in (headers | self._answer_headers).items()
        ]
        await send({"type": "http.response.start", "status": 200, "headers": lines})


def _has_an_end(pieces: Sequence[tuple[int, Piece]]) -> bool:
    """Whether an answer of as many choices may be complete with these: the end of each is in a piece."""
    return any(piece.finish_reason is not None for _, piece in pieces)


async def _paced(parts: Iterable[bytes]) -> AsyncIterator[tuple[bytes, bool]]:
    """The parts in blocks, and whether each is the last; whatever else waits for the loop has its turn between two."""
    clock = asyncio.get_running_loop().time
    block, ends_at = bytearray(), clock() + _TURN_S
    for part in parts:
        if len(block) > _BLOCK_BYTES or (block and clock() > ends_at):
            yield bytes(block), False
            await asyncio.sleep(0)
            block, ends_at = bytearray(), clock() + _TURN_S
        block += part
    yield bytes(block), True
