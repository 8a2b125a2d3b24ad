"""KV memory that other processes of this host may be allowed to look at: an anonymous file (memfd), all there from the start.

    this process     mapped for reading and writing, once; so have the other ranks of the node, where there are any
    whoever is       can map it for reading; the seals refuse everybody, this process included, another writable mapping,
    given the         write(), punching holes, and a change of size: so no reader ever meets a page that is gone (SIGBUS)
    descriptor

It has no name in any file system; the kernel frees it with the last process that has it open or mapped, however that one ended.
Not here: giving the descriptor away (the connector does), what the bytes mean.
Source: https://man7.org/linux/man-pages/man2/memfd_create.2.html
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import time
import weakref
from typing import Final

import numpy as np
from numpy.typing import NDArray

_LOG = logging.getLogger(__name__)

F_SEAL_FUTURE_WRITE: Final = 0x10  # linux/fcntl.h; Python names it from 3.13 on
_BYTES_AT_ONCE: Final = 256 << 20  # a signal that comes meanwhile undoes no more than that
_LOG_EVERY_S: Final = 2.0
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
        mapping = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except OSError as error:
        raise _not_to_be_had(num_bytes, error) from None
    return np.frombuffer(mapping, np.uint8).reshape(num_blocks, block_bytes)


def _not_to_be_had(num_bytes: int, error: OSError) -> ValueError:
    return ValueError(f"{num_bytes >> 20} MiB of KV memory: {error.strerror}")


def _populate(descriptor: int, num_bytes: int) -> None:
    """Give the file all its pages; says how far it is where that takes its time (a third of a second per GiB)."""
    began_at = said_at = time.monotonic()
    for begin in range(0, num_bytes, _BYTES_AT_ONCE):
        os.posix_fallocate(descriptor, begin, min(_BYTES_AT_ONCE, num_bytes - begin))
        if time.monotonic() >= said_at + _LOG_EVERY_S:
            said_at = time.monotonic()
            _LOG.info("event=kv_memory_populating mib=%d of_mib=%d", (begin + _BYTES_AT_ONCE) >> 20, num_bytes >> 20)
    if said_at > began_at:
        _LOG.info("event=kv_memory_populated mib=%d seconds=%.1f", num_bytes >> 20, time.monotonic() - began_at)
