"""Keys of full KV blocks: equal on every node and on the router, so that a block is found wherever it is.

The key of block n is SHA-256(key of block n-1, token ids of block n, extra keys), seeded with the model's
fingerprint: two models never share a key, and a key names the whole prefix, not just its own tokens.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence

KEY_BYTES = 32


def fingerprint_bytes(fields: Mapping[str, str | int]) -> bytes:
    """What seed_key takes, from a fingerprint's fields by name: same fields, same bytes, on every machine and in every room."""
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def seed_key(fingerprint: bytes) -> bytes:
    """The key before block 0 of every sequence of the model with these fingerprint bytes."""
    return hashlib.sha256(b"baton block key\0" + fingerprint).digest()


def next_key(previous: bytes, token_ids: Sequence[int], extra: Iterable[bytes] = ()) -> bytes:
    """The key of a full block that holds `token_ids`, behind the block with key `previous`."""
    in_four_bytes = token_ids if isinstance(token_ids, array) and token_ids.typecode == "I" else array("I", token_ids)
    digest = hashlib.sha256(previous + in_four_bytes.tobytes())
    for item in extra:
        digest.update(len(item).to_bytes(4, "little") + item)
    return digest.digest()


def block_keys(seed: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Keys of all full blocks of a sequence, in order; the incomplete tail has none."""
    keys: list[bytes] = []
    previous = seed
    id_bytes = memoryview(array("I", token_ids)).cast("B")
    step = block_size * array("I").itemsize
    for start in range(0, len(id_bytes) - step + 1, step):
        digest = hashlib.sha256(previous)
        digest.update(id_bytes[start : start + step])
        previous = digest.digest()
        keys.append(previous)
    return keys
