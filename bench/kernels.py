"""`python -m bench.kernels`: a back end's attention, products and copies against torch's own, and against what the device allows.

    limit = max(bytes / R, operations / F)      R: a sum over 1 GiB, read      F: a product of two large square matrices

Kernels mostly read, so R is a rate of reading; what writes as much as it reads (the gather) cannot come near it. On a GPU both
sides are timed as graphs (graph_clock.py), on a CPU call by call; in turns, and the ratio is the median of `--rounds` ratios.
`--tune on` looks for better tile shapes on a GPU and writes kernels/triton_table.json anew (kernel_tuner.py); that takes a
minute, and changes bits, and with them the name of the back end.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from rich.console import Console
from rich.table import Table

from bench.frame import check_files, facts, write_result
from bench.machine import machine
from bench.progress import StepProgress
from runtime.config import knob, load, set_thread_environment
from runtime.process import fatal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bench.graph_clock import Call
    from bench.kernel_cases import Case, Pair
    from bench.limits import Limits

PROG: Final = "python -m bench.kernels"
_WIDTH: Final = 140
NO_DEVICE: Final = "the Triton kernels need a GPU, and torch sees no CUDA device here; --device cpu measures the CPU's"


@dataclass(frozen=True, slots=True)
class KernelsConfig:
    """One run."""

    device: Literal["cuda", "cpu"] = knob(
        "cuda", "where; cuda: the Triton kernels; cpu: those that make setup compiled"
    )
    dtype: Literal["bf16", "fp16", "fp32"] = knob("bf16", "of all numbers")
    threads: int = knob(1, "compute threads of a CPU", low=1, high=1024)
    rounds: int = knob(20, "how often each case is measured", low=1, high=10_000)
    tune: Literal["on", "off"] = knob("off", "look for tile shapes and write kernels/triton_table.json")
    output: Path | None = knob(None, "JSON file for all figures", metavar="FILE")

    def __post_init__(self) -> None:
        check_files(self.output)


@dataclass(frozen=True, slots=True)
class Figures:
    """What one case gave; seconds of a call, medians over rounds."""

    case: str
    ours_s: float
    torch_s: float
    limit_s: float
    limit_is: str  # "bytes" or "operations"
    ours_by_torch: float  # median of the rounds' ratios
    ours_by_limit: float
    copies: int  # of weights or KV, read in turns
    torch_way: str  # of attention: which of its kernels torch chose


@dataclass(frozen=True, slots=True)
class Measured:
    """A run: its figures, what could not be measured and why, and what was measured with."""

    figures: list[Figures]
    broken: list[str]
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """A device, and how it is measured."""

    device: torch.device
    l2_bytes: int  # 0: one copy of all inputs, and calls timed one by one
    limits: Limits
    seconds_of: Callable[[Sequence[Call]], Callable[[], float]]  # a call's, whenever it is asked


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0, 1 where a case could not be measured, or 2 for what the user can mend."""
    config = load(KernelsConfig, PROG, "Measure kernels against torch's and against the device.", argv)
    set_thread_environment(config.threads)  # before torch loads
    import torch

    if config.tune == "on" and config.device != "cuda":
        fatal(f"{PROG}: --tune: only the Triton kernels have a table")
    torch.set_num_threads(config.threads)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _WIDTH
    try:
        if config.tune == "on":
            from bench.kernel_tuner import tune

            tuned = tune(console)  # asks for the device itself, for this process must not yet
            if tuned is None:
                raise ValueError(NO_DEVICE)
            _write(console, config, argv, tuned)
            return 0
        if config.device == "cuda" and not torch.cuda.is_available():
            raise ValueError(NO_DEVICE)
        measured = _measure(config, console)
    except ValueError as error:
        fatal(f"{PROG}: {error}")
    _show(console, measured)
    cases = [asdict(each) for each in measured.figures]
    _write(console, config, argv, {**measured.facts, "cases": cases, "broken": measured.broken})
    return 1 if measured.broken else 0


def _write(console: Console, config: KernelsConfig, argv: Sequence[str] | None, found: dict[str, Any]) -> None:
    if config.output is not None:
        write_result(PROG, config.output, facts(PROG, config, argv) | found)
        console.print(f"written: {config.output}")


def cases_of(device: str) -> list[Case]:
    """What is measured; a CPU gets what it can do in a minute."""
    from bench.kernel_cases import AttentionCase, GatherCase, LinearCase

    if device == "cpu":
        small = [AttentionCase(batch, length, 1, 9, 3, 64) for batch in (1, 8) for length in (512, 2048)]
        return [*small, AttentionCase(1, 512, 512, 9, 3, 64), LinearCase(1, 576, 1536), LinearCase(512, 576, 1536)]
    return [
        *(AttentionCase(batch, length) for batch in (1, 8, 64) for length in (1024, 8192)),
        *(AttentionCase(1, length, rows) for length, rows in ((512, 512), (8192, 512), (2048, 2048))),
        *(AttentionCase(batch, 2048, rows, head_dim=64) for batch, rows in ((8, 1), (64, 1), (1, 512), (1, 2048))),
        *(LinearCase(rows) for rows in (1, 16, 64, 512, 2048)),
        *(LinearCase(rows, 4096, 14336, is_gated=True) for rows in (1, 16, 64, 512, 2048)),
        *(LinearCase(rows, 14336, 4096) for rows in (1, 64, 512)),
        *(LinearCase(rows, 14336, 2048) for rows in (1, 64, 512)),  # narrow and deep: few programs, and no split sums
        *(LinearCase(rows, 4096, 128256) for rows in (1, 64)),  # a vocabulary's head
        GatherCase(256, 2 << 20),
    ]


