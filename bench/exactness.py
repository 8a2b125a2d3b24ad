"""`python -m bench.exactness`: are streams that survived a fault, token for token, those of a cluster nothing happened to?

    for each dtype: a fleet, and one engine by itself --the same requests--> tokens
    for each way back: kill, recompute or move in the middle of the streams, until enough tokens were compared --> share per cell

A cell is dtype x way x sampling. Only streams that were on the node that was hit count, and a run counts only if counters show
that the way was the one meant (recovery.py). On CPUs every share must be 1: one different token is a bug, and exit code 1.
"""

from __future__ import annotations

import json
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bench.cluster import ClusterProblem
from bench.fleet import Fleet
from bench.frame import check_files, check_model, write_result
from bench.machine import machine, utc_date
from bench.progress import StepProgress
from bench.recovery import WAYS, Played, Streams, fault_free, model_name, play
from runtime.config import knob, load
from runtime.process import fatal

PROG: Final = "python -m bench.exactness"
DTYPES: Final = ("fp32", "bf16", "fp16")
PATHS: Final = {"move": "move", "kill": "prefix cache", "recompute": "recompute"}  # way -> the recovery path's name
SAMPLINGS: Final = ("greedy", "seeded")
BEGIN: Final = "<!-- table: bench.exactness -->"
END: Final = "<!-- end of table -->"
_DESCRIPTION: Final = (
    "Break streams in the middle, let them come back in each way there is, and compare every token with those of a cluster that "
    "nothing happens to. Ways: "
    + "; ".join(f"{way}: {WAYS[way]}" for way in PATHS)
    + ". A table of dtype x way x sampling, and "
    "exit code 1 if one token differs. The defaults take about ten minutes on two cores."
)


@dataclass(frozen=True, slots=True)
class ExactnessConfig:
    """One run."""

    model: Path = knob(help="model directory; a random tiny one will do: baton model make", metavar="DIR")
    dtypes: str = knob(
        "fp32,bf16,fp16", "what nodes compute in; one that is not bit-exact here is shown as such", metavar="NAME,…"
    )
    ways: str = knob(",".join(PATHS), "how streams come back", metavar="NAME,…")
    tokens: int = knob(10_000, "tokens to compare in each cell, at least", low=1, high=1 << 40)
    streams: int = knob(16, "streams under way, half of them on the node that is hit", low=4, high=256)
    prompt_tokens: int = knob(200, "of each prompt", low=1, high=1 << 20)
    fault_after: int = knob(100, "tokens that each stream has said when it happens", low=1, high=1 << 20)
    max_tokens: int = knob(1500, "tokens of each stream; enough to be under way still", low=2, high=1 << 20)
    seed: int = knob(0, "of the requests", low=0, high=(1 << 63) - 1)
    output: Path | None = knob(None, "JSON file for the cells and runs", metavar="FILE")

    def __post_init__(self) -> None:
        for flag, given, known in (("dtypes", self.dtypes, DTYPES), ("ways", self.ways, tuple(PATHS))):
            for name in given.split(","):
                if name not in known:
                    raise ValueError(f"--{flag} {name}: is none of {', '.join(known)}")
        if self.fault_after >= self.max_tokens:
            raise ValueError(f"--fault-after {self.fault_after}: must be below --max-tokens {self.max_tokens}")
        check_model(self.model)
        check_files(self.output)


