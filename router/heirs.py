"""Which nodes may go on with what others have begun to say. Pure.

A client cannot tell where its answer changes its author, so it must not: what one model has begun no other goes on with, though
both are served beside each other, as they are while nodes get a new one. Where there is a choice it is the same weights on the same
back end, which say bit for bit what would have come; on another back end they may part from that (docs/exactness.md).

Of a fingerprint only the block size says nothing about tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

from proto import baton_pb2 as pb


def heirs(author: bytes, present: Iterable[bytes]) -> tuple[set[bytes], set[bytes]]:
    """Of the fingerprints that are present, those whose nodes say the same as the author's, and those with its weights."""
    own = _voice(author)
    same: set[bytes] = set()
    alike: set[bytes] = set()
    for fingerprint in present:
        other = _voice(fingerprint)
        if other == own:
            same.add(fingerprint)
        if (other.architecture, other.weights) == (own.architecture, own.weights):
            alike.add(fingerprint)
    return same, alike


def _voice(fingerprint: bytes) -> pb.Fingerprint:
    """All of it that tokens depend on."""
    read = pb.Fingerprint.FromString(fingerprint)
    read.ClearField("block_size")
    return read
