"""Names of hosts in link addresses, `[tcp://]NAME:PORT`, and the addresses that a name server has for them.

Not here: who waits for a name server, which may be slow (sender_thread.py).
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from typing import Final

_TRY_S: Final = 0.5  # to connect to one of a name's addresses, where another one may answer
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
    return _addresses(host)[0]


def find_reachable(place: str, host: str) -> str:
    """The same place with its host's address; of an IPv4 and an IPv6 one the first that answers. Raises OSError as `numeric`.

    Who listens at one of them need not listen at the other. May take a second, besides the name's look-up.
    """
    addresses = _addresses(host)
    port = int(place.rpartition(":")[2])
    for address in addresses if len(addresses) > 1 else ():
        with contextlib.suppress(OSError, OverflowError):  # OverflowError: no port
            socket.create_connection((address, port), _TRY_S).close()
            return with_address(place, address)
    return with_address(place, addresses[0])


def _addresses(host: str) -> list[str]:
    """The first that it has of each kind, IPv4 before IPv6."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, ValueError):  # ValueError: no name at all, it may have come over the wire
        raise OSError(f"{host} has no address") from None
    of_kind = {family: str(at[0]) for family, _, _, _, at in reversed(found)}
    return [of_kind[family] for family in (socket.AF_INET, socket.AF_INET6) if family in of_kind]
