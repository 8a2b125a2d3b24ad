"""Where the shm transport meets: an abstract unix socket, for processes of this host and this user.

An abstract name lives in the kernel alone (nothing in any folder, gone with the socket) and in one network namespace. An address
is `<boot id>/<name>`: the boot id tells another host that happens to know the name, the name's 128 random bits tell this receiver
from all others. Each end asks the kernel for the other's user (SO_PEERCRED) before it says anything.

Sources: https://man7.org/linux/man-pages/man7/unix.7.html; boot id: https://man7.org/linux/man-pages/man4/random.4.html
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import struct
from pathlib import Path
from typing import Final

from proto import baton_pb2 as pb

_BACKLOG: Final = 1024  # all of a cluster may come at once, after this node was started anew
_UCRED: Final = struct.Struct("iII")  # pid, uid, gid
_NAME: Final = re.compile(r"baton-[0-9a-f]{32}")


def listen() -> tuple[socket.socket, str]:
    """A listening, non-blocking socket under a fresh name, and its address; raises OSError where there are no such sockets."""
    name = f"baton-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(b"\0" + name.encode())
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener, f"{_boot_id()}/{name}"


def find_connection(endpoint: pb.Endpoint) -> socket.socket | None:
    """A connected, non-blocking socket; None: nobody of this host and user listens there."""
    boot_id, _, name = endpoint.address.partition("/")
    if endpoint.transport != "shm" or not _NAME.fullmatch(name):
        return None
    try:
        if boot_id != _boot_id():
            return None
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError:  # no descriptor left: this link fails, not the node
        return None
    connection.setblocking(False)
    try:
        connection.connect(b"\0" + name.encode())  # succeeds or fails at once; a full backlog is a failure
    except OSError:
        connection.close()
        return None
    if not is_same_user(connection):
        connection.close()
        return None
    return connection


def is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end ran as this user when it connected, or began to listen."""
    _, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return bool(uid == os.geteuid())


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
