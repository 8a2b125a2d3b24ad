"""What a node and the process of a grammar say to each other while they follow it: datagrams of numbers.

    to the process     row, how to take it, tokens        a new row begins, a row goes on, or it ends
    from the process   pid, its own time                  once, first: it has compiled
                       row, outcome, what it cost, mask   for each message that asks

One machine, parent and child: numbers in its own order, and trusted. Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

TOKENS_AT_ONCE: Final = 8192  # a datagram of 32 KiB: what a socket takes without waiting is a few of these
MAX_BYTES: Final = 1 << 19  # of a datagram; a mask has a bit for each token
_ASKED: Final = struct.Struct("=IB")
_TOLD: Final = struct.Struct("=IBdI")
_READY: Final = struct.Struct("=Qd")


class Asks(IntEnum):
    """What becomes of a row, as bits."""

    NOTHING = 0
    BEGINS = 1
    ENDS = 2
    WANTS_MASK = 4


class Outcome(IntEnum):
    """What may follow."""

    MASK = 0  # the tokens of the mask
    ANYTHING = 1  # the completion has ended
    NOTHING = 2  # it is none of the grammar


class Asked(NamedTuple):
    """One message to the process."""

    row: int
    asks: int
    token_ids: Sequence[int]


class Told(NamedTuple):
    """One answer."""

    row: int
    outcome: Outcome
    cost_s: float  # that the process computed for it
    num_tokens: int  # that it took
    mask: bytes


class Ready(NamedTuple):
    """What a process says when it has compiled."""

    pid: int
    cpu_s: float  # that it has computed since it began


def asked(row: int, asks: int, token_ids: Sequence[int] = ()) -> bytes:
    """A message to the process."""
    return _ASKED.pack(row, asks) + np.array(token_ids, np.int32).tobytes()


def opening(row: int, token_ids: Sequence[int]) -> Iterator[bytes]:
    """The messages by which a row begins with these tokens, the last of which asks what may follow."""
    starts = range(0, max(1, len(token_ids)), TOKENS_AT_ONCE)
    for start in starts:
        asks = (Asks.BEGINS if start == 0 else 0) | (Asks.WANTS_MASK if start == starts[-1] else 0)
        yield asked(row, asks, token_ids[start : start + TOKENS_AT_ONCE])


def read_asked(data: bytes) -> Asked:
    """The same, at the other end."""
    row, asks = _ASKED.unpack_from(data)
    return Asked(row, asks, np.frombuffer(data, np.int32, offset=_ASKED.size).tolist())


def told(row: int, allowed: NDArray[np.uint8] | None, cost_s: float, num_tokens: int) -> bytes:
    """An answer; `allowed`: a bit for each token, the first in the lowest; None: anything."""
    if allowed is None:
        return _TOLD.pack(row, Outcome.ANYTHING, cost_s, num_tokens)
    if not allowed.any():
        return _TOLD.pack(row, Outcome.NOTHING, cost_s, num_tokens)
    return _TOLD.pack(row, Outcome.MASK, cost_s, num_tokens) + allowed.tobytes()


def read_told(data: bytes) -> Told:
    """The same, at the other end."""
    row, outcome, cost_s, num_tokens = _TOLD.unpack_from(data)
    return Told(row, Outcome(outcome), cost_s, num_tokens, data[_TOLD.size :])


def ready(pid: int, cpu_s: float) -> bytes:
    """See Ready."""
    return _READY.pack(pid, cpu_s)


def read_ready(data: bytes) -> Ready:
    """The same, at the other end."""
    return Ready(*_READY.unpack(data))


def allowed_of(mask: bytes, vocab_size: int) -> NDArray[np.bool_]:
    """A mask's tokens, [vocab_size]."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=vocab_size, bitorder="little")
    return bits.view(np.bool_)
