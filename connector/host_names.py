"""Names of hosts in link addresses, `[tcp://]NAME:PORT`, and the addresses that a name server has for them.

Not here: who waits for a name server, which may be slow (sender_thread.py).
"""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import Final

_PLACE: Final = re.compile(r"((?:tcp://)?)([\w.-]+)(:\d{1,5})")


def named_host(place: str) -> str | None:
    """The name in it; None: there is none, and nothing to be looked up."""
    found = _PLACE.fullmatch(place)
    if found is None:
        return None
    try:
        ipaddress.ip_address(found[2])
    except ValueError:
        return found[2]
    return None


def with_address(place: str, address: str) -> str:
    """The same place, its name replaced."""
    found = _PLACE.fullmatch(place)
    assert found is not None, place
    return f"{found[1]}{f'[{address}]' if ':' in address else address}{found[3]}"


def numeric(host: str) -> str:
    """The host's address, its IPv4 one if it has any; an address as it is. Raises OSError, a sentence, if it has none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, ValueError):  # ValueError: no name at all, it may have come over the wire
        raise OSError(f"{host} has no address") from None
    return str(min(found, key=lambda each: each[0] != socket.AF_INET)[4][0])
