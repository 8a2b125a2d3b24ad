"""`python -m bench.block_index`: what the index of nodes' caches costs the router, at up to 1,000 nodes with a million blocks each.

Nodes hold conversations behind one beginning, each on one node or, in a case with an s, on several (bench/block_caches.py).
All of that is told to an index as nodes tell it, in pieces; then prompts are looked up, and compared with what is known to be
held. Times are of the process's own CPU, so that other work on the machine counts little.
"""

from __future__ import annotations

import random
import re
import resource
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.block_caches import PIECE, SHARED, Asked, Caches
from bench.frame import check_files, write_result
from bench.machine import machine, utc_date
from bench.progress import StepProgress
from router.cache_index import CacheIndex
from runtime.config import knob, load

PROG: Final = "python -m bench.block_index"
SWEEP: Final = 2048  # buckets at once, as of router/cache_map.py
_MOST_SWEEPS: Final = 2000  # that are measured


class Case(NamedTuple):
    """How much is told to how large an index."""

    nodes: int
    max_mib: int
    are_shared: bool = False


@dataclass(frozen=True, slots=True)
class CacheIndexConfig:
    """One run."""

    cases: str = knob(
        "1x64,16x512,1000x256,1000x256s,1000x8192s",
        "nodes x MiB that the index may take; with an s many blocks are on several nodes",
        metavar="NxMIB[s],…",
    )
    blocks: int = knob(1 << 20, "blocks that each node holds", low=PIECE, high=1 << 24)
    chain: int = knob(128, "blocks of a conversation, behind the shared ones", low=1, high=4096)
    lookups: int = knob(2000, "prompts that are looked up", low=10, high=1 << 20)
    output: Path | None = knob(None, "JSON file for all figures", metavar="FILE")

    def __post_init__(self) -> None:
        self.sizes()
        check_files(self.output)

    def sizes(self) -> list[Case]:
        """Those of --cases. ValueError: they are none."""
        found = [re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})(s?)", case) for case in self.cases.split(",")]
        cases = [Case(int(each[1]), int(each[2]), bool(each[3])) for each in found if each]
        if len(cases) < len(found):
            raise ValueError(f"--cases {self.cases}: must be like 1000x256 or 1000x256s, with commas between")
        return cases


