"""How the bytes of a write get into place, hashed on the way.

Compiled code reads memory once and writes it once, with no Python between two pieces (kernels/cpu/copy.h); a node that has it gives
it to its transports. Whoever has none, and pieces that are no whole stripes, go numpy's way: a piece is copied, then hashed where
it stands. Both let go of the GIL, as assigning to a slice of a memoryview does not: that stalls the thread that runs the model.
Not here: which bytes, and what becomes of their digests (writes.py).
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from connector.checksum import seeded_checksum

STRIPE_BYTES: Final = 64
MIN_STRIPES: Final = 4  # of a piece

Bytes = npt.NDArray[np.uint8]
Places = npt.NDArray[np.int64]  # [num_pieces, 3]: to, from, number of bytes; in bytes from the first of either memory
Words = npt.NDArray[np.uint64]  # [num_pieces]: seeds, or digests


class StripeCopier(Protocol):
    """Compiled code that copies whole stripes to where stripes begin."""

    def __call__(self, to: Bytes, source: Bytes, places: Places, seeds: Words | None) -> Words:
        """As `copy_pieces`; lengths, MIN_STRIPES at least, and addresses to which pieces go are multiples of STRIPE_BYTES."""


def copy_pieces(
    to: Bytes, source: Bytes, places: Places, seeds: Words | None, stripe_copier: StripeCopier | None
) -> Words:
    """Copy pieces of one memory to another (both [bytes], contiguous), every place of which lies within it.

    Returns each piece's xxh3-64 with its seed, of the bytes that were written, whatever became of the source meanwhile; nothing
    without seeds. Raises ValueError for a place outside, before a byte is copied.
    """
    ends = places[:, :2] + places[:, 2:]
    if (places < 0).any() or (ends[:, 0] > to.size).any() or (ends[:, 1] > source.size).any():
        raise ValueError(f"a piece outside of memories of {to.size} and {source.size} bytes")
    if stripe_copier is not None and _are_stripes(to, places):
        return stripe_copier(to, source, places, seeds)
    digests: list[int] = []
    for index, (at, begin, length) in enumerate(places.tolist()):
        piece = to[at : at + length]
        np.copyto(piece, source[begin : begin + length])
        if seeds is not None:  # now, while it is in the processor's cache
            digests.append(seeded_checksum(piece, int(seeds[index])))
    return np.array(digests, np.uint64)


def _are_stripes(to: Bytes, places: Places) -> bool:
    address: int = to.__array_interface__["data"][0]
    is_aligned = not (
        address % STRIPE_BYTES or (places[:, 0] % STRIPE_BYTES).any() or (places[:, 2] % STRIPE_BYTES).any()
    )
    return is_aligned and bool((places[:, 2] >= MIN_STRIPES * STRIPE_BYTES).all())
