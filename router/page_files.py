"""The dashboard's own files, as they lie in router/page: plain HTML, CSS and ES modules, for whoever asks. No build step.

They hold nothing of the cluster, so nobody is asked for a key (gate.py); what they then ask for is. The browser is told to run
nothing but these files, to talk to nobody but this router, and to make no HTML of text (Trusted Types).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

INDEX: Final = "/"
PREFIX: Final = "/dashboard/page/"
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class PageFiles:
    """All files, read once."""

    def __init__(self) -> None:
        folder = Path(__file__).with_name("page")
        self._files = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in _TYPES}
        self._tags = {name: f'"{hashlib.sha256(data).hexdigest()[:32]}"' for name, data in self._files.items()}

    def answer(self, request: Request, name: str) -> Response | None:
        """A file by its name, or 304 where the browser has it; None: there is none."""
        if (data := self._files.get(name)) is None:
            return None
        headers = {**HEADERS, "ETag": self._tags[name]}
        if request.headers.get("if-none-match") == self._tags[name]:
            return Response(status_code=304, headers=headers)
        return Response(data, headers=headers, media_type=_TYPES["." + name.rpartition(".")[2]])
