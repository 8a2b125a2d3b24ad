"""Where the nixl transport meets: a TCP socket on which two ends say who writes where; the bytes go another way.

An address is `<ip>:<port>`, `[<ip>]:<port>`. The link secret crosses it as it is: as with zmq without --tls-dir, this is for a
network that one trusts. The kernel finds a peer's host gone in under 2 s, so that a link fails as soon as one over zmq does.

Source: https://man7.org/linux/man-pages/man7/tcp.7.html
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from typing import Final

_BACKLOG: Final = 1024  # all of a cluster may come at once, after this node was started anew
_SILENCE_MS: Final = 1500
_ADDRESS: Final = re.compile(r"\[?([0-9a-fA-F:.]+)\]?:(\d{1,5})")


def listen(host: str) -> tuple[socket.socket, str]:
    """A listening, non-blocking socket, and its address; raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
    listener.setblocking(False)
    port = listener.getsockname()[1]
    return listener, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def begin_connection(address: str) -> socket.socket | None:
    """A non-blocking socket on its way there; None: that is no address, or there is no socket left."""
    found = _ADDRESS.fullmatch(address)
    if found is None or int(found[2]) > 0xFFFF:
        return None
    try:
        ip = ipaddress.ip_address(found[1])
        connection = socket.socket(socket.AF_INET6 if ip.version == 6 else socket.AF_INET)
    except (ValueError, OSError):
        return None
    prepare(connection)
    try:
        with contextlib.suppress(BlockingIOError):
            connection.connect((str(ip), int(found[2])))
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
