"""What a result was measured on: a number without its machine is no measurement."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Cores that this process may use, the processor's name, system and Python; JSON-able."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu_model": cpu_model(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def cpu_model(cpuinfo: str) -> str:
    """The processor's name out of /proc/cpuinfo; the architecture where none is given."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return value.strip()
    return platform.machine()


def utc_date() -> str:
    """Now, to the second, for the result's reader; nothing is decided by it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
