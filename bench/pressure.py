"""`python -m bench.pressure`: what a decode node with too few blocks costs, by reserve policy and size of the pool.

    settings --Workload--> the same seeded requests for every cell
    cell = policy x pool, a cluster of real processes each --run_cell--> runs --figures_of--> table, plot, JSON

Closed loop: as many requests under way as there are slots. Every request may say `max_tokens` and says less, because a stop token
ends it: a reserve policy lives in the difference. 100 % of the pool is slots x mean blocks of a sequence at its end, taken from the
first run, which has an ample pool. Ample runs under `full` stand between the others, and every figure with a clock in it is a
ratio to its neighbours among them, so that a machine that others use too favours nobody. Tokens must equal those of the first run,
whatever was preempted: exit code 1 where they do not. Not here: arrivals that outrun the cluster (`baton bench` has a rate).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from bench.arrivals import Lengths
from bench.frame import SUFFIXES, Bench, check_files, check_model
from bench.pressure_cells import POLICIES, Cell, CellRun, Workload, run_cell
from bench.pressure_figures import compared, complaints, figures_of, need_blocks, schedule, show
from bench.pressure_plot import plot
from bench.progress import StepProgress
from runtime.config import knob, load

PROG: Final = "python -m bench.pressure"
_PER_LAP: Final = 5  # runs between two ample ones
_DESCRIPTION: Final = (
    "Make the decode node's KV pool too small for its load, and measure what each reserve policy makes of that: goodput, "
    "preemptions, tokens computed twice, latencies. Starts a cluster of one prefill and one decode node for each policy and each "
    "size of the pool; the defaults take about five minutes a round on two cores."
)


@dataclass(frozen=True, slots=True)
class PressureConfig:
    """One run."""

    model: Path = knob(help="model directory; a random tiny one will do: baton model make", metavar="DIR")
    policies: str = knob(
        "full,none,fixed,ratio,ratio-off",
        f"--reserve-policy of the decode node, -off: with --decode-reserve off; of {', '.join(POLICIES)}",
        metavar="NAME,…",
    )
    sizes: str = knob("40,60,80,100,120", "pools, in percent of what the load needs", metavar="N,…")
    rounds: int = knob(1, "how often each cell is measured, each time in another order", low=1, high=1000)
    requests: int = knob(400, "requests of a run", low=1, high=1_000_000)
    warmup: int = knob(
        160,
        "requests before them under the same pressure, not counted: a node that was just started is no node in service",
        low=0,
        high=1_000_000,
    )
    slots: int = knob(16, "requests under way, and sequences that run at once", low=1, high=1024)
    prompt_tokens: str = knob(
        "48:16", "prompt length, uniform over MEAN - SPREAD .. MEAN + SPREAD", metavar="MEAN:SPREAD"
    )
    max_tokens: int = knob(256, "what every request may say", low=1, high=1_000_000)
    stop_ids: int = knob(
        8,
        "stop tokens among the vocabulary's 256; more of them, shorter answers; 0: all reach max_tokens",
        low=0,
        high=255,
    )
    block_size: int = knob(
        4,
        "token positions of a KV block; small, because what counts is how many blocks a request may need "
        "(256 tokens in blocks of 4 are as 1,024 in blocks of 16)",
        low=1,
        high=1024,
    )
    seed: int = knob(0, "of requests and of the order of the cells", low=0, high=(1 << 63) - 1)
    output: Path | None = knob(None, "JSON file for all figures and runs", metavar="FILE")
    plot: Path | None = knob(None, f"picture, its suffix {', '.join(SUFFIXES)}; needs matplotlib", metavar="FILE")

    def __post_init__(self) -> None:
        for name in policies_of(self.policies):
            if name not in POLICIES:
                raise ValueError(f"--policies {name}: is none of {', '.join(POLICIES)}")
        sizes_of(self.sizes)
        try:
            Lengths.parse(self.prompt_tokens)
        except ValueError as error:
            raise ValueError(f"--prompt-tokens {error}") from None
        check_files(self.output, self.plot)
        check_model(self.model)

    @property
    def workload(self) -> Workload:
        """The load, typed."""
        return Workload(
            num_warmup=self.warmup,
            num_requests=self.requests,
            slots=self.slots,
            prompt=Lengths.parse(self.prompt_tokens),
            max_tokens=self.max_tokens,
            num_stop_ids=self.stop_ids,
            block_size=self.block_size,
            seed=self.seed,
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """All runs, in their order, and what the load turned out to be."""

    runs: list[CellRun]
    need_blocks: float
    mean_output_tokens: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0, 1 if a request failed or said something else under pressure, 2 for what the user can mend, 130."""
    config = load(PressureConfig, PROG, _DESCRIPTION, argv)
    return Bench(PROG, measure, _show, _to_json, _plot, lambda measured: complaints(measured.runs)).run(config, argv)


