"""KV memory that other processes of this host may be allowed to look at: an anonymous file (memfd), all there from the start.

    this process     mapped for reading and writing, once; so have the other ranks of the node, where there are any
    whoever is       can map it for reading; the seals refuse everybody, this process included, another writable mapping,
    given the         write(), punching holes, and a change of size: so no reader ever meets a page that is gone (SIGBUS)
    descriptor

It lies on huge pages where the kernel has such (MADV_COLLAPSE, Linux 6.1), at addresses that suit them: a step reads pieces of a
few KiB from all over it, and each small page would have to be looked up first. They are asked for while the file has one small page
for each, so that there is nothing to copy; where one is refused, small ones take its place.

It has no name in any file system; the kernel frees it with the last process that has it open or mapped, however that one ended.
Not here: giving the descriptor away (the connector does), what the bytes mean.
Sources: https://man7.org/linux/man-pages/man2/memfd_create.2.html, https://man7.org/linux/man-pages/man2/madvise.2.html
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import time
import weakref
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.host_memory import free_memory_bytes

_LOG = logging.getLogger(__name__)

F_SEAL_FUTURE_WRITE: Final = 0x10  # linux/fcntl.h; Python names it from 3.13 on
HUGE_PAGE: Final = 2 << 20
_MAP_FIXED: Final = 0x10  # linux/mman.h, as the next two
_MAP_NORESERVE: Final = 0x4000
_MADV_COLLAPSE: Final = 25
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_BYTES_AT_ONCE: Final = 256 << 20  # a signal that comes meanwhile undoes no more than that
_LOG_EVERY_S: Final = 2.0
_LIBC: Final = ctypes.CDLL(None, use_errno=True)  # Python's mmap takes no address
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_SEALS_OF_SIZE: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_SEALS_OF_CONTENT: Final = fcntl.F_SEAL_SEAL | F_SEAL_FUTURE_WRITE


class SharedBytes:
    """Zeroed memory for blocks, and the descriptor that shows it to others; the descriptor is closed with this object."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        """Raise ValueError, in one sentence, if the memory is not to be had."""
        num_bytes = num_blocks * block_bytes
        self._descriptor: Final = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._is_sealed = False
        weakref.finalize(self, os.close, self._descriptor)
        try:
            # Every page now: a pool that does not fit fails at the start, no step pays for page faults, and a reader that
            # counts the pages knows that its reading will allocate none.
            _populate(self._descriptor, num_bytes)
        except OSError as error:
            raise _not_to_be_had(num_bytes, error) from None
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS_OF_SIZE)
        self.bytes: Final[NDArray[np.uint8]] = mapped_bytes(self._descriptor, num_blocks, block_bytes)

    @property
    def descriptor(self) -> int:
        """What shows the memory to others; from now on nobody gets another writable mapping."""
        if not self._is_sealed:
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS_OF_CONTENT)
            self._is_sealed = True
        return self._descriptor

    @property
    def writers_descriptor(self) -> int:
        """What lets processes of our own map it for writing, too (`mapped_bytes`), before anybody else is shown it."""
        if self._is_sealed:
            raise RuntimeError("the KV memory was shown to others: nobody may write to it but who does already")
        return self._descriptor


def mapped_bytes(descriptor: int, num_blocks: int, block_bytes: int) -> NDArray[np.uint8]:
    """Map so many blocks for reading and writing: [num_blocks, block_bytes]. Raises ValueError, in one sentence."""
    num_bytes = num_blocks * block_bytes
    try:
        mapping, begin = _mapped(descriptor, num_bytes, mmap.MAP_POPULATE)
    except OSError as error:
        raise _not_to_be_had(num_bytes, error) from None
    return np.frombuffer(mapping, np.uint8, num_bytes, begin).reshape(num_blocks, block_bytes)


def _mapped(descriptor: int, num_bytes: int, flags: int = 0) -> tuple[mmap.mmap, int]:
    """The file, mapped, and where in the mapping it begins: where a huge page may, if it is as large as one. Raises OSError."""
    flags |= mmap.MAP_SHARED
    if num_bytes < HUGE_PAGE:
        return mmap.mmap(descriptor, num_bytes, flags=flags), 0
    # Addresses to choose from; whoever drops them drops the file's mapping among them.
    room = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    address = np.frombuffer(room, np.uint8).ctypes.data
    begin = -address % HUGE_PAGE
    rights = mmap.PROT_READ | mmap.PROT_WRITE
    if _LIBC.mmap(address + begin, num_bytes, rights, flags | _MAP_FIXED, descriptor, 0) == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return room, begin


def _not_to_be_had(num_bytes: int, error: OSError) -> ValueError:
    return ValueError(f"{num_bytes >> 20} MiB of KV memory: {error.strerror}")


def _populate(descriptor: int, num_bytes: int) -> None:
    """Give the file all its pages; says how far it is where that takes long (a GiB: a third of a second, of huge pages a tenth)."""
    began_at = said_at = time.monotonic()
    os.ftruncate(descriptor, num_bytes)
    mapping, offset = _mapped(descriptor, num_bytes)
    address = np.frombuffer(mapping, np.uint8).ctypes.data + offset
    for begin in range(0, num_bytes, _BYTES_AT_ONCE):
        count = min(_BYTES_AT_ONCE, num_bytes - begin)
        if (free := free_memory_bytes()) < count:  # others take some meanwhile; who takes more is killed without a word
            said = f"behind {begin >> 20} of them only {free >> 20} were free, others took the rest"
            raise OSError(errno.ENOMEM, said)
        huge = count // HUGE_PAGE * HUGE_PAGE
        for page in range(begin, begin + huge, HUGE_PAGE):
            os.posix_fallocate(descriptor, page, mmap.PAGESIZE)  # of nothing no huge page is made
        if huge:
            _LIBC.madvise(address + begin, huge, _MADV_COLLAPSE)  # refused or not: the next line fills what is missing
        os.posix_fallocate(descriptor, begin, count)
        if time.monotonic() >= said_at + _LOG_EVERY_S:
            said_at = time.monotonic()
            _LOG.info("event=kv_memory_populating mib=%d of_mib=%d", (begin + _BYTES_AT_ONCE) >> 20, num_bytes >> 20)
    if said_at > began_at:
        _LOG.info("event=kv_memory_populated mib=%d seconds=%.1f", num_bytes >> 20, time.monotonic() - began_at)
