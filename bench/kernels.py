"""`python -m bench.kernels`: a back end's attention and products against torch's own, and against what the device allows.

    limit = max(bytes / R, operations / F)      R: a copy of 1 GiB, read and written      F: a product of two large square matrices

Both sides of a case run in turns, and its figure is the median of `--rounds` ratios. `--tune on` looks for better tile shapes on a
GPU and writes kernels/triton_table.json anew; that takes minutes, and changes bits, and with them the name of the back end.
"""

from __future__ import annotations

import json
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from rich.console import Console
from rich.table import Table

from bench.frame import check_files, write_result
from bench.machine import machine, utc_date
from runtime.config import knob, load, set_thread_environment
from runtime.process import fatal

if TYPE_CHECKING:
    import torch

    from bench.kernel_cases import Case, Pair
    from bench.limits import DeviceLimits, Timer
    from kernels.triton_tuning import AttentionTuning, LinearTuning

PROG: Final = "python -m bench.kernels"
_WIDTH: Final = 140


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
    ours_by_torch: float  # median of the rounds' ratios
    ours_by_limit: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0, or 2 for what the user can mend."""
    config = load(KernelsConfig, PROG, "Measure kernels against torch's and against the device.", argv)
    set_thread_environment(config.threads)  # before torch loads
    import torch

    if config.device == "cuda" and not torch.cuda.is_available():
        fatal(
            f"{PROG}: the Triton kernels need a GPU, and torch sees no CUDA device here; --device cpu measures the CPU's"
        )
    if config.tune == "on" and config.device != "cuda":
        fatal(f"{PROG}: --tune: only the Triton kernels have a table")
    torch.set_num_threads(config.threads)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _WIDTH
    if config.tune == "on":
        _tune(console)
        return 0
    try:
        name, figures = _measure(config)
    except ValueError as error:
        fatal(f"{PROG}: {error}")
    _show(console, name, figures)
    if config.output is not None:
        command = f"{PROG} {shlex.join(sys.argv[1:] if argv is None else argv)}"
        place = torch.cuda.get_device_name() if config.device == "cuda" else machine()["cpu_model"]
        facts = {"command": command, "date": utc_date(), "machine": machine(), "device": place, "kernels": name}
        write_result(PROG, config.output, {**facts, "cases": [asdict(each) for each in figures]})
        console.print(f"written: {config.output}")
    return 0


def cases_of(device: str) -> list[Case]:
    """What is measured; a CPU gets what it can do in a minute."""
    from bench.kernel_cases import AttentionCase, LinearCase

    if device == "cpu":
        small = [AttentionCase(batch, length, 1, 9, 3, 64) for batch in (1, 8) for length in (512, 2048)]
        return [*small, AttentionCase(1, 512, 512, 9, 3, 64), LinearCase(1, 576, 1536), LinearCase(512, 576, 1536)]
    decodes = [AttentionCase(batch, length) for batch in (1, 8, 64) for length in (1024, 8192)]
    chunks = [AttentionCase(1, length, 512) for length in (512, 8192)]
    return [*decodes, *chunks, *(LinearCase(rows) for rows in (1, 16, 64, 512, 2048))]


def timer_of(device: str) -> Timer:
    """Seconds of one call: by CUDA's events, behind a flushed L2 cache, or by the clock."""
    if device == "cpu":
        from bench.limits import seconds_of

        return seconds_of
    from triton.testing import do_bench

    return lambda call: float(do_bench(call, warmup=1, rep=5, return_mode="median")) / 1000


def _measure(config: KernelsConfig) -> tuple[str, list[Figures]]:
    import torch

    from bench.kernel_cases import pair_of
    from bench.limits import DeviceLimits
    from engine.kv_memory import TORCH_DTYPES
    from kernels.choice import choose_kernels

    device, dtype = torch.device(config.device), TORCH_DTYPES[config.dtype]
    kernels = choose_kernels("cpu", config.device).kernels
    seconds = timer_of(config.device)
    limits = DeviceLimits(device, dtype, seconds)
    with torch.inference_mode():
        found = [
            figures_of(case.name, pair_of(case, kernels, dtype, device), limits, seconds, config.rounds)
            for case in cases_of(config.device)
        ]
    return kernels.name, found


