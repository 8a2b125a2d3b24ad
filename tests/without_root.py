"""Reading as a service does that is not root, from whom no mode keeps a file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_NOBODY: Final = 65534


@contextmanager
def without_root(directory: Path) -> Iterator[None]:
    """The process's files are those of another user, whose `directory` and what is in it now are; who is none stays who he is.

    The way there may be closed to that user: the directory becomes the working directory, and is `.` meanwhile.
    """
    before, user = Path.cwd(), os.geteuid()
    os.chdir(directory)
    if user == 0:
        for path in (directory, *directory.rglob("*")):
            os.chown(path, _NOBODY, -1)
        os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)
        os.chdir(before)
