"""The bodies of requests: of whom they are read, how long one may be, and how much of all may be on its way.

A page of another site, open in a browser that reaches this router, can POST to it without asking, as long as that looks like a form
(no preflight: the CORS protocol, https://fetch.spec.whatwg.org). Its answer would stay unread, but its tokens are computed, so what
looks like that is not read. JSON from there is asked for first, which is never granted here, or by who answers in front.

A body is on its way until it is tokens: what waits for a turn to be parsed is there, too.
"""

from __future__ import annotations

from asyncio import CancelledError, Timeout
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from starlette.requests import ClientDisconnect, Request

from router.foreign_pages import is_json, is_of
from router.openai_types import ApiError
from router.wrong_values import SHOWN_LENGTH
from runtime.http_protocol import DIRECT, DirectWay
from runtime.logs import printable

SMALL: Final = 64 << 10  # bytes of each body that are not counted among all that are on their way
_MOST_LARGE: Final = 32  # bodies of the largest size that are on their way at once


class HeldBody:
    """What was read; within `with` its request is worked on, as long as its client is there."""

    def __init__(self, content: bytes, give_back: Callable[[], None], way: DirectWay | None, patience: Timeout) -> None:
        self._content = content
        self._give_back = give_back
        self._way = way
        self._patience = patience
        self._is_unwanted = False

    def __enter__(self) -> bytes:
        if self._way is not None:
            self._way.when_lost(self._stop)
        return self._content

    def __exit__(self, _: object, ended_by: BaseException | None, __: object) -> None:
        if self._way is not None:
            self._way.when_lost(None)
        self._give_back()
        if self._is_unwanted and isinstance(ended_by, CancelledError):
            raise ClientDisconnect from ended_by

    def _stop(self) -> None:
        """The client has gone: what waits for a turn gives it up."""
        if not self._patience.expired():
            self._is_unwanted = True
            self._patience.reschedule(-1.0)


class Bodies:
    """Reads them."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: of one."""
        self._max_bytes = max_bytes
        self._max_under_way = _MOST_LARGE * max_bytes
        self._num_under_way = 0

    async def read(self, request: Request, patience: Timeout) -> HeldBody:
        """One of them. ApiError while it is read, once it is too large or too much of others is on its way.

        `patience`: what is done with it ends with that, or with ClientDisconnect.
        """
        _check_sender(request.headers)
        _check_encoding(request.headers)
        too_large = ApiError(413, f"The body is larger than {self._max_bytes} bytes.", code="body_too_large")
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > self._max_bytes:
            raise too_large
        content = bytearray()
        num_counted, is_read = 0, False
        try:
            async for chunk in request.stream():
                content += chunk
                if len(content) > self._max_bytes:
                    raise too_large
                if (num_more := max(len(content) - SMALL, 0) - num_counted) > 0:
                    self._count(num_more)
                    num_counted += num_more
            is_read = True
            way = request.scope.get("extensions", {}).get(DIRECT)
            return HeldBody(bytes(content), partial(self._give_back, num_counted), way, patience)
        finally:
            if not is_read:
                self._give_back(num_counted)

    def _give_back(self, num_bytes: int) -> None:
        self._num_under_way -= num_bytes

    def _count(self, num_bytes: int) -> None:
        if self._num_under_way + num_bytes > self._max_under_way:
            told = f"More than {self._max_under_way} bytes of large bodies are on their way here."
            raise ApiError(503, told, code="too_many_bodies", retry_after_s=1.0)
        self._num_under_way += num_bytes


def _check_sender(headers: Mapping[str, str]) -> None:
    origin = headers.get("origin")
    if origin is not None and not is_of(origin, headers.get("host", "")) and not is_json(headers):
        told = (
            "What a page of another site sends must be application/json, so that its browser asks before it sends it."
        )
        raise ApiError(415, told, code="foreign_page")


def _check_encoding(headers: Mapping[str, str]) -> None:
    """Nothing is unpacked here: a few bytes can be gigabytes then."""
    encodings = [each.strip() for each in headers.get("content-encoding", "").split(",")]
    unknown = [each for each in encodings if each.lower() not in ("", "identity")]
    if unknown:
        told = f"Content-Encoding: {printable(unknown[0][:SHOWN_LENGTH])} is not taken; send the body plain."
        raise ApiError(415, told, code="content_encoding")