@dataclass(frozen=True, slots=True)
class Figures:
    """One case; microseconds are of CPU."""

    nodes: int
    max_mib: int
    are_shared: bool  # many blocks are on several nodes
    blocks: int  # told, over all nodes
    keys: int  # in the index
    share: float  # of all keys, how many it takes up
    mib: float
    resident_mib: float  # by which the process grew
    dropped: int  # holders of keys for which there was no room
    load_s: float  # all that was told, wall clock, making the keys included
    bytes_per_key: float
    piece_us: float  # median, 4,096 blocks stored
    piece_max_us: float
    stored_ns: float  # mean, per block told
    event_us: float  # mean: a message with 8 blocks stored and 8 evicted, per block
    decision_us: float  # median, a prompt of the shared blocks and one conversation
    decision_p99_us: float
    short_by: float  # blocks that the index says too few of a node's prefix, mean
    wrong: int  # decisions that named too many, or a node that holds nothing of the conversation
    sweep_max_us: float  # a step of forgetting a node


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0, or 130 after Ctrl-C."""
    config = load(CacheIndexConfig, PROG, "Measure the router's index of nodes' caches.", argv)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    total = sum(case.nodes for case in config.sizes())
    try:
        with StepProgress(console, "nodes", total) as progress:
            figures = [measure(config, case, lambda: progress.advance("told")) for case in config.sizes()]
    except KeyboardInterrupt:
        sys.stderr.write(f"{PROG}: interrupted; nothing was written\n")
        return 130
    show(console, figures)
    if config.output is not None:
        command = f"{PROG} {shlex.join(sys.argv[1:] if argv is None else argv)}"
        facts: dict[str, Any] = {"command": command, "date": utc_date(), "machine": machine()}
        write_result(PROG, config.output, {**facts, "cases": [asdict(each) for each in figures]})
        console.print(f"written: {config.output}")
    return 0


def measure(config: CacheIndexConfig, case: Case, told: Callable[[], None]) -> Figures:
    """One case."""
    nodes = case.nodes
    resident_mib, began_at = _resident_mib(), time.monotonic()
    index = CacheIndex(case.max_mib << 20, seed=1)
    caches = Caches(nodes, config.blocks, config.chain, are_shared=case.are_shared)
    holders = [index.open() or 0 for _ in range(nodes)]
    pieces, num_told = [], 0
    for node, holder in enumerate(holders):
        for keys in caches.pieces(node):
            pieces.append(cpu_us(lambda keys=keys, holder=holder: index.store(holder, keys)))  # type: ignore[misc]
            num_told += len(keys)
        told()
    load_s, resident_mib = time.monotonic() - began_at, _resident_mib() - resident_mib
    found = [_look_up(index, caches.draw(rng), holders) for rng in [random.Random(2)] for _ in range(config.lookups)]
    bytes_per_key, num_keys = index.num_bytes / index.num_keys, index.num_keys
    events = [cpu_us(lambda node=node: _change(index, holders[node], node)) / 16 for node in range(min(nodes, 500))]  # type: ignore[misc]
    index.close(holders[0])
    sweeps: list[float] = []
    while index.is_sweeping and len(sweeps) < _MOST_SWEEPS:
        sweeps.append(cpu_us(lambda: index.sweep(SWEEP)))
    decisions = [each.us for each in found]
    return Figures(
        **case._asdict(),
        blocks=num_told,
        keys=num_keys,
        share=index.share,
        mib=index.num_bytes / 2**20,
        resident_mib=resident_mib,
        dropped=index.num_dropped,
        load_s=load_s,
        bytes_per_key=bytes_per_key,
        piece_us=statistics.median(pieces),
        piece_max_us=max(pieces),
        stored_ns=1000 * sum(pieces) / num_told,
        event_us=statistics.mean(events),
        decision_us=statistics.median(decisions),
        decision_p99_us=statistics.quantiles(decisions, n=100)[98],
        short_by=statistics.mean(each.short_by for each in found),
        wrong=sum(each.is_wrong for each in found),
        sweep_max_us=max(sweeps),
    )


class _Found(NamedTuple):
    us: float
    short_by: int  # blocks that the index says too few, of one who holds all
    is_wrong: bool  # it named somebody who does not hold the conversation, or, whole, not all who do


def _look_up(index: CacheIndex, asked: Asked, holders: Sequence[int]) -> _Found:
    started_at = time.process_time_ns()
    runs = index.leading(asked.keys)
    us = (time.process_time_ns() - started_at) / 1000
    right = sum(1 << holders[node] for node in asked.nodes)
    first = 1 << holders[asked.nodes[0]]
    num_blocks = max((run.num_blocks for run in runs if run.holders & first), default=0)
    said = [run for run in runs if run.num_blocks > SHARED]
    is_wrong = any(run.holders & ~right for run in said)
    if index.share == 1 and not index.num_dropped:
        is_wrong |= not said or said[-1].holders != right or num_blocks != len(asked.keys)
    return _Found(us, len(asked.keys) - num_blocks, is_wrong)


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 2**20


def _change(index: CacheIndex, holder: int, node: int) -> None:
    """What a few steps of a node bring: eight blocks come, and eight others go for them."""
    keys = np.arange(1, 9, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(node)
    index.evict(1 << holder, keys)
    index.store(holder, keys)


def cpu_us(act: Callable[[], object]) -> float:
    """Microseconds of this process's CPU time."""
    started_at = time.process_time_ns()
    act()
    return (time.process_time_ns() - started_at) / 1000


def show(console: Console, figures: Sequence[Figures]) -> None:
    """The table."""
    table = Table()
    columns = (
        "nodes",
        "MiB, of at most",
        "share",
        "bytes a key",
        "told, ns a block",
        "all told, s",
        "event, us",
        "decision, us (p99)",
    )
    for column in (*columns, "short by, blocks", "wrong"):
        table.add_column(column, justify="right")
    for each in figures:
        table.add_row(
            f"{each.nodes}{' shared' * each.are_shared}",
            f"{each.mib:.0f}, {each.max_mib}",
            f"1/{1 / each.share:.0f}",
            f"{each.bytes_per_key:.1f}",
            f"{each.stored_ns:.0f}",
            f"{each.load_s:.0f}",
            f"{each.event_us:.1f}",
            f"{each.decision_us:.0f} ({each.decision_p99_us:.0f})",
            f"{each.short_by:.1f}",
            str(each.wrong),
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
