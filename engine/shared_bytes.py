"""KV memory that other processes of this host may be allowed to look at: an anonymous file (memfd), all there from the start.

    this process     mapped for reading and writing, once
    whoever is       can map it for reading; the seals refuse everybody, this process included, another writable mapping,
    given the         write(), punching holes, and a change of size: so no reader ever meets a page that is gone (SIGBUS)
    descriptor

It has no name in any file system; the kernel frees it with the last process that has it open or mapped, however that one ended.
Not here: giving the descriptor away (the connector does), what the bytes mean.
Source: https://man7.org/linux/man-pages/man2/memfd_create.2.html
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from typing import Final

import numpy as np
from numpy.typing import NDArray

F_SEAL_FUTURE_WRITE: Final = 0x10  # linux/fcntl.h; Python names it from 3.13 on
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | F_SEAL_FUTURE_WRITE


class SharedBytes:
    """Zeroed memory for blocks, and the descriptor that shows it to others; the descriptor is closed with this object."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        """Raise ValueError, in one sentence, if the memory is not to be had."""
        num_bytes = num_blocks * block_bytes
        self.descriptor: Final = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.descriptor)
        try:
            # Every page now: a pool that does not fit fails at the start, no step pays for page faults, and a reader that
            # counts the pages knows that its reading will allocate none.
            os.posix_fallocate(self.descriptor, 0, num_bytes)
            mapping = mmap.mmap(self.descriptor, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            raise ValueError(f"{num_bytes >> 20} MiB of KV memory: {error.strerror}") from None
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
        self.bytes: Final[NDArray[np.uint8]] = np.frombuffer(mapping, np.uint8).reshape(num_blocks, block_bytes)
