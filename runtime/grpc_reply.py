"""What gRPC's client says of a reply that does not parse: nothing, it gives None in its place."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError

T = TypeVar("T")


def parsed(reply: T | None) -> T:
    """What a call gave. Raises DecodeError for what did not parse."""
    if reply is None:
        raise DecodeError("the reply does not parse")
    return reply
