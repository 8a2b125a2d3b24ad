"""Another node's KV memory, as this process sees it: mapped for reading, looked over first, so that reading can do no harm.

What a peer hands over is believed only as far as the kernel vouches for it: an anonymous file that can neither shrink nor be
written by whoever is given it nor lose a page (the seals; F_SEAL_FUTURE_WRITE forbids punching holes too), that has the size its
owner says, and all of it in memory already. So no read can raise SIGBUS, whatever its owner does or however it dies, and none
allocates memory here. What is mapped counts in this process' RSS as well as in its owner's, though it exists once; PSS and
cgroups (which charge the owner) tell the truth.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from threading import Thread
from typing import Final

import numpy as np

from connector.copying import Bytes

F_SEAL_FUTURE_WRITE: Final = 0x10  # linux/fcntl.h; Python names it from 3.13 on
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE
_MADV_POPULATE_READ: Final = 22  # linux/mman.h, from Linux 5.14 on; Python does not name it
_BYTES_PER_TURN: Final = 16 << 20  # a quarter of a millisecond of page tables, for which the mmap module keeps the GIL


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
        self._num_bytes = num_bytes
        self._num_populated = 0
        # All that keeps the memory mapped stands here, so that `release` can give it away.
        self._held = [(mapping, np.frombuffer(mapping, np.uint8).reshape(num_blocks, block_bytes))]

    @property
    def bytes(self) -> Bytes:
        """[num_blocks, block_bytes] u8, not to be written; not after `release`."""
        return self._held[0][1]

    @property
    def is_populated(self) -> bool:
        """Whether no read will have to wait for a page table entry."""
        return self._num_populated == self._num_bytes

    def populate_some(self) -> bool:
        """Fill the page tables of the next pages and say `is_populated`; raises ValueError if the kernel cannot."""
        begin = self._num_populated
        end = min(begin + _BYTES_PER_TURN, self._num_bytes)
        mapping, blocks = self._held[0]
        try:
            mapping.madvise(_MADV_POPULATE_READ, begin, end - begin)
        except OSError as fault:
            if fault.errno != errno.EINVAL:
                raise ValueError(f"cannot be populated: {fault.strerror}") from None
            blocks.reshape(-1)[begin : end : mmap.PAGESIZE].max()  # an older kernel: five times as slow
        self._num_populated = end
        return self.is_populated

    def release(self) -> None:
        """Unmap, on a thread of its own: what a dead owner leaves is freed by who had it mapped last, 50 ms for each GiB."""
        doomed, self._held = self._held, []
        try:
            Thread(target=doomed.clear, name="shm-unmapper", daemon=True).start()
        except RuntimeError:  # no thread left
            doomed.clear()
