"""What a sender calls itself when it opens a link, and how a node's name is read out of that, or out of a link id."""

from __future__ import annotations

from typing import Final

MAX_NAME_BYTES: Final = 255  # of zmq's PLAIN; the other transports keep to it


def user_name(node_id: str, incarnation: int) -> str:
    """What a sender calls itself in the handshake; raises ValueError for a node id that cannot be told from the rest of it."""
    name = f"{node_id}@{incarnation:016x}"
    if not node_id.isprintable() or "@" in node_id or not node_id or len(name.encode()) > MAX_NAME_BYTES:
        raise ValueError(f"node id {node_id!r}: printable, without @, 1 to {MAX_NAME_BYTES - 17} bytes")
    return name


def node_name(name: str) -> str:
    """The node in a user name, or in a link id (`<node>@<incarnation>/<counter>`)."""
    return name.partition("@")[0]


def is_name(text: str) -> bool:
    """Whether a stranger's name for itself may go into logs and counters."""
    return text.isprintable() and 1 <= len(text.encode()) <= MAX_NAME_BYTES
