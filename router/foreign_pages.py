"""What a browser says of the page that sends a request (Fetch, https://fetch.spec.whatwg.org; RFC 6454). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit


def is_json(headers: Mapping[str, str]) -> bool:
    """Whether it is said to be what a browser sends to no other site without having asked there."""
    return headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"


def is_of(origin: str, host: str) -> bool:
    """Whether a page of this origin belongs to who was called by this name."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return bool(host) and parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower()
