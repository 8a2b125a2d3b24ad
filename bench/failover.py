"""`python -m bench.failover`: what a lost node costs the streams that were on it, by the way back.

    settings --Streams--> one fleet of real processes, a fault per run --recovery.py--> runs --> table, timeline, JSON

The next token of a stream comes after the fault is found, the sequence is prefilled again as far as nobody has its KV, and
handed over. The design allows for that: found + prefill + 50 ms. `prefill` is what the prefill node's runner took for its steps,
so that the target holds for the last of the streams that were hit together; the ratio is (its next token) / target. Tokens must
be those of a cluster that nothing happens to: exit code 1 where they are not, or where counters say that another way was gone.
Not here: how many streams are equal over many tokens (bench.exactness).
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from rich.console import Console
from rich.table import Table

from bench.failover_plot import plot
from bench.fleet import Fleet
from bench.frame import SUFFIXES, Bench, check_files, check_model
from bench.namespaces import network, why_not
from bench.progress import StepProgress
from bench.recovery import NAMES, WAYS, Played, Streams, fault_free, model_name, play
from runtime.config import knob, load

PROG: Final = "python -m bench.failover"
_DESCRIPTION: Final = (
    "Kill, stop, cut off or drain a decode node in the middle of streams, and measure when each of them goes on. Starts a "
    "router, two prefill and two decode nodes; half of the streams are on the node that is hit, the others show what its end "
    "costs them. Ways: "
    + "; ".join(f"{way}: {said}" for way, said in WAYS.items())
    + ". The defaults take three minutes on two cores."
)


@dataclass(frozen=True, slots=True)
class FailoverConfig:
    """One run."""

    model: Path = knob(help="model directory; a random tiny one will do: baton model make", metavar="DIR")
    ways: str = knob(",".join(WAYS), "what happens, and so how streams come back", metavar="NAME,…")
    rounds: int = knob(3, "runs of each way", low=1, high=1000)
    streams: int = knob(8, "streams under way, half of them on the node that is hit", low=2, high=256)
    prompt_tokens: int = knob(512, "of each prompt; a prefix cache saves them", low=1, high=1 << 20)
    fault_after: int = knob(100, "tokens that each stream has said when it happens", low=1, high=1 << 20)
    max_tokens: int = knob(1500, "tokens of each stream; enough to be under way still", low=2, high=1 << 20)
    dtype: Literal["fp32", "bf16", "fp16"] = knob("fp32", "what nodes compute in")
    seed: int = knob(0, "of the requests", low=0, high=(1 << 63) - 1)
    output: Path | None = knob(None, "JSON file for all figures and runs", metavar="FILE")
    plot: Path | None = knob(
        None, f"picture of each way's first run, its suffix {', '.join(SUFFIXES)}; needs matplotlib", metavar="FILE"
    )

    def __post_init__(self) -> None:
        for way in self.way_names:
            if way not in WAYS:
                raise ValueError(f"--ways {way}: is none of {', '.join(WAYS)}")
        if "cut" in self.way_names and (reason := why_not()):
            raise ValueError(f"--ways cut: {reason}; leave it out")
        if self.fault_after >= self.max_tokens:
            raise ValueError(f"--fault-after {self.fault_after}: must be below --max-tokens {self.max_tokens}")
        check_model(self.model)
        check_files(self.output, self.plot)

    @property
    def way_names(self) -> list[str]:
        """The ways, in the order given."""
        return self.ways.split(",")

    @property
    def load(self) -> Streams:
        """The streams, typed."""
        return Streams(self.streams, self.prompt_tokens, self.max_tokens, self.fault_after, self.seed)


@dataclass(frozen=True, slots=True)
class WayFigures:
    """One way over its rounds: medians, and the worst ratio. Seconds."""

    way: str
    num_hit: int
    found_s: float
    prefill_tokens: float
    prefill_s: float
    next_token_s: float  # of the stream in the middle
    last_next_token_s: float  # of the last stream
    target_s: float
    ratio: float  # last_next_token_s / target_s
    worst_ratio: float
    others_pause_s: float  # the longest pause of a stream on the other node


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0, 1 if a stream was not its fault-free one or another way was gone, 2 for what the user can mend, 130."""
    config = load(FailoverConfig, PROG, _DESCRIPTION, argv)
    return Bench(PROG, _measure, _show, _to_json, _plot, lambda result: complaints_of(result.runs)).run(config, argv)


@dataclass(frozen=True, slots=True)
class Result:
    """All runs, and each way's figures."""

    ways: list[WayFigures]
    runs: list[Played]


def _measure(config: FailoverConfig, console: Console) -> Result:
    runs = measure(config, console)
    return Result([figures_of([run for run in runs if run.way == way]) for way in config.way_names], runs)


def _show(console: Console, result: Result) -> None:
    show(console, result.ways)


