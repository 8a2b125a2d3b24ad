"""`python -m bench.engine`: steps of one engine against what the machine's memory and arithmetic allow, and where the time goes.

    case = decode rows x context, or a chunk      limit = max(bytes / R, operations / F)      ratio = step / limit

R and F (limits.py) are measured beside each step, with the same threads; a ratio is the median over rounds. The step is the
node's: from plan to token ids, sampler included; on a CUDA device launched ahead, as there (engine_ahead.py). Not here:
scheduling, the network (`baton bench` has all of it).
"""

from __future__ import annotations

import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from rich.console import Console
from rich.table import Table

from bench.frame import check_files, check_kernels, write_result
from bench.machine import machine, utc_date
from bench.progress import StepProgress
from engine.model_sizes import SIZES
from runtime.config import knob, load, set_thread_environment
from runtime.process import fatal

if TYPE_CHECKING:
    import torch

    from bench.engine_steps import Case, Steps, Work
    from bench.limits import Limits
    from engine.model import Model

PROG: Final = "python -m bench.engine"
_WIDTH: Final = 160  # of a table that goes to a file
_PARTS_STEPS: Final = 5


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One run."""

    model: Path | None = knob(None, "model directory in Hugging Face layout", metavar="DIR")
    shape: str | None = knob(
        None, "instead of --model: random weights of a shape that baton model make knows", metavar="NAME"
    )
    device: Literal["cpu", "cuda"] = knob("cpu", "where; cuda: the Triton kernels, or torch if --kernels says so")
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
        if (self.model is None) == (self.shape is None):
            raise ValueError("--model DIR or --shape NAME: one of the two says what is measured")
        if self.shape is not None and self.shape not in SIZES:
            raise ValueError(f"--shape {self.shape}: must be one of {', '.join(SIZES)}")
        for name in ("batches", "contexts"):
            _numbers(name, getattr(self, name))
        parse_chunks(self.chunks)
        check_files(self.output)
        if (self.device, self.kernels) == ("cpu", "cpu"):
            check_kernels()


@dataclass(frozen=True, slots=True)
class Figures:
    """What one case gave; seconds of a step."""

    case: str
    step_s: float  # median over rounds of each round's median; cuda: of its mean over steps launched one ahead
    alone_s: float  # of a step that is read before the next one is launched; of a CPU, and of chunks, the same
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

    torch.set_num_threads(config.threads)
    try:
        return _measured(config, console)
    except torch.OutOfMemoryError:
        raise ValueError("--device cuda: it has no room for the weights, the KV and what steps need besides") from None


def _measured(config: EngineConfig, console: Console) -> tuple[list[Figures], dict[str, Any]]:
    from bench.engine_steps import Case, work_of
    from engine.kv_memory import TORCH_DTYPES

    batches, contexts = _numbers("batches", config.batches), _numbers("contexts", config.contexts)
    cases = [Case(batch, context) for context in contexts for batch in batches]
    cases += [Case(0, context, chunk) for chunk, context in parse_chunks(config.chunks)]
    model, device = _loaded(config)
    if model.shortfall:
        console.print(f"warning: {model.shortfall}")
    if not cases:
        raise ValueError("--batches, --contexts, --chunks: there is nothing to measure")
    bench = _bench_of(config, model, cases, device)
    itemsize = TORCH_DTYPES[model.dtype].itemsize
    weight_itemsize = 1 if config.weight_dtype == "int8" else itemsize
    console.print(
        f"{config.model or config.shape}, {model.dtype}, kernels {model.kernels.name}, {config.threads} threads"
        + (f", {bench.facts['device']}" if device.type == "cuda" else "")
    )
    figures, reads, multiplies = [], [], []
    with StepProgress(console, "rounds", len(cases) * config.rounds) as progress:
        for case in cases:
            steps = bench.steps_of(case)
            work = work_of(case, model.config, itemsize, weight_itemsize)
            rounds = []
            for _ in range(config.rounds):
                rounds.append(_round(steps, bench.limits))
                progress.advance(case.name)
            figures.append(_figures(steps, work, rounds))
            reads += [each.bytes_per_s for each in rounds]
            multiplies += [each.operations_per_s for each in rounds]
    facts = {
        **bench.facts,
        "kernels": model.kernels.name,
        "bytes_per_s": statistics.median(reads),
        "operations_per_s": statistics.median(multiplies),
    }
    return figures, facts


def _loaded(config: EngineConfig) -> tuple[Model, torch.device]:
    from bench.engine_shapes import shaped_model
    from engine.device import choose_device
    from engine.model import load_model
    from kernels.choice import choose_kernels

    device = choose_device(config.device)
    if config.model is not None:
        return load_model(config.model, config.dtype, config.kernels, device, config.weight_dtype), device
    choice = choose_kernels(config.kernels, device.type, config.weight_dtype)
    return shaped_model(SIZES[str(config.shape)], config.dtype, choice, device), device


@dataclass(frozen=True, slots=True)
class _Bench:
    """What differs between a CPU and a device."""

    limits: Limits
    steps_of: Callable[[Case], Steps]
    facts: dict[str, Any]


def _bench_of(config: EngineConfig, model: Model, cases: Sequence[Case], device: torch.device) -> _Bench:
    import torch

    from bench.engine_steps import Steps, random_memory
    from bench.limits import CpuLimits
    from engine.kv_memory import TORCH_DTYPES

    if device.type == "cuda":
        return _device_bench(config, model, cases, device)
    memory = random_memory(model, config.block_size, cases)
    facts = {"device": machine()["cpu_model"], "torch": torch.__version__}
    limits = CpuLimits(TORCH_DTYPES[model.dtype])
    return _Bench(limits, lambda case: Steps(case, model, memory, config.temperature), facts)


def _device_bench(config: EngineConfig, model: Model, cases: Sequence[Case], device: torch.device) -> _Bench:
    import torch

    from bench.device_clock import DeviceClock
    from bench.engine_ahead import AheadSteps, device_memory
    from bench.limits import DeviceLimits
    from engine.kv_memory import TORCH_DTYPES

    clock = DeviceClock(device)
    limits = DeviceLimits(device, TORCH_DTYPES[model.dtype], clock.median_of)
    memory = device_memory(model, config.block_size, cases, device)
    decodes = [case for case in cases if not case.chunk]
    clock.synchronize()
    begin = time.perf_counter()
    if decodes:  # as a node does before it is ready
        model.capture(memory.tensor, max(case.batch for case in decodes), max(case.context for case in decodes))
    clock.synchronize()
    facts = {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "triton": version("triton") if find_spec("triton") else "",
        "capture_s": time.perf_counter() - begin,
    }
    return _Bench(limits, lambda case: AheadSteps(case, model, memory, config.temperature, clock), facts)


@dataclass(frozen=True, slots=True)
class _Round:
    step_s: float
    alone_s: float
    bytes_per_s: float
    operations_per_s: float


def _round(steps: Steps, limits: Limits) -> _Round:
    """Both limits, some steps, and R again: what changed meanwhile changed for both."""
    before, operations_per_s = limits.bytes_per_s(), limits.operations_per_s()
    times = steps.times()
    return _Round(*times, max(before, limits.bytes_per_s()), operations_per_s)


def _figures(steps: Steps, work: Work, rounds: Sequence[_Round]) -> Figures:
    limits = [(work.num_bytes / each.bytes_per_s, work.num_operations / each.operations_per_s) for each in rounds]
    ratios = [each.step_s / max(limit) for each, limit in zip(rounds, limits, strict=True)]
    limit_s = statistics.median(max(limit) for limit in limits)
    by_bytes, by_operations = (statistics.median(each) for each in zip(*limits, strict=True))
    return Figures(
        case=steps.case.name,
        step_s=statistics.median(each.step_s for each in rounds),
        alone_s=statistics.median(each.alone_s for each in rounds),
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
    is_ahead = any(each.alone_s != each.step_s for each in figures)
    for heading in ("milliseconds", "step", *(["alone"] if is_ahead else []), "limit", "by", "ratio", "best ratio"):
        table.add_column(heading, justify="left" if heading in ("milliseconds", "by") else "right", no_wrap=True)
    for each in figures:
        times = (each.step_s, each.alone_s, each.limit_s) if is_ahead else (each.step_s, each.limit_s)
        numbers = (*(f"{1000 * seconds:.2f}" for seconds in times), each.limit_is)
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


def parse_chunks(text: str) -> list[tuple[int, int]]:
    """The (tokens, context) pairs of --chunks. ValueError: they are none."""
    try:
        pairs = [(int(chunk), int(context)) for chunk, context in (part.split(":") for part in text.split(",") if part)]
    except ValueError:
        pairs = [(0, 0)]
    if any(chunk < 1 or context < 0 for chunk, context in pairs):
        raise ValueError(f"--chunks {text}: must be TOKENS:CONTEXT pairs with commas between")
    return pairs


if __name__ == "__main__":
    sys.exit(main())
