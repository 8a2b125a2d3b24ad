"""Another node's KV memory, as this process sees it: mapped for reading, looked over first, so that reading can do no harm.

What a peer hands over is believed only as far as the kernel vouches for it: an anonymous file that can neither shrink nor be
written by whoever is given it nor lose a page (the seals; F_SEAL_FUTURE_WRITE forbids punching holes too), that has the size its
owner says, and all of it in memory already. So no read can raise SIGBUS, whatever its owner does or however it dies, and none
allocates memory here. What is mapped counts in this process' RSS as well as in its owner's, though it exists once; PSS and
cgroups (which charge the owner) tell the truth.
"""

from __future__ import annotations

import ctypes
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
_HUGE_PAGE: Final = 2 << 20
_MAP_FIXED: Final = 0x10  # linux/mman.h, as the next
_MAP_NORESERVE: Final = 0x4000
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_LIBC: Final = ctypes.CDLL(None, use_errno=True)  # Python's mmap takes no address
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_LIBC.mmap.restype = ctypes.c_void_p
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
            mapping, self._begin = _mapped(descriptor, num_bytes)
        except OSError as fault:
            raise ValueError(f"cannot be mapped: {fault.strerror}") from None
        self._num_bytes = num_bytes
        self._num_populated = 0
        # All that keeps the memory mapped stands here, so that `release` can give it away.
        blocks = np.frombuffer(mapping, np.uint8, num_bytes, self._begin).reshape(num_blocks, block_bytes)
        self._held = [(mapping, blocks)]

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
            mapping.madvise(_MADV_POPULATE_READ, self._begin + begin, end - begin)
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


def _mapped(descriptor: int, num_bytes: int) -> tuple[mmap.mmap, int]:
    """The file for reading, and where in the mapping it begins: where a huge page may, or its huge pages are read as small ones.

    Copying from those takes half as long again. Raises OSError.
    """
    if num_bytes < _HUGE_PAGE:
        return mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ), 0
    # Addresses to choose from; whoever drops them drops the file's mapping among them.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    room = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=flags, prot=mmap.PROT_READ)
    address = np.frombuffer(room, np.uint8).ctypes.data
    begin = -address % _HUGE_PAGE
    place = _LIBC.mmap(address + begin, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, descriptor, 0)
    if place == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return room, begin
