"""Another node's KV memory, as this process sees it: mapped for reading, looked over first, so that reading can do no harm.

What a peer hands over is believed only as far as the kernel vouches for it: an anonymous file that can neither shrink nor be
written by whoever is given it nor lose a page (the seals; F_SEAL_FUTURE_WRITE forbids punching holes too), that has the size its
owner says, and all of it in memory already. So no read can raise SIGBUS, whatever its owner does or however it dies, and none
allocates memory here.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
from typing import Final

import numpy as np

from connector.writes import Bytes

F_SEAL_FUTURE_WRITE: Final = 0x10  # linux/fcntl.h; Python names it from 3.13 on
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE
_BYTES_PER_TURN: Final = 64 << 20  # some milliseconds of page tables


class PeerMemory:
    """Maps at once; the page tables are filled turn by turn, so that nothing else on the thread has to wait for them."""

    def __init__(self, descriptor: int, num_blocks: int, block_bytes: int) -> None:
        """Raise ValueError for a descriptor that is not what its owner says. The descriptor stays the caller's."""
        num_bytes = num_blocks * block_bytes
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or not 0 < num_bytes == about.st_size:
            raise ValueError(f"{about.st_size} bytes for {num_blocks} blocks of {block_bytes}")
        if about.st_blocks * 512 < num_bytes:
            raise ValueError(f"only {about.st_blocks * 512} of {num_bytes} bytes are there")
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError:
            raise ValueError("not sealed: no memfd") from None
        if seals & _SEALS != _SEALS:
            raise ValueError(f"not sealed: {seals:#x}")
        try:
            mapping = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except OSError as fault:
            raise ValueError(f"cannot be mapped: {fault.strerror}") from None
        self._flat = np.frombuffer(mapping, np.uint8)
        self._num_populated = 0
        self.bytes: Final[Bytes] = self._flat.reshape(num_blocks, block_bytes)

    @property
    def is_populated(self) -> bool:
        """Whether no read will have to wait for a page table entry."""
        return self._num_populated == self._flat.nbytes

    def populate_some(self) -> bool:
        """Look at the next pages and say `is_populated`; numpy lets go of the GIL for that, which the mmap module does not."""
        end = min(self._num_populated + _BYTES_PER_TURN, self._flat.nbytes)
        self._flat[self._num_populated : end : mmap.PAGESIZE].max()
        self._num_populated = end
        return self.is_populated
