"""`python -m bench.kv_pool_step`: what a node's step loses to a KV pool, be it one that takes a second for each block.

    none      nothing is saved
    memory    who gives way and who is done is stored in this process, as fast as memory is
    slow      a store that takes --slow-ms for each block: the staging buffer is full nearly always, and most is dropped

Scheduler, runner thread, and the pool's threads are a node's own, in one loop; sessions are left out. Sequences come as
others end, in a pool of blocks so small that some give way. All ways compute the same tokens. They take turns, and a ratio is
the median over rounds. Not here: how fast stores are (bench.kv_pool), what is gained by a pool (bench.prefix).
"""

from __future__ import annotations

import random
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Final, Literal

from rich.console import Console
from rich.table import Table

from bench.distribution import percentile
from bench.frame import check_files, check_model, write_result
from bench.machine import machine, utc_date
from bench.progress import StepProgress
from connector.kv_record import KvRecords
from connector.kv_store import KvStoreLimits, RunRead
from connector.memory_store import MemoryStore
from runtime.config import knob, load, set_thread_environment
from runtime.process import fatal, run_async

if TYPE_CHECKING:
    from engine.model import Model

PROG: Final = "python -m bench.kv_pool_step"
WAYS: Final = ("none", "memory", "slow")
_BLOCK_SIZE: Final = 16


