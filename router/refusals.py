"""The answer to a request that no node hears of, under a name by which the log can be searched.

The client's own `X-Request-Id` is echoed and logged, never a key; without one that can be echoed the answer carries one of ours.
"""

from __future__ import annotations

import logging
import re
import secrets
from typing import Final

from starlette.requests import HTTPConnection
from starlette.responses import Response

from router.openai_types import MAX_REQUEST_ID_LENGTH, REQUEST_ID_PATTERN, ApiError
from router.streaming import error_answer
from runtime.logs import log_event

_LOG: Final = logging.getLogger(__name__)
REQUEST_ID: Final = "X-Request-Id"
_PLAIN: Final = re.compile(r"[A-Za-z0-9_.]{1,64}")


def is_request_id(name: str) -> bool:
    """Whether it can be echoed."""
    return len(name) <= MAX_REQUEST_ID_LENGTH and re.match(REQUEST_ID_PATTERN, name) is not None


def id_header(request: HTTPConnection) -> dict[str, str]:
    """The client's own name for a request, to be echoed, if it gave one that can be."""
    name = request.headers.get(REQUEST_ID)
    return {} if name is None or not is_request_id(name) else {REQUEST_ID: name}


def refusal(error: ApiError, headers: dict[str, str]) -> Response:
    """The answer, logged; `headers` gets a request id if it has none."""
    request_id = headers.setdefault(REQUEST_ID, secrets.token_hex(12))
    # A sentence about a bad request repeats what the client wrote: that is for the client alone, who has it in the answer.
    field = error.param if error.param is not None and _PLAIN.fullmatch(error.param) else None
    what = {"error": error.message} if error.status >= 500 else {} if field is None else {"field": field}
    log_event(_LOG, logging.INFO, "request_refused", request=request_id, status=error.status, code=error.code, **what)
    return error_answer(error, headers)
