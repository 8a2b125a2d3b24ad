"""`python -m bench.engine`: steps of one engine against what the machine's memory and arithmetic allow, and where the time goes.

    case = decode rows x context, or a chunk      limit = max(bytes / R, operations / F)      ratio = step / limit

R and F (limits.py) are measured beside each step, with the same threads; a ratio is the median over rounds. The step is the
node's: from plan to token ids, sampler included. Not here: scheduling, the network (`baton bench` has all of it).
"""

from __future__ import annotations

import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from rich.console import Console
from rich.table import Table

from bench.frame import check_files, write_result
from bench.machine import machine, utc_date
from bench.progress import StepProgress
from runtime.config import knob, load, set_thread_environment
from runtime.process import fatal

if TYPE_CHECKING:
    from bench.engine_steps import Steps, Work
    from bench.limits import Limits

PROG: Final = "python -m bench.engine"
_WIDTH: Final = 160  # of a table that goes to a file
_STEPS_A_ROUND: Final = 5
_PARTS_STEPS: Final = 5


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One run."""

    model: Path = knob(help="model directory in Hugging Face layout", metavar="DIR")
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = knob(
        "auto", "of weights and KV; auto: what the model's files hold"
    )
    kernels: Literal["cpu", "numba", "torch", "triton"] = knob("cpu", "what computes; as of a node")
    weight_dtype: Literal["auto", "int8"] = knob("auto", "of the linears' weights; as of a node")
    threads: int = knob(1, "compute threads, also of R and F", low=1, high=1024)
    batches: str = knob("1,8,32", "decode rows of a step", metavar="N,…")
    contexts: str = knob("128,512,2048", "positions that each decode row sees", metavar="N,…")
    chunks: str = knob("512:0,512:1536", "prefill chunks, TOKENS:CONTEXT each; empty: none", metavar="N:N,…")
    temperature: float = knob(1.0, "of the sampling; 0 is greedy", low=0, high=2)
    block_size: int = knob(16, "token positions of a KV block", low=1, high=1024)
    rounds: int = knob(7, "how often each case is measured between measurements of R and F", low=1, high=10_000)
    output: Path | None = knob(None, "JSON file for all figures", metavar="FILE")

    def __post_init__(self) -> None:
        for name in ("batches", "contexts"):
            _numbers(name, getattr(self, name))
        _chunks(self.chunks)
        check_files(self.output)


@dataclass(frozen=True, slots=True)
class Figures:
    """What one case gave; seconds of a step."""

    case: str
    step_s: float  # median over rounds of each round's median
    best_step_s: float
    limit_s: float
    limit_is: str  # "bytes" or "operations"
    ratio: float  # median over rounds
    best_ratio: float
    parts_s: dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0, or 2 for what the user can mend, 130 after Ctrl-C."""
    config = load(EngineConfig, PROG, "Measure an engine's steps against the limits of this machine.", argv)
    set_thread_environment(config.threads)  # before torch loads
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _WIDTH
    try:
        figures, facts = _measure(config, console)
    except ValueError as error:
        fatal(f"{PROG}: {error}")
    except KeyboardInterrupt:
        sys.stderr.write(f"{PROG}: interrupted; nothing was written\n")
        return 130
    show(console, figures)
    if config.output is not None:
        command = f"{PROG} {shlex.join(sys.argv[1:] if argv is None else argv)}"
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(config).items()}
        result = {"command": command, "date": utc_date(), "machine": machine(), "settings": settings, **facts}
        write_result(PROG, config.output, {**result, "cases": [asdict(each) for each in figures]})
        console.print(f"written: {config.output}")
    return 0


