"""Copies of host memory by the compiled library: past the caches, hashed on the way (kernels/cpu/copy.h).

It is for KV that arrives, whatever computes with it, be it a GPU. Not here: who asks for it (connector/copying.py).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kernels.cpu_build import library_path, usable_variants
from kernels.cpu_library import Library, address


class CpuCopier:
    """connector.copying.StripeCopier, by one variant. Calls let go of the GIL."""

    def __init__(self, library: Library) -> None:
        self._copy = library.call.baton_copy

    def __call__(
        self,
        to: NDArray[np.uint8],
        source: NDArray[np.uint8],
        places: NDArray[np.int64],
        seeds: NDArray[np.uint64] | None,
    ) -> NDArray[np.uint64]:
        """Copy places ([num_pieces, 3]: to, from, bytes); their xxh3-64 with these seeds, nothing without.

        Raises ValueError for a seed too many or too few, and for other types than these.
        """
        if places.dtype != np.int64 or (seeds is not None and (seeds.dtype != np.uint64 or len(seeds) != len(places))):
            raise ValueError("places are int64, and seeds uint64, one for each")
        digests = np.empty(0 if seeds is None else len(places), np.uint64)
        seeds_at = None if seeds is None else address(seeds)
        self._copy(address(to), address(source), address(places), len(places), seeds_at, address(digests))
        return digests


def find_copier() -> CpuCopier | None:
    """By the best variant that this CPU runs; None: none was compiled."""
    for variant in usable_variants():
        path = library_path(variant)
        if path.exists():
            try:
                return CpuCopier(Library(path))
            except OSError:  # another version's
                continue
    return None