def figures_of(name: str, pair: Pair, limits: DeviceLimits, seconds: Timer, num_rounds: int) -> Figures:
    """Both sides in turns, the limits beside them. Raises ValueError where they do not give the same."""
    worst, scale = _difference(pair)
    if not worst <= 0.05 * scale:
        raise ValueError(f"{name}: the results differ by {worst}, and the largest is {scale}")
    limit_s = max(pair.num_bytes / limits.bytes_per_s(), pair.num_operations / limits.operations_per_s())
    rounds = [(seconds(pair.ours), seconds(pair.torchs)) for _ in range(num_rounds)]
    ours_s, torch_s = (statistics.median(each) for each in zip(*rounds, strict=True))
    ratio = statistics.median(ours / torchs for ours, torchs in rounds)
    return Figures(name, ours_s, torch_s, limit_s, ratio, ours_s / limit_s)


def _difference(pair: Pair) -> tuple[float, float]:
    ours, torchs = pair.ours().float(), pair.torchs().float()
    return (ours - torchs).abs().max().item(), torchs.abs().max().item()


def _show(console: Console, name: str, figures: Sequence[Figures]) -> None:
    table = Table(title=None, box=None, pad_edge=False)
    for heading in ("microseconds", name, "torch", "limit", "by torch", "by limit"):
        table.add_column(heading, justify="left" if heading == "microseconds" else "right", no_wrap=True)
    for each in figures:
        times = (f"{1e6 * each_s:.1f}" for each_s in (each.ours_s, each.torch_s, each.limit_s))
        table.add_row(each.case, *times, f"{each.ours_by_torch:.2f}", f"{each.ours_by_limit:.2f}")
    console.print(table)


def _tune(console: Console) -> None:
    """Try every candidate on this GPU and write the table."""
    import torch

    from bench.kernel_tuning import HEAD_DIMS, attention_candidates, fastest, linear_candidates, with_measured
    from engine.kv_memory import TORCH_DTYPES
    from kernels.triton_tuning import TABLE

    major, minor = torch.cuda.get_device_capability()
    attention: dict[tuple[str, int], AttentionTuning] = {}
    linear: dict[str, LinearTuning] = {}
    for name, dtype in TORCH_DTYPES.items():
        for head_dim in HEAD_DIMS:
            candidates = attention_candidates(head_dim, dtype.itemsize)
            attention[name, head_dim] = fastest(candidates, _attention_times(dtype, head_dim))
            console.print(f"{name}, head_dim {head_dim}: {attention[name, head_dim]}")
        linear[name] = fastest(linear_candidates(dtype.itemsize), _linear_times(dtype))
        console.print(f"{name}: {linear[name]}")
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    changed = with_measured(table, str(10 * major + minor), attention, linear)
    TABLE.write_text(json.dumps(changed, indent=1) + "\n", encoding="utf-8")
    console.print(f"written: {TABLE}")


def _attention_times(dtype: torch.dtype, head_dim: int) -> Callable[[AttentionTuning], list[float]]:
    from bench.kernel_cases import AttentionCase

    shape = {"num_heads": 2048 // head_dim * 2, "num_kv_heads": 2048 // head_dim // 2, "head_dim": head_dim}
    cases = [AttentionCase(8, 4096, **shape), AttentionCase(64, 1024, **shape), AttentionCase(1, 4096, 512, **shape)]
    return lambda tuning: _times(cases, dtype, attention=tuning)


def _linear_times(dtype: torch.dtype) -> Callable[[LinearTuning], list[float]]:
    from bench.kernel_cases import LinearCase

    cases = [LinearCase(rows) for rows in (1, 32, 512)]
    return lambda tuning: _times(cases, dtype, linear=tuning)


def _times(
    cases: Sequence[Case],
    dtype: torch.dtype,
    attention: AttentionTuning | None = None,
    linear: LinearTuning | None = None,
) -> list[float]:
    """Seconds of each case with these shapes; none where the device has no room for them."""
    import torch
    from triton.errors import TritonError

    from bench.kernel_cases import pair_of
    from kernels.triton_kernels import TritonKernels
    from kernels.triton_tuning import OneShape, read_table

    table = OneShape(read_table(), attention, linear)
    kernels = TritonKernels(table, torch.cuda.get_device_capability())
    seconds = timer_of("cuda")
    try:
        with torch.inference_mode():
            return [seconds(pair_of(case, kernels, dtype, torch.device("cuda")).ours) for case in cases]
    except TritonError:
        return []


if __name__ == "__main__":
    sys.exit(main())
