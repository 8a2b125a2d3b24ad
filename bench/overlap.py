"""`python -m bench.overlap`: what it buys that a node plans the next step before it has read the last one.

    depth 1    plan, run, read, plan, run, read …           the runner waits while the loop reads and plans
    depth 2    a second plan lies ready when a step ends     as a node does it (node/steps.py)

The loop, the runner thread, the scheduler and the messages to a router are a node's own; only the session is left out. Rounds of
both depths take turns, and a ratio is the median over rounds. Not here: how fast a step is (bench.engine).
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, cast

from rich.console import Console
from rich.table import Table

from bench.frame import Bench, check_files, check_kernels, whole_numbers
from bench.progress import StepProgress
from runtime.config import knob, load, set_thread_environment
from runtime.process import run_async

if TYPE_CHECKING:
    from engine.binding import Binder
    from engine.model import Model
    from engine.plan import SamplingParams

PROG: Final = "python -m bench.overlap"
_BLOCK_SIZE: Final = 16


@dataclass(frozen=True, slots=True)
class OverlapConfig:
    """One run."""

    model: Path = knob(help="model directory in Hugging Face layout", metavar="DIR")
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = knob(
        "auto", "of weights and KV; auto: what the model's files hold"
    )
    kernels: Literal["cpu", "numba", "torch", "triton"] = knob("cpu", "what computes; as of a node")
    threads: int = knob(1, "compute threads; the loop needs a core of its own beside them", low=1, high=1024)
    batches: str = knob("1,8,32", "sequences that decode together", metavar="N,…")
    prompt_tokens: int = knob(32, "tokens of each prompt", low=1, high=100_000)
    steps: int = knob(100, "decode steps of a round", low=2, high=100_000)
    rounds: int = knob(7, "rounds of each depth", low=1, high=10_000)
    output: Path | None = knob(None, "JSON file for all figures", metavar="FILE")

    def __post_init__(self) -> None:
        self.batch_sizes()
        check_files(self.output)
        check_kernels()

    def batch_sizes(self) -> list[int]:
        """The numbers of --batches. ValueError: they are none."""
        return whole_numbers("--batches", self.batches, high=4096)


@dataclass(frozen=True, slots=True)
class Figures:
    """One batch size; seconds of a step, medians over rounds."""

    batch: int
    alone_s: float  # depth 1
    overlapped_s: float  # depth 2
    ratio: float  # of overlapped to alone, median over rounds


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0, or 2 for what the user can mend, 130 after Ctrl-C."""
    config = load(OverlapConfig, PROG, "Measure what planning a step ahead of the runner buys.", argv)
    set_thread_environment(config.threads)  # before torch loads
    return Bench(PROG, _measure, show, lambda figures: {"batches": [asdict(each) for each in figures]}).run(
        config, argv
    )


def _measure(config: OverlapConfig, console: Console) -> list[Figures]:
    import torch

    from engine.model import load_model

    torch.set_num_threads(config.threads)
    model = load_model(config.model, config.dtype, config.kernels)
    console.print(f"{config.model}, {model.dtype}, kernels {model.kernels.name}, {config.threads} threads")
    figures = []
    with StepProgress(console, "rounds", 2 * config.rounds * len(config.batch_sizes())) as progress:
        for batch in config.batch_sizes():
            seconds: dict[int, list[float]] = {1: [], 2: []}
            for number in range(config.rounds):
                for depth in (1, 2) if number % 2 else (2, 1):
                    load_of_it = Load(batch, config.prompt_tokens, config.steps)
                    seconds[depth].append(run_async(step_s(model, load_of_it, depth, plain)))
                    progress.advance(f"batch {batch}, depth {depth}")
            ratios = [two / one for one, two in zip(seconds[1], seconds[2], strict=True)]
            medians = statistics.median(seconds[1]), statistics.median(seconds[2])
            figures.append(Figures(batch, *medians, statistics.median(ratios)))
    return figures


