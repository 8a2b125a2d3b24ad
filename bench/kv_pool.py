"""`python -m bench.kv_pool`: how fast the KV pool's stores write and read runs of blocks, against what is under them.

The ways (bench/kv_pool_ways.py) take turns within a round, in an order that changes from round to round, and ratios are taken
within a round: only they mean anything on a machine that others use. Each way writes a run, reads it back, and forgets it,
which is not measured. In the first rounds (`--warmup`), which are not counted, what was read is compared with what was
written. Files lie in the page cache: nothing waits for a disk. Not here: what a step of a node loses while this happens
(bench.kv_pool_step).
"""

from __future__ import annotations

import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.frame import check_files, write_result
from bench.kv_pool_ways import BASELINE, Blocks, Way, make_ways
from bench.machine import machine, utc_date
from bench.progress import StepProgress
from bench.redis_server import started_redis
from bench.transport import sizes
from bench.transport_report import Spread, size, spread_of
from runtime.config import knob, load

PROG: Final = "python -m bench.kv_pool"
_OPERATIONS: Final = ("write", "read")


@dataclass(frozen=True, slots=True)
class KvPoolBenchConfig:
    """One run."""

    block_kib: str = knob("64,512,2048", "sizes of a KV block in KiB, each a case of its own", metavar="N,N,..")
    run_mib: int = knob(64, "MiB that are written and read in a row", low=1, high=1 << 20)
    rounds: int = knob(20, "rounds to measure; in each of them every way has one run", low=1, high=1_000_000)
    warmup: int = knob(2, "rounds before them, not counted; what is read is checked in these", low=1, high=1000)
    folder: Path | None = knob(None, "where the files go; none: where temporary ones do", metavar="DIR")
    output: Path | None = knob(None, "JSON file for the figures of the run and of each round", metavar="FILE")

    def __post_init__(self) -> None:
        try:
            blocks = sizes(self.block_kib, 1 << 10)
        except ValueError as error:
            raise ValueError(f"--block-kib {error}") from None
        if max(blocks) > self.run_mib << 20:
            raise ValueError("--block-kib: a run holds one block at least")
        if self.folder is not None and not self.folder.is_dir():
            raise ValueError(f"--folder {self.folder}: is no folder")
        check_files(self.output)


class Sample(NamedTuple):
    """One way, once."""

    way: str
    operation: str
    round_index: int
    seconds: float


@dataclass(frozen=True, slots=True)
class WayFigures:
    """One way and operation at one size; `ratio` is of the rates of one round, to `baseline`."""

    way: str
    operation: Literal["write", "read"]
    gb_per_s: Spread
    ratio: Spread | None
    baseline: str | None


@dataclass(frozen=True, slots=True)
class CaseFigures:
    """One size of blocks; a GB is 10^9 bytes."""

    block_bytes: int
    run_bytes: int
    ways: tuple[WayFigures, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0, 2 for what the user can mend, 130 after Ctrl-C."""
    config = load(KvPoolBenchConfig, PROG, "Measure the stores of the KV pool against what is under them.", argv)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 100
    cases = []
    try:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-kv-pool-", dir=config.folder)))
            redis_url = stack.enter_context(started_redis(folder))
            if redis_url is None:
                console.print("no redis-server: left out")
            num_ways = 6 + 3 * (redis_url is not None)
            of_blocks = sizes(config.block_kib, 1 << 10)
            total = len(of_blocks) * (config.rounds + config.warmup) * num_ways
            progress = stack.enter_context(StepProgress(console, "runs", total))
            for block_bytes in of_blocks:
                case = folder / str(block_bytes)
                case.mkdir()
                samples = list(
                    _measure(config, block_bytes, make_ways(case, redis_url, _empty(config, block_bytes)), progress)
                )
                cases.append((_figures(config, block_bytes, samples), samples))
    except KeyboardInterrupt:
        sys.stderr.write(f"{PROG}: interrupted; nothing was written\n")
        return 130
    for figures, _ in cases:
        _show(console, figures)
    if config.output is not None:
        command = f"{PROG} {shlex.join(sys.argv[1:] if argv is None else argv)}".rstrip()
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(config).items()}
        facts: dict[str, Any] = {"command": command, "date": utc_date(), "machine": machine(), "settings": settings}
        content = [asdict(figures) | {"samples": samples} for figures, samples in cases]
        write_result(PROG, config.output, {**facts, "cases": content})
        console.print(f"written: {config.output}")
    return 0


def _empty(config: KvPoolBenchConfig, block_bytes: int) -> Blocks:
    return np.zeros(((config.run_mib << 20) // block_bytes, block_bytes), np.uint8)


def _measure(
    config: KvPoolBenchConfig, block_bytes: int, ways: dict[str, Way], progress: StepProgress
) -> Iterator[Sample]:
    into = _empty(config, block_bytes)
    blocks = np.random.default_rng(0).integers(0, 256, into.shape, dtype=np.uint8)
    names = tuple(ways)
    for round_index in range(-config.warmup, config.rounds):
        first = round_index % len(names)
        for name in names[first:] + names[:first]:
            way = ways[name]
            for operation, perform in (("write", way.write), ("read", way.read)):
                into[:] = 0
                began_at = time.perf_counter()
                perform(blocks if operation == "write" else into)
                seconds = time.perf_counter() - began_at
                if round_index >= 0:
                    yield Sample(name, operation, round_index, seconds)
            if round_index < 0 and not np.array_equal(into, blocks):
                raise AssertionError(f"{name}: what was read is not what was written")
            way.forget()
            progress.advance(f"{size(block_bytes)}, {name}")


def _figures(config: KvPoolBenchConfig, block_bytes: int, samples: Sequence[Sample]) -> CaseFigures:
    """Rates are compared within a round, so that what slows the machine slows both."""
    run_bytes = (config.run_mib << 20) // block_bytes * block_bytes
    seconds = {(sample.way, sample.operation, sample.round_index): sample.seconds for sample in samples}
    found = []
    for operation in _OPERATIONS:
        for way in dict.fromkeys(sample.way for sample in samples):
            baseline = BASELINE.get(way.removesuffix(" keyed"))
            own = [
                (each.round_index, each.seconds) for each in samples if (each.way, each.operation) == (way, operation)
            ]
            ratios = [seconds[baseline, operation, number] / own_s for number, own_s in own] if baseline else []
            rates = spread_of([run_bytes / 1e9 / own_s for _, own_s in own])
            found.append(WayFigures(way, operation, rates, spread_of(ratios) if ratios else None, baseline))
    return CaseFigures(block_bytes, run_bytes, tuple(found))


def _show(console: Console, case: CaseFigures) -> None:
    console.print(f"blocks of {size(case.block_bytes)}, {size(case.run_bytes)} in a row:")
    table = Table(title=None, box=None, pad_edge=False)
    for heading in ("", "way", "GB/s", "p10 .. p90", "of", "ratio", "p10 .. p90"):
        table.add_column(heading, justify="left" if heading in ("", "way", "of") else "right", no_wrap=True)
    for each in case.ways:
        rate, ratio = each.gb_per_s, each.ratio
        cells = [each.operation, each.way, f"{rate.p50:.2f}", f"{rate.p10:.2f} .. {rate.p90:.2f}"]
        if ratio is not None:
            cells += [each.baseline or "", f"{ratio.p50:.2f}", f"{ratio.p10:.2f} .. {ratio.p90:.2f}"]
        table.add_row(*cells)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
