"""Figures of the pressure benchmark: what the load needs, ratios to the ample runs beside each run, medians, a table. Pure.

run / mean of the ample runs before and after it --ratio--> one per round --median--> CellFigures
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from bench.pressure_cells import Cell, CellRun


@dataclass(frozen=True, slots=True)
class CellFigures:
    """One cell over all rounds: medians. The fields are keys of the JSON result; a ratio of 1 is the ample run."""

    policy: str
    percent: int
    num_blocks: int
    goodput: float  # output tokens per second, ratio
    goodput_least: float  # of any round
    goodput_most: float
    tokens_per_step: float  # output tokens per step of the decode node, ratio: goodput without the clock
    preemptions_per_1000_steps: float
    recomputed_per_1000_tokens: float  # prefill positions computed again, per 1,000 output tokens
    ttft_p50: float  # ratio, as the next three
    ttft_p99: float
    tpot_p99: float
    end_to_end_p99: float
    num_errors: int  # over all rounds, as the next
    num_different: int  # answers with other tokens than the first ample run's


def need_blocks(num_tokens: Sequence[int], slots: int, block_size: int) -> float:
    """What the load needs: slots x mean blocks of a sequence at its end, from each one's tokens, prompt and answer.

    Where answer lengths are geometric this is also the mean of what `slots` running sequences hold at any time: a sequence
    holds less than at its end while it runs, and long ones run for longer, which cancels out. So at 100 % the pool is
    short half of the time.
    """
    return slots * statistics.fmean(-(-tokens // block_size) for tokens in num_tokens)


def schedule(cells: Sequence[Cell], ample: Cell, rounds: int, per_lap: int, rng: random.Random) -> list[Cell]:
    """The order of all runs: each round shuffled, an ample run at both ends and between every `per_lap` others."""
    order: list[Cell] = []
    for _ in range(rounds):
        shuffled = rng.sample(cells, len(cells))
        for begin in range(0, len(shuffled), per_lap):
            order += [ample, *shuffled[begin : begin + per_lap]]
    return [*order, ample]


def compared(run: CellRun, first: CellRun) -> CellRun:
    """The run with the number of answers whose tokens are not those of the first ample run's."""
    pairs = zip(first.token_ids, run.token_ids, strict=True)
    return replace(run, num_different=sum(said != expected for expected, said in pairs))


def figures_of(runs: Sequence[CellRun]) -> list[CellFigures]:
    """By policy in order of appearance in the schedule's cells, and by size; the first and the last run are ample ones."""
    neighbours: dict[Cell, list[tuple[CellRun, list[CellRun]]]] = {}
    for index, run in enumerate(runs):
        if not run.cell.is_ample:
            before = next(each for each in reversed(runs[:index]) if each.cell.is_ample)
            after = next(each for each in runs[index:] if each.cell.is_ample)
            neighbours.setdefault(run.cell, []).append((run, [before, after]))
    return [_cell_figures(cell, pairs) for cell, pairs in neighbours.items()]


def _cell_figures(cell: Cell, pairs: Sequence[tuple[CellRun, list[CellRun]]]) -> CellFigures:
    def ratios(value: Callable[[CellRun], float]) -> list[float]:
        return [value(run) / max(statistics.fmean(map(value, ample)), 1e-9) for run, ample in pairs]

    def median(value: Callable[[CellRun], float]) -> float:
        return statistics.median(ratios(value))

    runs = [run for run, _ in pairs]
    goodputs = ratios(lambda run: run.output_tokens / max(run.duration_s, 1e-9))
    return CellFigures(
        policy=cell.policy,
        percent=cell.percent or 0,
        num_blocks=cell.num_blocks,
        goodput=statistics.median(goodputs),
        goodput_least=min(goodputs),
        goodput_most=max(goodputs),
        tokens_per_step=median(lambda run: run.output_tokens / max(run.num_steps, 1)),
        preemptions_per_1000_steps=statistics.median(1000 * run.preemptions / max(run.num_steps, 1) for run in runs),
        recomputed_per_1000_tokens=statistics.median(
            1000 * run.recomputed_tokens / max(run.output_tokens, 1) for run in runs
        ),
        ttft_p50=median(lambda run: run.ttft_p50_s),
        ttft_p99=median(lambda run: run.ttft_p99_s),
        tpot_p99=median(lambda run: run.tpot_p99_s),
        end_to_end_p99=median(lambda run: run.end_to_end_p99_s),
        num_errors=sum(sum(run.errors.values()) for run in runs),
        num_different=sum(run.num_different for run in runs),
    )


def complaints(runs: Sequence[CellRun]) -> list[str]:
    """One sentence for each run that broke the promise: an error, other tokens, or an ample run that was short."""
    found = []
    for run in runs:
        if run.errors:
            found.append(f"{run.cell.name}: errors {run.errors}")
        if run.num_different:
            found.append(f"{run.cell.name}: {run.num_different} answers have other tokens than the first ample run's")
        if run.cell.is_ample and (run.preemptions or run.recomputed_tokens):
            found.append(f"{run.cell.name}: {run.preemptions} preemptions, {run.recomputed_tokens} tokens recomputed")
    return found


def show(console: Console, figures: Sequence[CellFigures]) -> None:
    """A row for each cell, policy by policy, the smallest pool first."""
    table = Table(title=None, box=None, pad_edge=False)
    # Two lines each: the table fits 80 columns.
    headings = ("policy", "pool", "goodput", "least-\nmost", "per\nstep", "preemp-\ntions", "recom-\nputed")
    for heading in (*headings, "TTFT\np50", "TTFT\np99", "TPOT\np99", "end\np99"):
        table.add_column(heading, justify="left" if heading == "policy" else "right", no_wrap=True)
    policies = sorted({each.policy for each in figures})
    for each in sorted(figures, key=lambda each: (policies.index(each.policy), each.percent)):
        table.add_row(
            each.policy,
            f"{each.percent} %",
            f"{each.goodput:.2f}",
            f"{each.goodput_least:.2f}-{each.goodput_most:.2f}",
            f"{each.tokens_per_step:.2f}",
            f"{each.preemptions_per_1000_steps:.1f}",
            f"{each.recomputed_per_1000_tokens:.0f}",
            *(f"{value:.1f}" for value in (each.ttft_p50, each.ttft_p99, each.tpot_p99, each.end_to_end_p99)),
        )
    console.print(table)
    console.print(
        "goodput, per step (output tokens per step of the decode node), TTFT, TPOT, end to end: ratios to runs with an ample "
        "pool; preemptions: per 1,000 steps; recomputed: prefill positions per 1,000 output tokens"
    )
