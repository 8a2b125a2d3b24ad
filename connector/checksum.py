"""The checksum of a piece of a block on its way to another node.

xxh3-64 over the bytes, seeded with the lease and the place they are meant for: the right bytes at the wrong place do not pass
either. It finds accidents, not forgers; what keeps strangers out is the link's and the lease's secret.
Source: https://github.com/Cyan4973/xxHash (XXH3 with seed).
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

_PLACE: Final = struct.Struct("<QII")  # lease id, block index, offset


def piece_checksum(data: npt.NDArray[np.uint8], lease_id: int, block_index: int, offset: int) -> int:
    """Hash contiguous bytes (data: [length] u8) that go to `offset` of the lease's block; unsigned 64 bits."""
    return seeded_checksum(data, place_seed(lease_id, block_index, offset))


def place_seed(lease_id: int, block_index: int, offset: int) -> int:
    """What the place adds to a piece's checksum; unsigned 64 bits."""
    return xxhash.xxh3_64_intdigest(_PLACE.pack(lease_id, block_index, offset))


def seeded_checksum(data: npt.NDArray[np.uint8], seed: int) -> int:
    """Hash contiguous bytes (data: [length] u8) for a place."""
    return xxhash.xxh3_64_intdigest(data.data, seed)
