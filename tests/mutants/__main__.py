"""`make mutants`: plant every listed bug, one at a time, and say which of them the tests notice.

Two at a time, each in a copy of its own. Exit code 0 only if every one was killed. `make mutants ONLY=name` plants one (or
several, with commas).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.mutants.listed import ALL
from tests.mutants.mutant import Mutant
from tests.mutants.planting import Outcome, Verdict, plant, run_unchanged

_COLOURS = {Verdict.KILLED: "green", Verdict.SURVIVED: "bold red", Verdict.UNCLEAR: "yellow"}


def main(names: Sequence[str]) -> int:
    """Plant the named mutants, or all."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    by_name = {mutant.name: mutant for mutant in ALL}
    if unknown := sorted({*names} - by_name.keys()):
        console.print(f"no such mutant: {', '.join(unknown)}. There are: {', '.join(by_name)}")
        return 2
    mutants = [by_name[name] for name in names] or list(ALL)
    console.print("first the tests without any bug")
    unchanged = run_unchanged(killer for mutant in mutants for killer in mutant.killed_by)
    if unchanged.verdict is not Verdict.SURVIVED:
        console.print(f"the tests fail without any bug, so they prove nothing: {unchanged.detail}")
        return 2
    outcomes = _plant_all(mutants, console)
    console.print(_table(mutants, outcomes))
    num_killed = sum(outcome.verdict is Verdict.KILLED for outcome in outcomes.values())
    console.print(f"{num_killed} of {len(mutants)} mutants were killed")
    return 0 if num_killed == len(mutants) else 1


def _plant_all(mutants: Sequence[Mutant], console: Console) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    num_workers = min(2, os.cpu_count() or 1)
    with Progress(*columns, console=console) as bar, ThreadPoolExecutor(num_workers) as workers:
        task = bar.add_task("mutants", total=len(mutants))
        planted = {workers.submit(plant, mutant): mutant for mutant in mutants}
        for future in as_completed(planted):
            mutant, outcome = planted[future], future.result()
            outcomes[mutant.name] = outcome
            bar.advance(task)
            if outcome.verdict is not Verdict.KILLED:
                console.print(f"{outcome.verdict.value}: {mutant.name} ({mutant.path}): {mutant.bug} {outcome.detail}")
    return outcomes


def _table(mutants: Sequence[Mutant], outcomes: dict[str, Outcome]) -> Table:
    table = Table("mutant", "", "s", "noticed by")
    for mutant in mutants:
        outcome = outcomes[mutant.name]
        verdict = f"[{_COLOURS[outcome.verdict]}]{outcome.verdict.value}"
        table.add_row(mutant.name, verdict, f"{outcome.duration_s:.0f}", escape(outcome.detail))
    return table


if __name__ == "__main__":
    sys.exit(main([name for argument in sys.argv[1:] for name in argument.split(",") if name]))