def _show(console: Console, measured: Measured) -> None:
    show(console, figures_of(measured.runs))


def _plot(measured: Measured, path: Path) -> None:
    plot(figures_of(measured.runs), path)


def _to_json(measured: Measured) -> dict[str, Any]:
    cells = [asdict(each) for each in figures_of(measured.runs)]
    sizes = {"need_blocks": measured.need_blocks, "mean_output_tokens": measured.mean_output_tokens}
    return sizes | {"cells": cells, "runs": [_run_to_json(run) for run in measured.runs]}


def measure(config: PressureConfig, console: Console) -> Measured:
    """Every run of every round. ValueError: a pool is below what a node starts with. ClusterProblem."""
    workload = config.workload
    ample = Cell("full", None, workload.ample_blocks)
    names, sizes = policies_of(config.policies), sizes_of(config.sizes)
    # How many runs there will be is known before how many blocks they will have.
    order = schedule(
        [Cell(name, size, 0) for name in names for size in sizes],
        ample,
        config.rounds,
        _PER_LAP,
        random.Random(config.seed),
    )
    with StepProgress(console, "runs", len(order)) as progress:
        first = run_cell(config.model, workload, order[0])
        progress.advance(first.cell.name)
        num_tokens = [prompt + len(said) for prompt, said in zip(first.prompt_tokens, first.token_ids, strict=True)]
        need = need_blocks(num_tokens, workload.slots, workload.block_size)
        mean_output_tokens = first.output_tokens / workload.num_requests
        console.print(
            f"{workload.num_requests} requests, {workload.slots} at a time, say {mean_output_tokens:.0f} of "
            f"{workload.max_tokens} tokens: {need:.0f} blocks of {workload.block_size} are 100 %"
        )
        least = round(need * min(sizes) / 100)
        if least < workload.least_blocks:
            raise ValueError(
                f"--sizes {min(sizes)}: {least} blocks do not hold the {workload.max_model_len} tokens that one request may "
                "have; give more --slots, a larger size, or fewer --max-tokens"
            )
        runs = [first]
        for cell in order[1:]:
            num_blocks = cell.num_blocks if cell.percent is None else round(need * cell.percent / 100)
            run = run_cell(config.model, workload, replace(cell, num_blocks=num_blocks))
            runs.append(compared(run, first))
            progress.advance(run.cell.name)
    return Measured(runs, need, mean_output_tokens)


def policies_of(text: str) -> list[str]:
    """The names, each once."""
    return list(dict.fromkeys(part for part in text.split(",") if part))


def sizes_of(text: str) -> list[int]:
    """Percentages, each once, ascending. ValueError says in one sentence what is wrong."""
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        sizes = [0]
    if sizes[0] < 1:
        raise ValueError(f"--sizes {text}: must be positive whole numbers with commas between")
    return sizes


def _run_to_json(run: CellRun) -> dict[str, Any]:
    content = asdict(run)
    del content["token_ids"], content["prompt_tokens"]
    return content


if __name__ == "__main__":
    sys.exit(main())
