"""Whether a browser's wish to kill a node comes from the router's own dashboard. Pure.

Whoever may open the page may press its button. What must not be: that another site, open in the same browser, presses it. A browser
says with each POST which page sends it (`Origin`, RFC 6454; `Sec-Fetch-Site`), and asks before it sends JSON elsewhere (CORS),
which is never granted. That page could have a name of its own point to this address (DNS rebinding), so the router must have
been called by an address, or as localhost: nobody else's name is that.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from router.foreign_pages import is_json, is_of

MAX_BODY: Final = 1024  # bytes


def find_objection(headers: Mapping[str, str]) -> str | None:
    """One sentence for who is turned away; None: it may. `headers`: by names in lower case."""
    host, origin = headers.get("host", ""), headers.get("origin", "")
    if headers.get("sec-fetch-site", "same-origin") != "same-origin" or not is_of(origin, host):
        return "Only the router's own dashboard may ask for this."
    if not is_json(headers):
        return "This wants JSON."
    if not _is_address(host):
        return "Open the dashboard by the router's address, or as localhost: other names may be anybody's."
    return None


def _is_address(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False
