"""The bodies of requests: of whom they are read, how long one may be, and how much of all may be on its way.

A page of another site, open in a browser that reaches this router, can POST to it without asking, as long as that looks like a form
(no preflight: the CORS protocol, https://fetch.spec.whatwg.org). Its answer would stay unread, but its tokens are computed, so what
looks like that is not read. JSON from there is asked for first, which is never granted here, or by who answers in front.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from starlette.requests import Request

from router.foreign_pages import is_json, is_of
from router.openai_types import ApiError

SMALL: Final = 64 << 10  # bytes of each body that are not counted among all that are on their way
_MOST_LARGE: Final = 32  # bodies of the largest size that are on their way at once


class Bodies:
    """Reads them."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: of one."""
        self._max_bytes = max_bytes
        self._max_under_way = _MOST_LARGE * max_bytes
        self._num_under_way = 0

    async def read(self, request: Request) -> bytes:
        """One of them. ApiError while it is read, once it is too large or too much of others is on its way."""
        _check_sender(request.headers)
        too_large = ApiError(413, f"The body is larger than {self._max_bytes} bytes.", code="body_too_large")
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > self._max_bytes:
            raise too_large
        content = bytearray()
        num_counted = 0
        try:
            async for chunk in request.stream():
                content += chunk
                if len(content) > self._max_bytes:
                    raise too_large
                if (num_more := max(len(content) - SMALL, 0) - num_counted) > 0:
                    self._count(num_more)
                    num_counted += num_more
            return bytes(content)
        finally:
            self._num_under_way -= num_counted

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
