"""`python -m bench.block_index`: what the index of nodes' caches costs the router, at up to 1,000 nodes with a million blocks each.

Each node holds conversations of `--chain` blocks behind one beginning that all of them share. All of that is told to an
index as nodes tell it, in pieces; then prompts are looked up, and compared with what is known to be held. Times are of
the process's own CPU, so that other work on the machine counts little.
"""

from __future__ import annotations

import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.machine import machine, utc_date
from bench.progress import StepProgress
from router.cache_index import CacheIndex
from router.key_table import Keys
from runtime.config import knob, load
from runtime.process import write_atomically

PROG: Final = "python -m bench.block_index"
PIECE: Final = 4096  # keys in a message, as of node/cache_feed.py
SHARED: Final = 64  # blocks that every node holds
SWEEP: Final = 2048  # buckets at once, as of router/cache_map.py


@dataclass(frozen=True, slots=True)
class CacheIndexConfig:
    """One run."""

    cases: str = knob(
        "1x256,16x512,100x256,1000x256,1000x2048", "nodes x MiB that the index may take", metavar="NxMIB,…"
    )
    blocks: int = knob(1 << 20, "blocks that each node holds", low=PIECE, high=1 << 24)
    chain: int = knob(128, "blocks of a conversation, behind the shared ones", low=1, high=4096)
    lookups: int = knob(2000, "prompts that are looked up", low=10, high=1 << 20)
    output: Path | None = knob(None, "JSON file for all figures", metavar="FILE")

    def __post_init__(self) -> None:
        self.sizes()

    def sizes(self) -> list[tuple[int, int]]:
        """Nodes and MiB of --cases. ValueError: they are none."""
        pairs = [case.split("x") for case in self.cases.split(",")]
        if not all(len(pair) == 2 and all(part.isdecimal() and int(part) for part in pair) for pair in pairs):
            raise ValueError(f"--cases {self.cases}: must be like 1000x256, with commas between")
        return [(int(nodes), int(mib)) for nodes, mib in pairs]


@dataclass(frozen=True, slots=True)
class Figures:
    """One case; microseconds are of CPU."""

    nodes: int
    max_mib: int
    blocks: int  # told, over all nodes
    keys: int  # in the index
    share: float  # of all keys, how many it takes up
    mib: float
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
    total = sum(nodes for nodes, _ in config.sizes())
    try:
        with StepProgress(console, "nodes", total) as progress:
            figures = [measure(config, *case, lambda: progress.advance("told")) for case in config.sizes()]
    except KeyboardInterrupt:
        sys.stderr.write(f"{PROG}: interrupted; nothing was written\n")
        return 130
    show(console, figures)
    if config.output is not None:
        command = f"{PROG} {shlex.join(sys.argv[1:] if argv is None else argv)}"
        facts: dict[str, Any] = {"command": command, "date": utc_date(), "machine": machine()}
        write_atomically(config.output, {**facts, "cases": [asdict(each) for each in figures]})
        console.print(f"written: {config.output}")
    return 0


def keys_of(node: int, first: int, number: int) -> Keys:
    """Keys of a node's blocks from the `first` on, the same ones each time (SplitMix64); of node -1: the shared ones."""
    mixed = np.arange(first, first + number, dtype=np.uint64) + np.uint64((node + 2) << 32)
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def measure(config: CacheIndexConfig, nodes: int, max_mib: int, told: Callable[[], None]) -> Figures:
    """One case."""
    index = CacheIndex(max_mib << 20, seed=1)
    holders = [index.open() or 0 for _ in range(nodes)]
    pieces: list[float] = []
    for node, holder in enumerate(holders):
        index.store(holder, keys_of(-1, 0, SHARED))
        for first in range(0, config.blocks, PIECE):
            keys = keys_of(node, first, min(PIECE, config.blocks - first))
            pieces.append(cpu_us(lambda keys=keys, holder=holder: index.store(holder, keys)))  # type: ignore[misc]
        told()
    events = [cpu_us(lambda node=node: _change(index, holders[node], node)) / 16 for node in range(min(nodes, 500))]  # type: ignore[misc]
    rng = random.Random(2)
    decisions, short_by, wrong = [], 0, 0
    for _ in range(config.lookups):
        node, chain = rng.randrange(nodes), rng.randrange(config.blocks // config.chain)
        prompt = np.concatenate((keys_of(-1, 0, SHARED), keys_of(node, chain * config.chain, config.chain)))
        started_at = time.process_time_ns()
        runs = index.leading(prompt)
        decisions.append((time.process_time_ns() - started_at) / 1000)
        said = {run.num_blocks: run.holders for run in runs}
        of_node = max((number for number, bits in said.items() if bits >> holders[node] & 1), default=0)
        too_many = any(bits & ~(1 << holders[node]) for number, bits in said.items() if number > SHARED)
        wrong += too_many or of_node > len(prompt)
        short_by += len(prompt) - of_node
    bytes_per_key, num_keys = index.num_bytes / index.num_keys, index.num_keys
    index.close(holders[0])
    sweeps = []
    while index.is_sweeping:
        sweeps.append(cpu_us(lambda: index.sweep(SWEEP)))
    return Figures(
        nodes=nodes,
        max_mib=max_mib,
        blocks=nodes * (config.blocks + SHARED),
        keys=num_keys,
        share=index.share,
        mib=index.num_bytes / 2**20,
        bytes_per_key=bytes_per_key,
        piece_us=statistics.median(pieces),
        piece_max_us=max(pieces),
        stored_ns=1000 * sum(pieces) / (nodes * config.blocks),
        event_us=statistics.mean(events),
        decision_us=statistics.median(decisions),
        decision_p99_us=statistics.quantiles(decisions, n=100)[98],
        short_by=short_by / config.lookups,
        wrong=wrong,
        sweep_max_us=max(sweeps),
    )


def _change(index: CacheIndex, holder: int, node: int) -> None:
    """What a few steps of a node bring: eight blocks come, and eight others go for them."""
    index.evict(1 << holder, keys_of(node, 1 << 30, 8))
    index.store(holder, keys_of(node, 1 << 30, 8))


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
        "event, us",
        "decision, us (p99)",
    )
    for column in (*columns, "short by, blocks", "wrong"):
        table.add_column(column, justify="right")
    for each in figures:
        table.add_row(
            str(each.nodes),
            f"{each.mib:.0f}, {each.max_mib}",
            f"1/{1 / each.share:.0f}",
            f"{each.bytes_per_key:.1f}",
            f"{each.stored_ns:.0f}",
            f"{each.event_us:.1f}",
            f"{each.decision_us:.0f} ({each.decision_p99_us:.0f})",
            f"{each.short_by:.1f}",
            str(each.wrong),
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
