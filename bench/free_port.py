"""A port for a server that somebody else starts: one that nobody has, and that nobody is given meanwhile.

The kernel gives it to nobody, as it lies below the range out of which it does; nor does another process that asks here, since each
has a share of the ports of its own while it lives; nor this one again, until it has been through its share.
"""

from __future__ import annotations

import atexit
import os
import random
import socket
from collections.abc import Iterator
from functools import cache
from itertools import cycle
from pathlib import Path
from threading import Lock
from typing import Final

_LOWEST: Final = 15_000
_GIVEN_OUT: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")  # to outgoing connections, and to who binds to 0
_GIVEN_OUT_FROM: Final = 32_768  # where that file is not
_NUM_SHARES: Final = 32
_TRIES: Final = 100
_LOCK: Final = Lock()


def free_port() -> int:
    """A TCP port below the kernel's own range. Raises OSError if a hundred are all taken, or all shares are."""
    with _LOCK:
        share = _share_of(os.getpid())
        for _ in range(_TRIES):
            port = next(share.ports)
            try:
                socket.create_server(("127.0.0.1", port)).close()
            except OSError:
                continue
            return port
    raise OSError(f"{_TRIES} ports from {_LOWEST} on are all taken")


class _Share:
    """Ports that no other process of this user and network is given here while this one lives."""

    def __init__(self) -> None:
        # An abstract name is gone with the process, and belongs to one network, as ports do.
        self._claim = socket.socket(socket.AF_UNIX)
        atexit.register(self._claim.close)
        number = next((each for each in range(_NUM_SHARES) if self._is_ours(each)), None)
        if number is None:
            self._claim.close()
            raise OSError(f"{_NUM_SHARES} other processes draw ports")
        below = int(_GIVEN_OUT.read_text(encoding="ascii").split()[0]) if _GIVEN_OUT.exists() else _GIVEN_OUT_FROM
        ports = list(range(_LOWEST, max(below, _LOWEST + _TRIES * _NUM_SHARES)))[number::_NUM_SHARES]
        random.SystemRandom().shuffle(ports)
        self.ports: Iterator[int] = cycle(ports)

    def _is_ours(self, number: int) -> bool:
        try:
            self._claim.bind(f"\0baton-ports-{os.getuid()}-{number}")
        except OSError:
            return False
        return True


@cache
def _share_of(_: int) -> _Share:
    """Of a process: a fork's is another."""
    return _Share()
