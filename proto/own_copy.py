"""Copies of parts of messages, for who keeps them: a part that is looked at keeps the whole message in memory.

Of a step's tokens, which are of all branches of a router, that would be kilobytes for each token's logprobs.
"""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import Message

M = TypeVar("M", bound=Message)


def own_copy(message: M) -> M:
    """The same, in memory of its own."""
    copy = type(message)()
    copy.CopyFrom(message)
    return copy