def _to_json(result: Result) -> dict[str, Any]:
    return {"ways": [asdict(each) for each in result.ways], "runs": [to_json(run) for run in result.runs]}


def _plot(result: Result, path: Path) -> None:
    """Each way's first run."""
    plot([next(run for run in result.runs if run.way == each.way) for each in result.ways], path)


def measure(config: FailoverConfig, console: Console) -> list[Played]:
    """Every way once a round, each run on a fleet that the last fault has been mended on. ClusterProblem."""
    load_, runs = config.load, []
    with ExitStack() as stack:
        net = stack.enter_context(network(NAMES)) if "cut" in config.way_names else None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-")))
        alone = folder / "alone"
        alone.mkdir()
        flags = load_.flags(config.dtype)
        one_engine = {"router": (), "mixed-0": flags["decode-0"]}
        oracle = stack.enter_context(Fleet.started(config.model, alone, one_engine))
        fleet = stack.enter_context(Fleet.started(config.model, folder, flags, net))
        with StepProgress(console, "runs", config.rounds * len(config.way_names)) as progress:
            for number in range(config.rounds):
                for way in config.way_names:
                    bodies = load_.draw(model_name(config.model), way, number)
                    expected = fault_free(oracle, bodies)
                    run = play(fleet, net, way, load_, bodies)
                    got = [stream.token_ids for stream in run.streams]
                    different = sum(a != b for a, b in zip(got, expected, strict=True))
                    runs.append(replace(run, num_different=different))
                    fleet.restore()
                    progress.advance(way)
    return runs


def figures_of(runs: Sequence[Played]) -> WayFigures:
    """A way's row of the table."""
    last = [max((run.next_token_s(i) for i in run.hit), default=0.0) for run in runs]
    ratios = [at / run.target_s for at, run in zip(last, runs, strict=True)]
    others = [pause_s for run in runs for pause_s in _pauses_of_others(run)]
    every = [run.next_token_s(i) for run in runs for i in run.hit]
    return WayFigures(
        way=runs[0].way,
        num_hit=len(every),
        found_s=statistics.median(run.found_s for run in runs),
        prefill_tokens=statistics.median(run.prefill_tokens for run in runs),
        prefill_s=statistics.median(run.prefill_s for run in runs),
        next_token_s=statistics.median(every) if every else 0.0,
        last_next_token_s=statistics.median(last),
        target_s=statistics.median(run.target_s for run in runs),
        ratio=statistics.median(ratios),
        worst_ratio=max(ratios),
        others_pause_s=max(others, default=0.0),
    )


def _pauses_of_others(run: Played) -> list[float]:
    pauses = [stream.longest_pause(run.fault_at) for i, stream in enumerate(run.streams) if i not in run.hit]
    return [after - before for before, after in pauses]


def complaints_of(runs: Sequence[Played]) -> list[str]:
    """One sentence for each thing that broke the promise, or the measurement."""
    found = [f"{run.way}: {said}" for run in runs for said in run.complaints()]
    return [
        *found,
        *(f"{run.way}: {run.num_different} streams have other tokens" for run in runs if run.num_different),
    ]


def show(console: Console, figures: Sequence[WayFigures]) -> None:
    """A row for each way; times in milliseconds."""
    table = Table(title=None, box=None, pad_edge=False)
    headings = ("way", "hit", "found", "again", "comp.", "next", "last", "target", "ratio", "worst", "others")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "way" else "right", no_wrap=True)
    for each in figures:
        seconds = (each.prefill_s, each.next_token_s, each.last_next_token_s, each.target_s)
        table.add_row(
            each.way,
            str(each.num_hit),
            f"{1000 * each.found_s:.0f}",
            f"{each.prefill_tokens:.0f}",
            *(f"{1000 * value:.0f}" for value in seconds),
            f"{each.ratio:.2f}",
            f"{each.worst_ratio:.2f}",
            f"{1000 * each.others_pause_s:.0f}",
        )
    console.print(table)
    console.print(
        "milliseconds from the fault on, medians over the rounds: found by the router; again: tokens prefilled; comp.: for how "
        "long, on the one prefill node; next token of the median and of the last stream; target: found + comp. + 50; ratio: last / "
        "target, median and worst; others: longest pause of a stream that was not hit"
    )


def to_json(run: Played) -> dict[str, Any]:
    """A run with the instants of its streams' events, in seconds from the fault."""
    return {
        "way": run.way,
        "found_s": run.found_s,
        "prefill_s": run.prefill_s,
        "prefill_tokens": run.prefill_tokens,
        "retries": run.retries,
        "num_different": run.num_different,
        "streams": [
            {
                "is_hit": i in run.hit,
                "error": stream.error,
                "next_token_s": round(run.next_token_s(i), 4) if i in run.hit else None,
                "num_tokens": len(stream.token_ids),
            }
            for i, stream in enumerate(run.streams)
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
