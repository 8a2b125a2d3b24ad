"""The URL of a server as commands are told it: read in one way by all that ask over HTTP, before any of them asks.

Not here: asking; addresses of registries, pools and collectors, which are URLs of other kinds.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Final

import httpx

_MUST: Final = "must be http(s)://HOST[:PORT][/PREFIX]"
_MAX_PORT: Final = 65535


def read_url(url: str) -> httpx.URL:
    """As it goes over the wire: names as DNS has them, a prefix percent-encoded and without `/` or `/v1` at its end.

    An IPv6 zone may be written `%eth0` or, as RFC 6874 has it, `%25eth0`. Raises ValueError: one sentence, which begins with the
    URL unless there is a password in it, which ps and logs would show.
    """
    if "@" in (re.match(r"[^/?#]*//([^/?#]*)", url) or ("", ""))[1]:
        raise ValueError("a URL here has no user and no password in it: whoever wants a key is shown --api-key's")
    told = ValueError(f"{url}: {_MUST}")
    if not url.isprintable() or re.search(r"[\s\\]", url):
        raise told
    try:
        read = httpx.URL(re.sub(r"^([^/]*//\[[^]%]*)%25", r"\1%", url))
        host = read.raw_host.decode("ascii")
        is_address = ":" in host and ipaddress.ip_address(host).version == 6
        name = host if is_address else host.encode("idna").decode("ascii")  # as what looks it up will
    except (httpx.InvalidURL, ValueError):
        raise told from None
    if read.scheme not in ("http", "https") or not name.strip(".") or "?" in url or "#" in url:
        raise told
    if read.port is not None and not 0 < read.port <= _MAX_PORT:
        raise told
    return read.copy_with(raw_path=read.raw_path.rstrip(b"/").removesuffix(b"/v1").rstrip(b"/"))