class Load(NamedTuple):
    """What is decoded together."""

    batch: int
    prompt_tokens: int  # of each sequence
    steps: int


def plain(number: int) -> SamplingParams:
    """Of a sequence that asks for nothing special."""
    from engine.plan import SamplingParams

    return SamplingParams(1.0, number)


async def step_s(
    model: Model, load: Load, depth: int, sampling: Callable[[int], SamplingParams], grammars: Binder | None = None
) -> float:
    """Seconds of a step in which the whole batch decodes; `sampling` by the sequence's number."""
    from engine.block_pool import BlockPool
    from engine.kv_memory import KvMemory
    from engine.plan import StepResult
    from engine.runner import TorchRunner
    from engine.scheduler import Scheduler, SchedulerConfig
    from engine.sequence import Progresses, SequenceSpec
    from node.events import RouterId
    from node.runner_thread import RunnerThread
    from node.steps import plan_ahead
    from node.token_batches import TokenBatches
    from proto.attempt_key import AttemptKey

    batch = load.batch
    longest = load.prompt_tokens + load.steps + 1
    num_blocks = batch * -(-longest // _BLOCK_SIZE)
    pool = BlockPool(num_blocks, _BLOCK_SIZE)
    scheduler = Scheduler(SchedulerConfig(batch, max(batch, 4096), longest), pool, bytes(32))
    rng, key_of, router = random.Random(batch), {}, RouterId("router", 1)
    for number in range(batch):
        key_of[number] = AttemptKey(f"r{number}", 0, 0)
        prompt = tuple(rng.randrange(model.config.vocab_size) for _ in range(load.prompt_tokens))
        scheduler.submit(SequenceSpec(number, prompt, 0, sampling(number), load.steps + 1, frozenset(), ()))
    results: asyncio.Queue[StepResult] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    memory = KvMemory(model.config, _BLOCK_SIZE, num_blocks, model.dtype)
    runner = TorchRunner(model, memory, batch, longest, grammars=grammars)

    def hand_over(result: StepResult) -> None:
        loop.call_soon_threadsafe(results.put_nowait, result)

    thread = RunnerThread(runner, hand_over)

    def tell(progress: Progresses) -> None:
        batches = TokenBatches(from_receiver=True)
        for sequence_id, _, token_id in progress.plain():
            batches.add(router, key_of[cast(int, sequence_id)], 0, (token_id,))
        for item in progress.others:
            if item.token_id is not None:
                batches.add(router, key_of[cast(int, item.sequence_id)], 0, [item.token_id], item.finish)
        for action in batches.to_actions():
            action.message.SerializeToString()

    started_at = None
    num_read = 0
    try:
        while scheduler.num_running or scheduler.num_waiting or scheduler.steps_in_flight:
            for step in plan_ahead(scheduler, depth):
                thread.submit(step.plan)
            tell(scheduler.complete(await results.get()))
            num_read += started_at is not None
            if started_at is None and not scheduler.num_waiting:
                started_at = time.perf_counter()  # the prompts are read, from here on all decode
        assert started_at is not None
        return (time.perf_counter() - started_at) / num_read
    finally:  # Ctrl-C included: a thread that outlives the loop has nobody to tell, and aborts the process as that ends
        await thread.stop()


def show(console: Console, figures: Sequence[Figures]) -> None:
    """One table."""
    table = Table(title=None, box=None, pad_edge=False)
    for heading in ("milliseconds of a step", "one at a time", "one ahead", "ratio"):
        table.add_column(heading, justify="left" if heading.startswith("milli") else "right", no_wrap=True)
    for each in figures:
        milliseconds = (f"{1000 * each.alone_s:.2f}", f"{1000 * each.overlapped_s:.2f}")
        table.add_row(f"batch {each.batch}", *milliseconds, f"{each.ratio:.3f}")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
