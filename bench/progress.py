"""How far a run is: a bar on a terminal, ten plain lines where the output goes elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Outcome(Protocol):
    """Something that has ended, well or not."""

    @property
    def is_ok(self) -> bool:
        """Whether it succeeded."""


class RunProgress:
    """Counts what has ended, by default requests; used as a context."""

    def __init__(self, console: Console, total: int, what: str = "requests") -> None:
        self._console = console
        self._what = what
        self._total = total
        self._num_ended = 0
        self._num_failed = 0
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console) if console.is_terminal else None
        self._task = None if self._bar is None else self._bar.add_task(what, total=total)

    def __enter__(self) -> RunProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def count(self, outcome: Outcome) -> None:
        """One more has ended."""
        self._num_ended += 1
        self._num_failed += not outcome.is_ok
        if self._bar is not None and self._task is not None:
            failed = f"{self._what}, {self._num_failed} failed" if self._num_failed else self._what
            self._bar.update(self._task, advance=1, description=failed)
        elif self._num_ended * 10 // self._total > (self._num_ended - 1) * 10 // self._total:
            self._console.print(f"{self._num_ended} of {self._total} {self._what} ended, {self._num_failed} failed")


class StepProgress:
    """Counts the steps of a run whose number is known; used as a context."""

    def __init__(self, console: Console, unit: str, total: int) -> None:
        self._console = console
        self._unit = unit
        self._total = total
        self._num_done = 0
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console) if console.is_terminal else None
        self._task = None if self._bar is None else self._bar.add_task(unit, total=total)

    def __enter__(self) -> StepProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, what: str) -> None:
        """One more is done, of this kind."""
        self._num_done += 1
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=1, description=what)
        elif self._num_done * 10 // self._total > (self._num_done - 1) * 10 // self._total:
            self._console.print(f"{self._num_done} of {self._total} {self._unit} done, last {what}")
