"""`python -m tests.sim`: the cluster in a box, seed after seed. `make sim SEEDS=1000`, `make sim SEED=7`, `make soak`.

Many seeds: a progress line, and each failure as its seed, its error, and the log of the shortest run found that fails in the same
way. One seed (`--seed`): that run again, exactly, with its whole log. The exit code is 1 if anything failed.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from router.waiting import KINDS
from runtime.config import knob, load
from tests.sim.outcome import Outcome, run_scenario
from tests.sim.scenario import draw_scenario
from tests.sim.shrink import Shrinker

_SEEDS_AT_ONCE = 25  # that a worker takes


@dataclass(frozen=True, slots=True)
class SimConfig:
    """One call of the simulation."""

    seeds: int = knob(1000, "how many seeds to run", low=1, high=1 << 40)
    first: int = knob(0, "the first of them", low=0, high=1 << 62)
    seed: int | None = knob(None, "instead: run this one and print its log", low=0, high=1 << 64)
    shrink: bool = knob(True, "look for the shortest run that fails in the same way, and print its log")
    workers: int | None = knob(None, "processes; none: one per core", low=1, high=1024)
    max_failures: int = knob(5, "stop after so many failing seeds", low=1, high=1 << 30)


def main() -> int:
    """0 if everything held."""
    config = load(SimConfig, "python -m tests.sim", "A whole cluster in one thread, from a seed.", sys.argv[1:])
    console = Console(soft_wrap=True, highlight=False, markup=False)
    if config.seed is not None:
        return _replay(console, config.seed, config.shrink)
    return _run_many(console, config)


def _replay(console: Console, seed: int, wants_shrunk: bool) -> int:
    outcome = run_scenario(draw_scenario(seed), is_traced=True)
    _print_log(console, outcome)
    if outcome.error is not None and wants_shrunk:
        _print_shrunk(console, outcome)
    return int(outcome.error is not None)


def _run_many(console: Console, config: SimConfig) -> int:
    failures: list[int] = []
    counters: Counter[str] = Counter()
    starts = range(config.first, config.first + config.seeds, _SEEDS_AT_ONCE)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, disable=not console.is_terminal)
    num_done = 0
    with bar, ProcessPoolExecutor(config.workers or os.cpu_count()) as workers:
        task = bar.add_task("seeds", total=config.seeds)
        chunks = [range(at, min(at + _SEEDS_AT_ONCE, starts.stop)) for at in starts]
        running = [workers.submit(_run_chunk, chunk) for chunk in chunks]
        for done in as_completed(running):
            num_run, failed, counted = done.result()
            counters.update(counted)
            failures += failed
            before, num_done = num_done, num_done + num_run
            bar.update(task, advance=num_run, description=f"seeds, {len(failures)} failed" if failures else "seeds")
            if not console.is_terminal and num_done * 10 // config.seeds > before * 10 // config.seeds:
                console.print(f"{num_done} of {config.seeds} seeds, {len(failures)} failed")
            if len(failures) >= config.max_failures:
                workers.shutdown(cancel_futures=True)
                break
    for seed in sorted(failures)[: config.max_failures]:
        _report(console, seed, config.shrink)
    told = ("client:finished", "client:aborted", "sessions lost", *(f"dispatches:{kind}" for kind in KINDS), "plans")
    console.print(
        f"{num_done} seeds, {len(failures)} failed; " + ", ".join(f"{counters[name]} {name}" for name in told)
    )
    return int(bool(failures))


def _run_chunk(seeds: range) -> tuple[int, list[int], Counter[str]]:
    failed, counters = [], Counter[str]()
    for seed in seeds:
        outcome = run_scenario(draw_scenario(seed))
        counters.update(outcome.counters)
        if outcome.error is not None:
            failed.append(seed)
    return len(seeds), failed, counters


def _report(console: Console, seed: int, wants_shrunk: bool) -> None:
    outcome = run_scenario(draw_scenario(seed))
    console.print(f"seed {seed} failed: {outcome.error}\n{outcome.where}")
    if wants_shrunk:
        _print_shrunk(console, outcome)


def _print_shrunk(console: Console, outcome: Outcome) -> None:
    smallest = Shrinker(outcome).shrink()
    console.print(f"The shortest run found that fails like seed {outcome.scenario.seed}:")
    _print_log(console, run_scenario(smallest, is_traced=True))


def _print_log(console: Console, outcome: Outcome) -> None:
    console.print("\n".join(outcome.scenario.lines()))
    console.print(str(outcome.trace))
    console.print(f"failed: {outcome.error}\n{outcome.where}" if outcome.error is not None else "everything held")


if __name__ == "__main__":
    sys.exit(main())