@dataclass(frozen=True, slots=True)
class StepBenchConfig:
    """One run."""

    model: Path = knob(help="model directory in Hugging Face layout", metavar="DIR")
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = knob(
        "auto", "of weights and KV; auto: what the model's files hold"
    )
    kernels: Literal["cpu", "numba", "torch", "triton"] = knob("cpu", "what computes; as of a node")
    threads: int = knob(1, "compute threads; the loop needs a core of its own beside them", low=1, high=1024)
    batch: int = knob(8, "sequences that run together", low=1, high=4096)
    prompt_tokens: int = knob(256, "tokens of each prompt", low=1, high=100_000)
    output_tokens: int = knob(64, "tokens that a sequence says, a quarter more or less", low=4, high=100_000)
    pool_percent: int = knob(80, "blocks, in percent of what the batch needs at its longest", low=1, high=1000)
    staging_mib: int = knob(32, "the staging buffer", low=1, high=1 << 20)
    slow_ms: int = knob(1000, "milliseconds that the slow store takes for a block", low=0, high=1_000_000)
    steps: int = knob(300, "steps of a round", low=2, high=1_000_000)
    rounds: int = knob(9, "rounds of each way", low=1, high=10_000)
    output: Path | None = knob(None, "JSON file for all figures", metavar="FILE")

    def __post_init__(self) -> None:
        check_files(self.output)
        check_model(self.model)

    @property
    def longest(self) -> int:
        """Tokens of a sequence at most."""
        return self.prompt_tokens + self.output_tokens * 5 // 4 + 1

    @property
    def num_blocks(self) -> int:
        """At least one sequence fits."""
        of_one = -(-self.longest // _BLOCK_SIZE)
        return max(of_one, self.batch * of_one * self.pool_percent // 100)


@dataclass(frozen=True, slots=True)
class Round:
    """One way, once."""

    way: str
    p50_s: float  # of a step
    mean_s: float
    p99_s: float
    num_saved: int  # blocks that were to be stored
    num_dropped: int  # of those, for want of room in the buffer
    num_written: int  # by the end of the round


@dataclass(frozen=True, slots=True)
class Figures:
    """One way; medians over rounds."""

    way: str
    p50_s: float  # of a step, as the next two
    mean_s: float
    p99_s: float
    p50_ratio: float  # to "none" in the same round, as the next two
    mean_ratio: float
    p99_ratio: float
    num_saved: float
    num_dropped: float
    num_written: float


class SlowStore:
    """Implements KvStore: takes its time for each block, and keeps none."""

    def __init__(self, block_s: float) -> None:
        self._block_s = block_s
        self._is_closed = Event()

    def identity(self) -> bytes:
        """As KvStore.identity."""
        return bytes(16)

    def missing(self, keys: Sequence[bytes]) -> list[bool]:
        return [True] * len(keys)

    def num_leading(self, keys: Sequence[bytes]) -> int:
        return 0

    def write(self, blocks: Sequence[tuple[bytes, memoryview]]) -> int:
        return sum(not self._is_closed.wait(self._block_s) for _ in blocks)

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> RunRead:
        return RunRead(0, is_corrupt=False)

    def remove(self, keys: Sequence[bytes]) -> None:
        """As KvStore.remove."""

    def close(self) -> None:
        self._is_closed.set()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0, or 2 for what the user can mend, 130 after Ctrl-C."""
    config = load(StepBenchConfig, PROG, "Measure what a node's steps lose to a KV pool.", argv)
    set_thread_environment(config.threads)  # before torch loads
    console = Console(highlight=False, markup=False, soft_wrap=True)
    try:
        rounds = _measure(config, console)
    except ValueError as error:
        fatal(f"{PROG}: {error}")
    except KeyboardInterrupt:
        sys.stderr.write(f"{PROG}: interrupted; nothing was written\n")
        return 130
    figures = [figures_of(way, rounds) for way in WAYS]
    show(console, figures)
    if config.output is not None:
        command = f"{PROG} {shlex.join(sys.argv[1:] if argv is None else argv)}"
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(config).items()}
        facts: dict[str, Any] = {"command": command, "date": utc_date(), "machine": machine(), "settings": settings}
        content = {"ways": [asdict(each) for each in figures], "rounds": [asdict(each) for each in rounds]}
        write_result(PROG, config.output, {**facts, **content})
        console.print(f"written: {config.output}")
    return 0


def _measure(config: StepBenchConfig, console: Console) -> list[Round]:
    import torch

    from engine.model import load_model

    torch.set_num_threads(config.threads)
    model = load_model(config.model, config.dtype, config.kernels)
    console.print(f"{config.model}, {model.dtype}, kernels {model.kernels.name}, {config.threads} threads")
    rounds = []
    with StepProgress(console, "rounds", len(WAYS) * (config.rounds + 1)) as progress:
        for number in range(-1, config.rounds):  # the first warms up
            first = number % len(WAYS)
            for way in WAYS[first:] + WAYS[:first]:
                measured = run_async(_round(model, config, way))
                rounds += [measured] if number >= 0 else []
                progress.advance(way)
    return rounds


async def _round(model: Model, config: StepBenchConfig, way: str) -> Round:
    from bench.kv_pool_node import PooledNode

    node = PooledNode(model, config.batch, config.num_blocks, _BLOCK_SIZE, config.longest, is_saving=way != "none")
    slow = SlowStore(config.slow_ms / 1000)
    if way == "memory":
        node.open_pool(MemoryStore(KvRecords(node.block_bytes), KvStoreLimits()), config.staging_mib << 20)
    elif way == "slow":
        node.open_pool(slow, config.staging_mib << 20)
    rng = random.Random(0)

    def submit() -> None:
        prompt = tuple(rng.randrange(model.config.vocab_size) for _ in range(config.prompt_tokens))
        node.submit(prompt, rng.randrange(config.output_tokens * 3 // 4, config.output_tokens * 5 // 4 + 1))

    for _ in range(2 * config.batch):
        submit()
    seconds, last_at = [], time.perf_counter()
    for _ in range(config.steps):
        for _ in range(await node.step()):
            submit()
        now = time.perf_counter()
        seconds.append(now - last_at)
        last_at = now
    saves = node.measures.amounts()["kv_pool_saves"]
    slow.close()  # so that its thread ends
    await node.stop()
    ordered = sorted(seconds[config.steps // 10 :])  # the batch fills up
    of_a_step = statistics.median(ordered), statistics.fmean(ordered), percentile(ordered, 99)
    return Round(way, *of_a_step, node.num_saved, saves["full"], saves["written"])


def figures_of(way: str, rounds: Sequence[Round]) -> Figures:
    """Reduce the rounds of one way; ratios are taken within a round."""
    own = [each for each in rounds if each.way == way]
    without = [each for each in rounds if each.way == "none"]

    pairs = list(zip(own, without, strict=True))
    median = statistics.median
    return Figures(
        way,
        p50_s=median(each.p50_s for each in own),
        mean_s=median(each.mean_s for each in own),
        p99_s=median(each.p99_s for each in own),
        p50_ratio=median(each.p50_s / other.p50_s for each, other in pairs),
        mean_ratio=median(each.mean_s / other.mean_s for each, other in pairs),
        p99_ratio=median(each.p99_s / other.p99_s for each, other in pairs),
        num_saved=median(each.num_saved for each in own),
        num_dropped=median(each.num_dropped for each in own),
        num_written=median(each.num_written for each in own),
    )


def show(console: Console, figures: Sequence[Figures]) -> None:
    """One table."""
    table = Table(title=None, box=None, pad_edge=False)
    for heading in (
        "KV pool",
        "p50 ms",
        "ratio",
        "mean ms",
        "ratio",
        "p99 ms",
        "ratio",
        "blocks saved",
        "dropped",
        "written",
    ):
        table.add_column(heading, justify="left" if heading == "KV pool" else "right", no_wrap=True)
    for each in figures:
        pairs = ((each.p50_s, each.p50_ratio), (each.mean_s, each.mean_ratio), (each.p99_s, each.p99_ratio))
        times = [cell for seconds, ratio in pairs for cell in (f"{1000 * seconds:.2f}", f"{ratio:.3f}")]
        counts = (each.num_saved, each.num_dropped, each.num_written)
        table.add_row(each.way, *times, *(f"{value:.0f}" for value in counts))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
