"""Where the nixl transport meets: a TCP socket on which two ends say who writes where; the bytes go another way.

An address is `<host>:<port>`, `[<ip>]:<port>`. The link secret crosses it as it is: as with zmq without --tls-dir, this is for a
network that one trusts. The kernel finds a peer's host gone in under 2 s, so that a link fails as soon as one over zmq does.

Source: https://man7.org/linux/man-pages/man7/tcp.7.html
"""

from __future__ import annotations

import contextlib
import re
import socket
from typing import Final

from connector.zmq_options import Place

_BACKLOG: Final = 1024  # all of a cluster may come at once, after this node was started anew
_SILENCE_MS: Final = 1500
_ADDRESS: Final = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([\w.-]+)):(\d{1,5})")


def listen(place: Place) -> tuple[socket.socket, str]:
    """A listening, non-blocking socket, and its address for senders; raises OSError."""
    family, (host, port) = _resolve(place.host, place.port)
    listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    listener.setblocking(False)
    known_as = place.known_as or host
    taken = listener.getsockname()[1]
    return listener, f"[{known_as}]:{taken}" if ":" in known_as else f"{known_as}:{taken}"


def begin_connection(address: str) -> socket.socket | None:
    """A non-blocking socket on its way there; None: that is no address, or there is no socket left."""
    found = _ADDRESS.fullmatch(address)
    if found is None or int(found[3]) > 0xFFFF:
        return None
    try:
        family, at = _resolve(found[1] or found[2], int(found[3]))
        connection = socket.socket(family)
    except (ValueError, OSError):  # ValueError: no name at all, it may have come over the wire
        return None
    prepare(connection)
    try:
        with contextlib.suppress(BlockingIOError):
            connection.connect(at)
    except OSError:
        connection.close()
        return None
    return connection


def prepare(connection: socket.socket) -> None:
    """Neither wait for anything nor for long in vain."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)  # seconds; there is nothing less
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_MS)


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """The host's address, its IPv4 one if it has any."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, at = min(found, key=lambda each: each[0] != socket.AF_INET)
    return family, (str(at[0]), port)
