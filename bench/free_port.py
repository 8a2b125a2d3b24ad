"""A port for a server that somebody else starts: one that nobody has, and that the kernel gives to nobody meanwhile."""

from __future__ import annotations

import random
import socket
from pathlib import Path
from typing import Final

_LOWEST: Final = 15_000
_GIVEN_OUT: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")  # to outgoing connections, and to who binds to 0
_GIVEN_OUT_FROM: Final = 32_768  # where that file is not
_TRIES: Final = 100


def free_port() -> int:
    """A TCP port below the kernel's own range. Raises OSError if a hundred drawn ones are all taken."""
    given_out_from = int(_GIVEN_OUT.read_text(encoding="ascii").split()[0]) if _GIVEN_OUT.exists() else _GIVEN_OUT_FROM
    drawn = random.SystemRandom().sample(range(_LOWEST, max(given_out_from, _LOWEST + _TRIES)), _TRIES)
    for port in drawn:
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
    raise OSError(f"{_TRIES} ports from {_LOWEST} on are all taken")
