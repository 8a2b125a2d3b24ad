"""How much memory this process may still take: what the machine has free, or less where its control group has a limit.

A container sees the machine's /proc/meminfo whatever it may use of it; over its group's limit it is killed without a word.
Both kinds of control groups (https://docs.kernel.org/admin-guide/cgroup-v2.html, …/cgroup-v1/memory.html); the files of a group
count as free that can be written back and dropped, as the kernel does before it kills.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

_Names = tuple[str, str, tuple[str, ...]]
# Of each kind: the files with the limit and with what is taken, and the lines of memory.stat with what can be dropped.
_V1: Final[_Names] = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_V2: Final[_Names] = ("memory.max", "memory.current", ("inactive_file", "active_file"))


def free_memory_bytes(root: Path = Path("/")) -> int:
    """What can be taken without swapping and without being killed; `root` is where proc and sys are."""
    free = _available(_text(root / "proc" / "meminfo"))
    for folder, names in _groups(root):
        free = min(free, _left(folder, *names))
    return free


def physical_memory_bytes() -> int:
    """What the machine has, whoever uses it."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _available(meminfo: str) -> int:
    """MemAvailable of the machine, in bytes. ValueError: there is no such line."""
    for line in meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ValueError("no MemAvailable in /proc/meminfo")


def _groups(root: Path) -> Iterator[tuple[Path, _Names]]:
    """The folders of this process's groups and of those around them, with what their files are called.

    In a container the path may be the machine's, and its last folder what is mounted at the top: what is not there says nothing.
    """
    for line in _text(root / "proc" / "self" / "cgroup").splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        top = root / "sys" / "fs" / "cgroup" / ("memory" if kinds else "")
        own = PurePosixPath(path.lstrip("/"))
        for folder in (own, *own.parents):
            yield top / folder, _V1 if kinds else _V2


def _left(folder: Path, limit_name: str, used_name: str, droppable_names: tuple[str, ...]) -> int:
    """Bytes up to the group's limit; without one far more than there are."""
    limit, used = _text(folder / limit_name).strip(), _text(folder / used_name).strip()
    if not limit.isdecimal() or not used.isdecimal():
        return 1 << 63  # "max", or no such group here
    stat = dict(line.split() for line in _text(folder / "memory.stat").splitlines())
    return max(int(limit) - int(used) + sum(int(stat.get(name, 0)) for name in droppable_names), 0)


def _text(path: Path) -> str:
    """Of a file; nothing if it is not there or not for us."""
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
