"""The seed of each choice of a request. Pure, and part of the API: answers name the seeds, so that a choice can be drawn again."""

from __future__ import annotations

import hashlib
from typing import Final

SEED_BITS: Final = 53  # of a seed that is drawn: whole numbers that every JSON parser keeps


def branch_seed(seed: int, choice: int) -> int:
    """The effective seed of a request's choice; a request of its own with this seed gets the same completion.

    Choice 0 has the request's seed. Choice c > 0 has the first 53 bits (little-endian, the lowest ones) of the SHA-256 of
    `baton choice <seed> <c>` in ASCII, both numbers in decimal.
    """
    if choice == 0:
        return seed
    digest = hashlib.sha256(f"baton choice {seed} {choice}".encode("ascii")).digest()
    return int.from_bytes(digest[:8], "little") & ((1 << SEED_BITS) - 1)
