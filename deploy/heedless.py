"""A command's output, written to whoever still reads it: a pipe or a terminal that is gone ends no command, nor a cluster.

`baton up | tee log` has lost its `tee` by the time it hears of a Ctrl-C, and still has a cluster to end in good order; `baton drain
NODE | head -1` waits until the node has gone, all the same. What a full disk does not take is an error of one sentence, told once.
Not here: what is said.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
from typing import TYPE_CHECKING, Final, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_NO_READER: Final = frozenset((errno.EPIPE,))
_NO_TERMINAL: Final = frozenset((errno.EPIPE, errno.EIO))


class CannotSay(Exception):
    """What a command says cannot be written; the message is one sentence. No OSError: as that, commands tell of their files."""


class _Heedless(io.FileIO):
    """A descriptor that is somebody else's; what cannot be written for a reason that does not count is dropped."""

    def __init__(self, name: str, descriptor: int, *, of_all: bool, of_none: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._called = name
        # A terminal that is gone does not say that it is one.
        is_device = stat.S_ISCHR(os.fstat(descriptor).st_mode)
        self._forgiven = frozenset[int]() if of_none else _NO_TERMINAL if is_device else _NO_READER
        self._forgives_all = of_all

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if not self._forgives_all and error.errno not in self._forgiven:
                if isinstance(error, BrokenPipeError):
                    raise
                self._forgives_all = True  # once is enough: what is still buffered is tried again as the process ends
                raise CannotSay(f"{self._called}: cannot be written: {error.strerror}") from None
            return memoryview(data).nbytes


def outlive_readers(*, of_all: bool = False, of_none: bool = False) -> None:
    """Drop what is said from when nobody reads it any more; CannotSay for what is not written otherwise.

    `of_all`: drop it whatever keeps it from being written, a full disk, say. `of_none`: BrokenPipeError where nobody reads it.
    """
    sys.stdout = _heedless("stdout", sys.stdout, of_all=of_all, of_none=of_none)
    sys.stderr = _heedless("stderr", sys.stderr, of_all=of_all, of_none=of_none)


def _heedless(name: str, stream: TextIO, *, of_all: bool, of_none: bool) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper):  # None, where it was closed from the first
        return stream
    raw = _Heedless(name, stream.fileno(), of_all=of_all, of_none=of_none)
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),  # the first with PYTHONUNBUFFERED
        encoding=stream.encoding,
        # A file's name or a model's text may have what this locale does not: then that is spelled, and ends nothing.
        errors="backslashreplace" if stream.errors == "strict" else stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
