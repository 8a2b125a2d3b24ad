"""Stopping a process as SIGSTOP does, and knowing that it has stopped: the signal is under way for a moment."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def stop(pid: int) -> None:
    """SIGSTOP; returns once no thread of it can do anything. Raises ProcessLookupError if there is no such process."""
    os.kill(pid, signal.SIGSTOP)
    while any(_state(each) not in "TZ" for each in Path(f"/proc/{pid}/task").glob("*/stat")):
        time.sleep(0.001)  # another process's threads: nothing else tells


def resume(pid: int) -> None:
    """SIGCONT."""
    os.kill(pid, signal.SIGCONT)


def _state(stat: Path) -> str:
    try:
        return stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"  # ended meanwhile