def _measure(config: EngineConfig, console: Console) -> tuple[list[Figures], dict[str, Any]]:
    import torch

    from bench.engine_steps import Case, Steps, random_memory, work_of
    from bench.limits import Limits
    from engine.kv_memory import TORCH_DTYPES
    from engine.model import load_model

    torch.set_num_threads(config.threads)
    model = load_model(config.model, config.dtype, config.kernels, weight_dtype=config.weight_dtype)
    if model.shortfall:
        console.print(f"warning: {model.shortfall}")
    batches, contexts = _numbers("batches", config.batches), _numbers("contexts", config.contexts)
    cases = [Case(batch, context) for context in contexts for batch in batches]
    cases += [Case(0, context, chunk) for chunk, context in _chunks(config.chunks)]
    if not cases:
        raise ValueError("--batches, --contexts, --chunks: there is nothing to measure")
    memory = random_memory(model, config.block_size, cases)
    dtype = TORCH_DTYPES[model.dtype]
    weight_itemsize = 1 if config.weight_dtype == "int8" else dtype.itemsize
    limits = Limits(dtype)
    console.print(f"{config.model}, {model.dtype}, kernels {model.kernels.name}, {config.threads} threads")
    figures, reads, multiplies = [], [], []
    with StepProgress(console, "rounds", len(cases) * config.rounds) as progress:
        for case in cases:
            steps = Steps(case, model, memory, config.temperature)
            work = work_of(case, model.config, dtype.itemsize, weight_itemsize)
            rounds = []
            for _ in range(config.rounds):
                rounds.append(_round(steps, limits))
                progress.advance(case.name)
            figures.append(_figures(steps, work, rounds))
            reads += [each.bytes_per_s for each in rounds]
            multiplies += [each.operations_per_s for each in rounds]
    facts = {
        "kernels": model.kernels.name,
        "bytes_per_s": statistics.median(reads),
        "operations_per_s": statistics.median(multiplies),
    }
    return figures, facts


@dataclass(frozen=True, slots=True)
class _Round:
    step_s: float
    bytes_per_s: float
    operations_per_s: float


def _round(steps: Steps, limits: Limits) -> _Round:
    """Both limits, some steps, and R again: what changed meanwhile changed for both."""
    from bench.limits import seconds_of

    before, operations_per_s = limits.bytes_per_s(), limits.operations_per_s()
    seconds = statistics.median(seconds_of(steps.run) for _ in range(_STEPS_A_ROUND))
    return _Round(seconds, max(before, limits.bytes_per_s()), operations_per_s)


def _figures(steps: Steps, work: Work, rounds: Sequence[_Round]) -> Figures:
    limits = [(work.num_bytes / each.bytes_per_s, work.num_operations / each.operations_per_s) for each in rounds]
    ratios = [each.step_s / max(limit) for each, limit in zip(rounds, limits, strict=True)]
    limit_s = statistics.median(max(limit) for limit in limits)
    by_bytes, by_operations = (statistics.median(each) for each in zip(*limits, strict=True))
    return Figures(
        case=steps.case.name,
        step_s=statistics.median(each.step_s for each in rounds),
        best_step_s=min(each.step_s for each in rounds),
        limit_s=limit_s,
        limit_is="bytes" if by_bytes >= by_operations else "operations",
        ratio=statistics.median(ratios),
        best_ratio=min(ratios),
        parts_s=steps.parts(_PARTS_STEPS),
    )


def show(console: Console, figures: Sequence[Figures]) -> None:
    """Two tables: the ratios, and where the time goes."""
    table = Table(title=None, box=None, pad_edge=False)
    for heading in ("milliseconds", "step", "limit", "by", "ratio", "best ratio"):
        table.add_column(heading, justify="left" if heading in ("milliseconds", "by") else "right", no_wrap=True)
    for each in figures:
        numbers = (f"{1000 * each.step_s:.2f}", f"{1000 * each.limit_s:.2f}", each.limit_is)
        table.add_row(each.case, *numbers, f"{each.ratio:.2f}", f"{each.best_ratio:.2f}")
    console.print(table)
    names = list(dict.fromkeys(name for each in figures for name in each.parts_s))
    parts = Table(title=None, box=None, pad_edge=False)
    parts.add_column("where they go", no_wrap=True)
    for name in names:
        parts.add_column(name, justify="right")
    for each in figures:
        parts.add_row(each.case, *(f"{1000 * each.parts_s.get(name, 0):.2f}" for name in names))
    console.print(parts)


def _numbers(name: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",") if part]
    except ValueError:
        numbers = [0]
    if any(number < 1 for number in numbers):
        raise ValueError(f"--{name} {text}: must be positive whole numbers with commas between")
    return numbers


def _chunks(text: str) -> list[tuple[int, int]]:
    try:
        pairs = [(int(chunk), int(context)) for chunk, context in (part.split(":") for part in text.split(",") if part)]
    except ValueError:
        pairs = [(0, 0)]
    if any(chunk < 1 or context < 0 for chunk, context in pairs):
        raise ValueError(f"--chunks {text}: must be TOKENS:CONTEXT pairs with commas between")
    return pairs


if __name__ == "__main__":
    sys.exit(main())
