"""What a result was measured on: a number without its machine is no measurement."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kernels.cpu_build import bits_name, compiled_variant


def machine() -> dict[str, Any]:
    """Cores that this process may use, the processor's name, system and Python, the compiled kernels that it gets; JSON-able."""
    compiled = compiled_variant()
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu_model": cpu_model(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "kernels": bits_name(compiled) if compiled else None,
    }


def in_words(machine: Mapping[str, Any]) -> str:
    """What machine() told, for a page; older results do not say their kernels."""
    kernels = f", kernels {machine['kernels']}" if machine.get("kernels") else ""
    return f"{machine['cores']} cores of {machine['cpu_model']}, Python {machine['python']}{kernels}"


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
