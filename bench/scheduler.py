"""`python -m bench.scheduler`: what a scheduler's bookkeeping costs a step, without a model, by slots and by known sequences.

    step = plan() + complete()      ratio = step / reference      reference = a Python loop that appends a number per slot to a list

A quiet step is one in which nobody comes or goes: decode rows alone, none of them its sequence's last. The reference is measured
beside each round of steps; a ratio is the median over rounds. Times are those of the thread. Not here: what a step computes
(bench.engine), arrivals over time (`baton bench`).
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from rich.console import Console
from rich.table import Table

from bench.frame import Bench, check_files
from bench.progress import StepProgress
from bench.scheduler_load import Load, LoadSizes, reference_s
from runtime.config import knob, load

PROG: Final = "python -m bench.scheduler"
TARGET_S: Final = 200e-6  # of a step's bookkeeping at 256 slots
_ROUNDS: Final = 20
_WARM_UP_STEPS: Final = 500
_SPARE: Final = 8  # sequences that wait, at least: no slot is empty for want of them


@dataclass(frozen=True, slots=True)
class SchedulerBenchConfig:
    """One run."""

    slots: str = knob("1,16,64,256,1024", "slots, all of them always taken", metavar="N,…")
    sequences: int = knob(1000, "sequences known at any time (at least slots + 8)", low=1, high=1_000_000)
    sequences_at: int = knob(256, "slots at which the number of known sequences varies", low=1, high=100_000)
    more_sequences: str = knob("300,4000,16000", "such numbers beside --sequences; empty: none", metavar="N,…")
    steps: int = knob(10_000, "steps of each case", low=_ROUNDS, high=100_000_000)
    policy: Literal["full", "ratio", "fixed", "none"] = knob("ratio", "the reserve policy, as of a node")
    pool_percent: int = knob(200, "the pool, in percent of what the slots' sequences need at their limits", low=1)
    block_size: int = knob(16, "token positions of a KV block", low=1, high=1024)
    max_batched_tokens: int = knob(8192, "token positions of a step", low=1)
    seed: int = knob(0, "of lengths and tokens", low=0)
    output: Path | None = knob(None, "JSON file for all figures", metavar="FILE")

    def __post_init__(self) -> None:
        for name in ("slots", "more_sequences"):
            _numbers(name, getattr(self, name))
        check_files(self.output)

    def cases(self) -> list[LoadSizes]:
        """By slots, then by known sequences."""
        pairs = [(slots, self.sequences) for slots in _numbers("slots", self.slots)]
        pairs += [(self.sequences_at, sequences) for sequences in _numbers("more-sequences", self.more_sequences)]
        rest = (self.policy, self.pool_percent, self.block_size, self.max_batched_tokens)
        return [LoadSizes(slots, max(sequences, slots + _SPARE), *rest) for slots, sequences in pairs]


@dataclass(frozen=True, slots=True)
class Figures:
    """What one case gave; seconds of a step."""

    num_slots: int
    num_sequences: int
    plan_s: float  # medians over rounds of each round's mean, as the next three
    complete_s: float
    step_s: float
    reference_s: float
    best_step_s: float
    quiet_s: float | None  # of steps in which nobody comes or goes: each round's median; None: there were none
    best_quiet_s: float | None
    ratio: float  # median over rounds
    best_ratio: float
    rows_a_step: float  # decode rows
    ended_per_1000_steps: float
    preempted_per_1000_steps: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0, or 2 for what the user can mend, 130 after Ctrl-C."""
    config = load(SchedulerBenchConfig, PROG, "Measure the bookkeeping of a scheduler's steps, without a model.", argv)
    return Bench(PROG, _measure, show, _to_json).run(config, argv)


def _to_json(figures: Sequence[Figures]) -> dict[str, Any]:
    return {"target_s": TARGET_S, "cases": [asdict(each) for each in figures]}


def _measure(config: SchedulerBenchConfig, console: Console) -> list[Figures]:
    cases = config.cases()
    with StepProgress(console, "rounds", len(cases) * _ROUNDS) as progress:
        return [_figures(sizes, config, progress) for sizes in cases]


