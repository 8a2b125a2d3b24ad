"""`python -m bench.start`: how long `baton up` takes to a ready cluster and to its first token, against loading torch alone.

    command --> ready: "Ctrl-C stops everything" --> first token of a request sent at once        ratio = ready / import torch

Each round has, one behind the other: a process that imports torch and ends, which any node does before anything else, and a cluster
with one router, one prefill and one decode node. Files are in the page cache from the second round on; the first is shown apart.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import httpx
from rich.console import Console
from rich.table import Table

from bench.cluster import ClusterProblem, started_cluster
from bench.frame import Bench, check_files, check_model
from bench.progress import StepProgress
from runtime.config import knob, load

PROG: Final = "python -m bench.start"
TARGET_S: Final = 10.0  # a small model's (docs/design.md, section 10)


@dataclass(frozen=True, slots=True)
class StartConfig:
    """One run."""

    model: Path = knob(help="model directory; baton model make --like smollm2-135m", metavar="DIR")
    rounds: int = knob(5, "clusters started and ended", low=1, high=1000)
    output: Path | None = knob(None, "JSON file for all figures", metavar="FILE")

    def __post_init__(self) -> None:
        check_files(self.output)
        check_model(self.model)


@dataclass(frozen=True, slots=True)
class Start:
    """One round; seconds from the command."""

    import_s: float  # of torch, in a process of its own, to its end
    ready_s: float
    token_s: float  # the first token of a prompt of three, asked for as soon as the cluster was ready


@dataclass(frozen=True, slots=True)
class Figures:
    """All rounds, in order, and their medians."""

    rounds: list[Start]
    import_s: float
    ready_s: float
    token_s: float
    ratio: float  # the median of each round's ready / import
    target_s: float = TARGET_S


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0, 2 for what the user can mend, 130 after Ctrl-C."""
    config = load(StartConfig, PROG, "Measure how long a cluster takes to start.", argv)
    return Bench(PROG, measure, show, asdict).run(config, argv)


def measure(config: StartConfig, console: Console) -> Figures:
    """Every round. ClusterProblem."""
    rounds = []
    with StepProgress(console, "starts", config.rounds) as progress:
        for _ in range(config.rounds):
            rounds.append(_round(config.model))
            progress.advance(f"ready after {rounds[-1].ready_s:.1f} s")
    return figures_of(rounds)


def _round(model: Path) -> Start:
    begin = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    import_s = time.monotonic() - begin
    begin = time.monotonic()
    with started_cluster(model, {}) as cluster:
        ready_s = time.monotonic() - begin
        fields = {"model": model.absolute().name, "prompt": [1, 2, 3], "max_tokens": 1, "temperature": 0.0}
        answer = httpx.post(f"{cluster.url}/v1/completions", json=fields, timeout=600, trust_env=False)
        token_s = time.monotonic() - begin
        if answer.status_code != httpx.codes.OK:
            raise ClusterProblem(f"{answer.status_code}: {answer.text[:200]}")
    return Start(import_s, ready_s, token_s)


def figures_of(rounds: Sequence[Start]) -> Figures:
    """Medians over rounds; a ratio is taken within its round."""
    return Figures(
        rounds=list(rounds),
        import_s=statistics.median(each.import_s for each in rounds),
        ready_s=statistics.median(each.ready_s for each in rounds),
        token_s=statistics.median(each.token_s for each in rounds),
        ratio=statistics.median(each.ready_s / each.import_s for each in rounds),
    )


def show(console: Console, figures: Figures) -> None:
    """The table."""
    table = Table(title=f"`baton up`, seconds from the command; ready is asked for within {TARGET_S:.0f} s")
    for heading in ("", "import torch", "ready", "ready / import", "first token"):
        table.add_column(heading, justify="right")
    first = figures.rounds[0]
    rows = [("median", figures.import_s, figures.ready_s, figures.ratio, figures.token_s)]
    rows += [("first round", first.import_s, first.ready_s, first.ready_s / first.import_s, first.token_s)]
    for name, *numbers in rows:
        table.add_row(name, *(f"{each:.2f}" for each in numbers))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