@dataclass(slots=True)
class Cell:
    """Streams of one dtype that came back in one way, drawn in one manner."""

    dtype: str
    way: str
    sampling: str
    is_bit_exact: bool  # what the nodes say of themselves
    streams: int = 0
    equal: int = 0
    tokens: int = 0  # compared, of these streams
    tokens_behind: int = 0  # of them, those said after the fault

    def take(self, run: Played, expected: Sequence[Sequence[int]]) -> None:
        """The streams of one run that are of this cell."""
        for i in run.hit:
            if (run.bodies[i]["temperature"] > 0) is (self.sampling == "seeded"):
                stream = run.streams[i]
                self.streams += 1
                self.equal += stream.token_ids == list(expected[i])
                self.tokens += len(stream.token_ids)
                self.tokens_behind += len(stream.token_ids) - stream.tokens_before(run.fault_at)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0, 1 if a stream was not its fault-free one or another way was gone, 2 for what the user can mend, 130."""
    config = load(ExactnessConfig, PROG, _DESCRIPTION, argv)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or a cluster would outlive the benchmark
    try:
        cells, complaints = measure(config, console)
    except ClusterProblem as error:
        fatal(f"{PROG}: {error}")
    except KeyboardInterrupt:
        sys.stderr.write(f"{PROG}: interrupted; nothing was written\n")
        return 130
    show(console, cells)
    for complaint in complaints:
        console.print(f"broken: {complaint}")
    if config.output is not None:
        command = f"{PROG} {shlex.join(sys.argv[1:] if argv is None else argv)}"
        facts: dict[str, Any] = {"command": command, "date": utc_date(), "machine": machine()}
        write_result(PROG, config.output, facts | {"complaints": complaints, "cells": [asdict(cell) for cell in cells]})
        console.print(f"written: {config.output}")
    return 1 if complaints or any(cell.equal < cell.streams for cell in cells if cell.is_bit_exact) else 0


def measure(config: ExactnessConfig, console: Console) -> tuple[list[Cell], list[str]]:
    """Every cell with its tokens, and what went wrong. ClusterProblem."""
    load_ = Streams(config.streams, config.prompt_tokens, config.max_tokens, config.fault_after, config.seed)
    dtypes, ways = config.dtypes.split(","), config.ways.split(",")
    cells: list[Cell] = []
    complaints: list[str] = []
    with StepProgress(console, "dtypes and ways", len(dtypes) * len(ways)) as progress:
        for dtype in dtypes:
            with ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-")))
                (folder / "alone").mkdir()
                flags = load_.flags(dtype)
                one_engine = {"router": (), "mixed-0": flags["decode-0"]}
                oracle = stack.enter_context(Fleet.started(config.model, folder / "alone", one_engine))
                fleet = stack.enter_context(Fleet.started(config.model, folder, flags))
                for way in ways:
                    of_way = [
                        Cell(dtype, way, sampling, bool(fleet.state("decode-0")["bit_exact"])) for sampling in SAMPLINGS
                    ]
                    complaints += _fill(of_way, config, load_, oracle, fleet)
                    cells += of_way
                    progress.advance(f"{dtype}, {PATHS[way]}")
    return cells, complaints


def _fill(cells: Sequence[Cell], config: ExactnessConfig, load_: Streams, oracle: Fleet, fleet: Fleet) -> list[str]:
    """Run one way on one dtype's fleet until its cells have their tokens; what went wrong, which ends it."""
    way, number = cells[0].way, 0
    while any(cell.tokens < config.tokens for cell in cells):
        bodies = load_.draw(model_name(config.model), way, number)
        run = play(fleet, None, way, load_, bodies)
        if found := run.complaints():
            return [f"{cells[0].dtype}, {way}: {said}" for said in found]
        expected = fault_free(oracle, bodies)
        for cell in cells:
            cell.take(run, expected)
        fleet.restore()
        number += 1
    return []


def table_of(cells: Sequence[dict[str, Any]]) -> str:
    """The cells of a result file as a table in Markdown, a row for each dtype and way."""
    lines = [
        "| dtype | came back by | greedy: equal | tokens | seeded: equal | tokens |",
        "|---|---|---|---|---|---|",
    ]
    rows: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        share = f"{cell['equal']} of {cell['streams']} streams ({100 * cell['equal'] / max(cell['streams'], 1):.4g} %)"
        rows.setdefault((cell["dtype"], cell["way"]), []).extend([share, f"{cell['tokens']:,}"])
    lines += [f"| {' | '.join([dtype, PATHS[way], *row])} |" for (dtype, way), row in rows.items()]
    return "\n".join(lines)


def write_table(result: Path, page: Path) -> None:
    """Put the table of a result file into a page, between its two marks."""
    cells = json.loads(result.read_text(encoding="utf-8"))["cells"]
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{table_of(cells)}\n{END}{after}", encoding="utf-8")


def show(console: Console, cells: Sequence[Cell]) -> None:
    """A row for each cell."""
    table = Table(title=None, box=None, pad_edge=False)
    for heading in ("dtype", "came back by", "sampling", "streams", "equal", "tokens", "behind the fault"):
        table.add_column(heading, justify="left" if heading in ("dtype", "came back by", "sampling") else "right")
    for cell in cells:
        numbers = (cell.streams, cell.equal, cell.tokens, cell.tokens_behind)
        dtype = cell.dtype if cell.is_bit_exact else f"{cell.dtype} (not bit-exact here)"
        table.add_row(dtype, PATHS[cell.way], cell.sampling, *(f"{number:,}" for number in numbers))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