def _figures(sizes: LoadSizes, config: SchedulerBenchConfig, progress: StepProgress) -> Figures:
    it, num_steps = Load(sizes, config.seed), config.steps // _ROUNDS
    for _ in range(min(_WARM_UP_STEPS, config.steps)):
        it.step()
    num_rows, num_ended, num_preempted = it.num_rows, it.num_ended, it.scheduler.num_preempted
    rounds: list[tuple[float, float, float]] = []
    quiet: list[float] = []
    for _ in range(_ROUNDS):
        steps = [it.step() for _ in range(num_steps)]
        plan_s, complete_s = (
            statistics.fmean(each) for each in zip(*((s.plan_s, s.complete_s) for s in steps), strict=True)
        )
        rounds.append((plan_s, complete_s, reference_s(sizes.num_slots)))
        if of_quiet := [step.plan_s + step.complete_s for step in steps if step.is_quiet]:
            quiet.append(statistics.median(of_quiet))
        progress.advance(f"{sizes.num_slots} slots, {sizes.num_sequences} sequences")
    plans, completes, references = zip(*rounds, strict=True)
    totals = [plan_s + complete_s for plan_s, complete_s, _ in rounds]
    ratios = [total / reference for total, reference in zip(totals, references, strict=True)]
    per_step = 1 / (_ROUNDS * num_steps)
    return Figures(
        num_slots=sizes.num_slots,
        num_sequences=sizes.num_sequences,
        plan_s=statistics.median(plans),
        complete_s=statistics.median(completes),
        step_s=statistics.median(totals),
        reference_s=statistics.median(references),
        best_step_s=min(totals),
        quiet_s=statistics.median(quiet) if quiet else None,
        best_quiet_s=min(quiet, default=None),
        ratio=statistics.median(ratios),
        best_ratio=min(ratios),
        rows_a_step=(it.num_rows - num_rows) * per_step,
        ended_per_1000_steps=1000 * (it.num_ended - num_ended) * per_step,
        preempted_per_1000_steps=1000 * (it.scheduler.num_preempted - num_preempted) * per_step,
    )


def show(console: Console, figures: Sequence[Figures]) -> None:
    """Two tables: the times, in microseconds of a step, and what happened in it."""
    costs = Table(title=None, box=None, pad_edge=False)
    for heading in (
        "slots",
        "known",
        "plan",
        "complete",
        "step",
        "best",
        "of 200",
        "quiet",
        "of 200",
        "per row",
        "ratio",
    ):
        costs.add_column(heading, justify="right", no_wrap=True)
    events = Table(title=None, box=None, pad_edge=False)
    for heading in ("slots", "known", "decode rows a step", "ended in 1,000", "preempted in 1,000"):
        events.add_column(heading, justify="right", no_wrap=True)
    for each in figures:
        names = (str(each.num_slots), str(each.num_sequences))
        times = [f"{1e6 * each_s:.0f}" for each_s in (each.plan_s, each.complete_s, each.step_s, each.best_step_s)]
        per_row = f"{1e6 * each.step_s / max(1.0, each.rows_a_step):.2f}"
        share, quiet = f"{each.step_s / TARGET_S:.0%}", ("", "")
        if each.quiet_s is not None:
            quiet = (f"{1e6 * each.quiet_s:.0f}", f"{each.quiet_s / TARGET_S:.0%}")
        costs.add_row(*names, *times, share, *quiet, per_row, f"{each.ratio:.0f}", f"{each.best_ratio:.0f}")
        rates = (each.rows_a_step, each.ended_per_1000_steps, each.preempted_per_1000_steps)
        events.add_row(*names, *(f"{rate:.0f}" for rate in rates))
    console.print(costs)
    console.print(events)


def _numbers(name: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",") if part]
    except ValueError:
        numbers = [0]
    if any(number < 1 for number in numbers):
        raise ValueError(f"--{name.replace('_', '-')} {text}: must be positive whole numbers with commas between")
    return numbers


if __name__ == "__main__":
    sys.exit(main())
