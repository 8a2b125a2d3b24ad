"""One stored block: how its record is made, and how it is told from anything else. Pure.

    [magic 4][version 1][algorithm 1][0 0][length 8][key 32][checksum 16][block's bytes, length]

The checksum covers key, length and bytes: the right bytes under the wrong key, or of another length, do not pass either.
Without a secret it is xxh3-128, which finds accidents; with the cluster's secret it is BLAKE2b keyed with it (RFC 7693),
which whoever can write into the store, but does not know the secret, cannot make. Then the name under which a record lies is
keyed, too: clusters with different secrets in one store never meet, and names say nothing about prompts.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterable
from typing import Final

import xxhash

from proto.block_key import KEY_BYTES

HEADER_BYTES: Final = 64
IDENTITY_BYTES: Final = 16
_MAGIC: Final = b"btkv"
_VERSION: Final = 1
_XXH3: Final = 0
_BLAKE2B: Final = 1
_HEAD: Final = struct.Struct(f"<4sBB2xQ{KEY_BYTES}s")
_CHECKSUM_BYTES: Final = 16
_MAX_SECRET_BYTES: Final = hashlib.blake2b.MAX_KEY_SIZE

assert _HEAD.size + _CHECKSUM_BYTES == HEADER_BYTES


class KvRecords:
    """The records of one model's blocks in one cluster."""

    def __init__(self, block_bytes: int, secret: bytes | None = None) -> None:
        """`secret`: of the cluster, of any length but empty; None: it has none. Raises ValueError."""
        if block_bytes <= 0:
            raise ValueError(f"a block of {block_bytes} bytes")
        if secret == b"":
            raise ValueError("an empty secret keeps nobody out")
        self.block_bytes = block_bytes
        self.record_bytes = HEADER_BYTES + block_bytes
        too_long = secret is not None and len(secret) > _MAX_SECRET_BYTES
        self._secret = hashlib.sha256(secret).digest() if secret is not None and too_long else secret

    def name(self, key: bytes) -> bytes:
        """What a record lies under: 32 bytes. Raises ValueError for a key of another length."""
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key of {len(key)} bytes, not {KEY_BYTES}")
        if self._secret is None:
            return key
        return hashlib.blake2b(key, digest_size=KEY_BYTES, key=self._secret, person=b"baton kv name").digest()

    def identity(self, drawn: bytes) -> bytes:
        """16 bytes that stand for a store where this was once drawn, and for this cluster's secret."""
        return self.name(hashlib.sha256(drawn).digest())[:IDENTITY_BYTES]

    def check_lengths(self, blocks: Iterable[memoryview]) -> None:
        """Raises ValueError for what is no whole block."""
        for block in blocks:
            if block.nbytes != self.block_bytes:
                raise ValueError(f"a block of {block.nbytes} bytes, not {self.block_bytes}")

    def header(self, key: bytes, block: memoryview) -> bytes:
        """What stands before the block's bytes: [HEADER_BYTES]. Raises ValueError for a key or block of another length."""
        head = self._head(key, block)
        return head + self._checksum(head, block)

    def is_right(self, key: bytes, header: bytes | bytearray | memoryview, block: memoryview) -> bool:
        """Whether the header belongs to this key and these bytes; of any bytes as header."""
        head = self._head(key, block)
        if bytes(header[: _HEAD.size]) != head:  # cheap, before the checksum
            return False
        return hmac.compare_digest(bytes(header[_HEAD.size :]), self._checksum(head, block))

    def _head(self, key: bytes, block: memoryview) -> bytes:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key of {len(key)} bytes, not {KEY_BYTES}")
        self.check_lengths([block])
        return _HEAD.pack(_MAGIC, _VERSION, _XXH3 if self._secret is None else _BLAKE2B, self.block_bytes, key)

    def _checksum(self, head: bytes, block: memoryview) -> bytes:
        if self._secret is None:
            fast = xxhash.xxh3_128(head)
            fast.update(block)
            return fast.digest()
        keyed = hashlib.blake2b(head, digest_size=_CHECKSUM_BYTES, key=self._secret, person=b"baton kv block")
        keyed.update(block)
        return keyed.digest()