def _measure(config: KernelsConfig, console: Console) -> Measured:
    import torch

    from bench.kernel_cases import pair_of
    from engine.kv_memory import TORCH_DTYPES
    from kernels.choice import choose_kernels

    dtype = TORCH_DTYPES[config.dtype]
    place = _cuda(dtype) if config.device == "cuda" else _cpu(dtype)
    kernels = choose_kernels("cpu", config.device)
    if kernels.shortfall:
        console.print(f"warning: {kernels.shortfall}")
    figures, broken, rates = [], [], []
    cases = cases_of(config.device)
    with torch.inference_mode(), StepProgress(console, "cases", len(cases)) as progress:
        for case in cases:
            num_copies = copies_of(case, dtype.itemsize, place.l2_bytes)
            try:
                pair = pair_of(case, kernels.kernels, dtype, place.device, num_copies)
                check(pair)
                rates.append((place.limits.bytes_per_s(), place.limits.operations_per_s()))
                figures.append(figures_of(case, pair, rates[-1], dtype.itemsize, place, config.rounds))
            except (ValueError, RuntimeError) as error:  # RuntimeError: what torch and Triton raise
                broken.append(f"{case.name}: {first_line(error)}")
            progress.advance(case.name)
    bytes_per_s, operations_per_s = (statistics.median(each) for each in zip(*rates, strict=True)) if rates else (0, 0)
    found = {"kernels": kernels.kernels.name, "bytes_per_s": bytes_per_s, "operations_per_s": operations_per_s}
    return Measured(figures, broken, found | _versions(config.device))


def first_line(error: Exception) -> str:
    """What an error says first; a compiler says pages."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _versions(device: str) -> dict[str, Any]:
    import torch

    if device == "cpu":
        return {"device": machine()["cpu_model"], "torch": torch.__version__, "triton": None}
    import triton

    return {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}


def _cpu(dtype: torch.dtype) -> Place:
    import torch

    from bench.limits import DeviceLimits, seconds_of

    device = torch.device("cpu")
    return Place(device, 0, DeviceLimits(device, dtype, seconds_of), lambda calls: lambda: seconds_of(calls[0]))


def _cuda(dtype: torch.dtype) -> Place:
    import torch

    from bench.device_clock import DeviceClock
    from bench.graph_clock import CapturedCalls
    from bench.limits import DeviceLimits
    from kernels.triton_graphs import CudaCapture

    device = torch.device("cuda")
    limits = DeviceLimits(device, dtype, DeviceClock(device).median_of)
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return Place(device, l2_bytes, limits, lambda calls: CapturedCalls(calls, CudaCapture()).seconds)


def copies_of(case: Case, itemsize: int, l2_bytes: int) -> int:
    """How many weights or pools are read in turns."""
    from bench.graph_clock import copies_for

    return copies_for(case.copied_bytes(itemsize), l2_bytes)


def check(pair: Pair) -> None:
    """Raise ValueError where both sides do not give the same."""
    for ours, torchs in zip(pair.ours, pair.torchs, strict=True):
        worst, scale = _difference(ours(), torchs())
        if not worst <= 0.05 * scale:
            raise ValueError(f"the results differ by {worst}, and the largest is {scale}")


def _difference(ours: Tensor, torchs: Tensor) -> tuple[float, float]:
    ours, torchs = ours.float(), torchs.float()
    return (ours - torchs).abs().max().item(), torchs.abs().max().item()


def figures_of(
    case: Case, pair: Pair, rates: tuple[float, float], itemsize: int, place: Place, num_rounds: int
) -> Figures:
    """Both sides in turns; `rates`: R and F, measured beside them."""
    times = {"bytes": case.num_bytes(itemsize) / rates[0], "operations": case.num_operations / rates[1]}
    limit_is = max(times, key=times.__getitem__)
    sides = [place.seconds_of(calls) for calls in (pair.ours, pair.torchs)]
    rounds = [[seconds() for seconds in sides] for _ in range(num_rounds)]
    ours_s, torch_s = (statistics.median(each) for each in zip(*rounds, strict=True))
    return Figures(
        case.name,
        ours_s,
        torch_s,
        times[limit_is],
        limit_is,
        statistics.median(ours / torchs for ours, torchs in rounds),
        ours_s / times[limit_is],
        len(pair.ours),
        pair.torch_way,
    )


def _show(console: Console, measured: Measured) -> None:
    table = Table(title=None, box=None, pad_edge=False)
    name = measured.facts["kernels"]
    for heading in ("microseconds", name, "torch", "limit", "by torch", "by limit", "limit is", "torch's way"):
        is_text = heading in ("microseconds", "limit is", "torch's way")
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=True)
    for each in measured.figures:
        times = (f"{1e6 * each_s:.1f}" for each_s in (each.ours_s, each.torch_s, each.limit_s))
        ratios = (f"{each.ours_by_torch:.2f}", f"{each.ours_by_limit:.2f}")
        table.add_row(each.case, *times, *ratios, each.limit_is, each.torch_way)
    console.print(table)
    rates = (measured.facts["bytes_per_s"] / 1e9, measured.facts["operations_per_s"] / 1e12)
    console.print(f"R {rates[0]:.0f} GB/s, F {rates[1]:.1f} T operations/s")
    for said in measured.broken:
        console.print(f"broken: {said}")


if __name__ == "__main__":
    sys.exit(main())
