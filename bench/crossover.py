"""`python -m bench.crossover`: where prefill and decode apart lose to one mixed node on the same cores, and where they win.

    apart   a prefill and a decode node, half of the cores each      every prompt is handed over, however short
    mixed   one node that does both, on all of them

Both clusters run all the time, and have the same load by turns: so many requests under way, prompts of one length. For each length
and load the ratio apart ÷ mixed of the time to the first token, of the time per token, and of the 99th percentile of the time
between two tokens, which is what prompts of others cost a stream. Below 1 apart wins. The crossover is the least length from which
on it does.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

import uvloop
from rich.console import Console
from rich.table import Table

from bench.cluster import ClusterProblem
from bench.completions import Asked, Asking, Record
from bench.distribution import percentile
from bench.fleet import Fleet, pin
from bench.frame import SUFFIXES, Bench, check_files, check_model, whole_numbers
from bench.http_exchange import Server
from bench.load import Sender, run_closed_loop
from bench.progress import StepProgress
from runtime.config import knob, load
from runtime.process import run_async

PROG: Final = "python -m bench.crossover"
SIDES: Final = ("apart", "mixed")
METRICS: Final = ("ttft", "tpot", "gap_p99", "seconds")
_BLOCK: Final = 16


@dataclass(frozen=True, slots=True)
class CrossoverConfig:
    """One run."""

    model: Path = knob(help="model directory; baton model make --like smollm2-135m", metavar="DIR")
    lengths: str = knob("16,64,256,1024", "tokens of the prompts", metavar="N,…")
    loads: str = knob("1,4,8", "requests under way", metavar="N,…")
    requests: int = knob(16, "of each length, load, side and round; at least twice the load", low=1, high=100_000)
    output_tokens: int = knob(32, "of each", low=2, high=10_000)
    rounds: int = knob(2, "of every length and load", low=1, high=1000)
    seed: int = knob(0, "of the prompts", low=0, high=(1 << 63) - 1)
    output: Path | None = knob(None, "JSON file for all figures", metavar="FILE")
    plot: Path | None = knob(None, f"picture, its suffix {', '.join(SUFFIXES)}; needs matplotlib", metavar="FILE")

    def __post_init__(self) -> None:
        whole_numbers("--lengths", self.lengths)
        whole_numbers("--loads", self.loads, 256)
        check_files(self.output, self.plot)
        check_model(self.model)


@dataclass(frozen=True, slots=True)
class Cell:
    """One length at one load; by side, the median over rounds, in seconds; ratios are medians of the rounds' own."""

    prompt_tokens: int
    load: int
    by_side: dict[str, dict[str, float]]
    ratios: dict[str, float]  # apart / mixed, of each of METRICS


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0, 2 for what the user can mend, 130 after Ctrl-C."""
    config = load(
        CrossoverConfig, PROG, "Compare prefill and decode apart with one mixed node on the same cores.", argv
    )
    return Bench(PROG, measure, show, to_json, plot).run(config, argv)


def measure(config: CrossoverConfig, console: Console) -> list[Cell]:
    """Every cell. ClusterProblem."""
    lengths, loads = whole_numbers("--lengths", config.lengths), whole_numbers("--loads", config.loads, 256)
    longest = max(lengths) + config.output_tokens + _BLOCK
    num_blocks = -(-longest // _BLOCK) * (max(loads) + 2)
    sizes = ["--max-model-len", str(longest), "--num-blocks", str(num_blocks), "--max-num-seqs", str(max(loads) + 2)]
    cores = sorted(os.sched_getaffinity(0))
    half = max(len(cores) // 2, 1)
    of_half = [*sizes, "--threads", str(half)]
    flags = {
        "apart": {"router": ["--local-prefill-max-tokens", "0"], "prefill-0": of_half, "decode-0": of_half},
        "mixed": {"router": [], "mixed-0": [*sizes, "--threads", str(len(cores))]},
    }
    cells = []
    with ExitStack() as stack:
        urls = {}
        for side in SIDES:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-")))
            fleet = stack.enter_context(Fleet.started(config.model.absolute(), folder, flags[side]))
            urls[side] = fleet.url
            if side == "apart":
                pin(fleet.pid("prefill-0"), cores[:half])
                pin(fleet.pid("decode-0"), cores[half:] or cores)
        run = _Run(config, urls)
        with StepProgress(console, "loads", len(lengths) * len(loads) * config.rounds * len(SIDES)) as progress:
            for length in lengths:
                cells += [run.cell(length, each, progress) for each in loads]
    return cells


class _Run:
    """The requests."""

    def __init__(self, config: CrossoverConfig, urls: dict[str, str]) -> None:
        self._config = config
        self._servers = {side: Server.parse(url) for side, url in urls.items()}
        self._vocab_size = json.loads((config.model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
        self._random = random.Random(config.seed)
        self._asking = Asking(config.model.absolute().name, "token_ids")

    def cell(self, length: int, load_: int, progress: StepProgress) -> Cell:
        """All rounds of one length at one load."""
        rounds: list[dict[str, dict[str, float]]] = []
        for number in range(self._config.rounds):
            found = {}
            for side in SIDES if number % 2 else SIDES[::-1]:
                found[side] = self._run(side, length, load_)
                progress.advance(f"prompts of {length}, {load_} under way, {side}")
            rounds.append(found)

        def median(side: str, name: str) -> float:
            return statistics.median(each[side][name] for each in rounds)

        ratios = {
            name: statistics.median(each["apart"][name] / each["mixed"][name] for each in rounds) for name in METRICS
        }
        return Cell(length, load_, {side: {name: median(side, name) for name in METRICS} for side in SIDES}, ratios)

    def _run(self, side: str, length: int, load_: int) -> dict[str, float]:
        number = max(self._config.requests, 2 * load_)
        asked = [self._asked(index, length) for index in range(number)]
        sender = Sender(self._servers[side], is_stream=True, timeout_s=600.0)
        records = run_async(run_closed_loop(sender, asked, load_), uvloop.new_event_loop)
        bad = [record for record in records if not record.is_ok]
        if bad:
            raise ClusterProblem(f"{side}: {bad[0].status}: {bad[0].error}")
        return figures_of(records)

    def _asked(self, index: int, length: int) -> Asked:
        prompt = [self._random.randrange(self._vocab_size) for _ in range(length)]
        body = self._asking.body(json.dumps(prompt), self._config.output_tokens)
        return Asked(index, body, length, self._config.output_tokens)


def figures_of(records: Sequence[Record]) -> dict[str, float]:
    """Of one run: medians of first token, time per token and whole request, and p99 of the time between tokens."""
    gaps = sorted(chain.from_iterable(record.itl_s for record in records))
    return {
        "ttft": statistics.median(each for record in records if (each := record.ttft_s) is not None),
        "tpot": statistics.median(each for record in records if (each := record.tpot_s) is not None),
        "gap_p99": percentile(gaps, 99),
        "seconds": statistics.median(record.end_s for record in records),
    }


def crossovers(cells: Sequence[Cell]) -> dict[str, dict[int, int | None]]:
    """By metric and load: the least length from which on apart is ahead at every length measured; None: it never is."""
    found: dict[str, dict[int, int | None]] = {}
    for name in METRICS:
        for load_ in sorted({cell.load for cell in cells}):
            won = None
            for cell in sorted((each for each in cells if each.load == load_), key=lambda each: -each.prompt_tokens):
                if cell.ratios[name] >= 1:
                    break
                won = cell.prompt_tokens
            found.setdefault(name, {})[load_] = won
    return found


def show(console: Console, cells: Sequence[Cell]) -> None:
    """The table, and the crossovers in words."""
    table = Table(title="apart ÷ mixed, and milliseconds of both")
    for heading in ("prompt", "under way", "first token", "per token", "p99 between tokens", "request"):
        table.add_column(heading, justify="right")
    for cell in cells:
        shown = [
            f"{cell.ratios[name]:.2f}  ({1000 * cell.by_side['apart'][name]:.1f} ÷ {1000 * cell.by_side['mixed'][name]:.1f})"
            for name in METRICS
        ]
        table.add_row(str(cell.prompt_tokens), str(cell.load), *shown)
    console.print(table)
    names = ("first token", "time per token", "p99 between tokens", "whole request")
    for name, by_load in zip(names, crossovers(cells).values(), strict=True):
        words = [
            f"{load_} under way: {'never' if at is None else f'from {at} tokens on'}" for load_, at in by_load.items()
        ]
        console.print(f"{name}: apart is ahead with {'; '.join(words)}")


def to_json(cells: Sequence[Cell]) -> dict[str, Any]:
    """All figures."""
    return {"cells": [asdict(each) for each in cells], "crossovers": crossovers(cells)}


def plot(cells: Sequence[Cell], path: Path) -> None:
    """Ratios by length, a line for each load. Needs matplotlib, and only here."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "baton", "font.size": 9}):
        figure = Figure(figsize=(10, 7), layout="constrained")
        for axes, name in zip(figure.subplots(2, 2).flat, METRICS, strict=True):
            for load_ in sorted({cell.load for cell in cells}):
                mine = sorted((cell for cell in cells if cell.load == load_), key=lambda cell: cell.prompt_tokens)
                lengths, ratios = [cell.prompt_tokens for cell in mine], [cell.ratios[name] for cell in mine]
                axes.plot(lengths, ratios, marker="o", markersize=3, label=f"{load_} under way")
            axes.axhline(1, color="black", linewidth=1, linestyle=":")
            axes.set(xlabel="tokens of the prompt", ylabel=f"{name}, apart ÷ mixed", xscale="log", yscale="log")
            axes.grid(alpha=0.3, which="both")
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=8)
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    sys.exit(main())
