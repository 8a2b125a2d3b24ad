"""How far a run of the load generator is: a live line on a terminal, ten plain lines where the output goes elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from bench.completions import Record

_UNKNOWN: Final = 1000  # requests between two plain lines where nobody knows how many come


class LoadProgress:
    """Counts what was sent and what became of it; a Watcher, used as a context."""

    def __init__(self, console: Console, what: str, total: int | None) -> None:
        self._console = console
        self._what = what
        self._total = total
        self._num_sent = 0
        self._num_ended = 0
        self._num_failed = 0
        self._num_tokens = 0
        self._began_at = time.monotonic()
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, transient=True) if console.is_terminal else None
        self._task = None if self._bar is None else self._bar.add_task(what, total=total)

    def __enter__(self) -> LoadProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begun(self) -> None:
        """One more request is under way."""
        self._num_sent += 1
        self._tell()

    def ended(self, record: Record) -> None:
        """One has ended, well or not."""
        self._num_ended += 1
        self._num_failed += not record.is_ok
        self._num_tokens += record.output_tokens or 0
        self._tell()
        if self._bar is None and self._is_time_for_a_line():
            self._console.print(f"{self._what}: {self._line()}")

    def _tell(self) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._num_ended, description=f"{self._what}: {self._line()}")

    def _line(self) -> str:
        seconds = max(time.monotonic() - self._began_at, 0.001)
        sent = f"{self._num_sent} sent" if self._total is None else f"{self._num_sent} of {self._total} sent"
        return (
            f"{sent}, {self._num_sent - self._num_ended} in flight, {self._num_ended - self._num_failed} done, "
            f"{self._num_failed} failed, {self._num_tokens / seconds:.1f} tok/s"
        )

    def _is_time_for_a_line(self) -> bool:
        if self._total is None:
            return self._num_ended % _UNKNOWN == 0
        return self._num_ended * 10 // self._total > (self._num_ended - 1) * 10 // self._total
