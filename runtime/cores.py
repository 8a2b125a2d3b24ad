"""How many cores this process may compute on: those that it may run on, or fewer where its control group may use less of them.

A container whose CPU is limited (docker --cpus, CPUQuota of a unit, limits of Kubernetes) sees all of its machine and may run on
each core, but with threads on all of them it has used up its time early in each period, and stands still for the rest of it.
Both kinds of control groups (https://docs.kernel.org/admin-guide/cgroup-v2.html, …/scheduler/sched-bwc.html).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def usable_cores(root: Path = Path("/")) -> int:
    """At least one; `root` is where proc and sys are."""
    return max(min([len(os.sched_getaffinity(0)), *_limits(root)]), 1)


def _limits(root: Path) -> Iterator[int]:
    """Cores' worth of time that this process's groups, and those around them, may use; rounded up.

    In a container the path may be the machine's, and its last folder what is mounted at the top: what is not there says nothing.
    """
    for line in _text(root / "proc" / "self" / "cgroup").splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds and "cpu" not in kinds.split(","):
            continue
        top = root / "sys" / "fs" / "cgroup" / ("cpu" if kinds else "")
        own = PurePosixPath(path.lstrip("/"))
        for folder in (top / each for each in (own, *own.parents)):
            if kinds:
                said = [_text(folder / "cpu.cfs_quota_us").strip(), _text(folder / "cpu.cfs_period_us").strip()]
            else:
                said = _text(folder / "cpu.max").split()
            is_limited = len(said) == 2 and all(map(str.isdecimal, said))  # else "max", -1, or no such group
            if is_limited and int(said[1]):
                yield math.ceil(int(said[0]) / int(said[1]))


def _text(path: Path) -> str:
    """Of a file; nothing if it is not there or not for us."""
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
