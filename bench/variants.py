"""`python -m bench.variants`: steps of one engine by each compiled variant of the kernels that this CPU can run, by turns.

A node takes the first of them (kernels/cpu_build.py). Whether that is the fastest hangs on the CPU: instructions that one maker's
cores do in a cycle take another's two, and prefetchers are unlike each other. Not here: how far a step is from what the machine
allows (bench.engine).
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from rich.console import Console
from rich.table import Table

from bench.engine import parse_chunks
from bench.frame import Bench, check_files, check_kernels, whole_numbers
from bench.progress import StepProgress
from engine.model_sizes import SIZES
from kernels.cpu_build import library_path, usable_variants
from runtime.config import knob, load, set_thread_environment

if TYPE_CHECKING:
    from engine.model import Model

PROG: Final = "python -m bench.variants"
NOTED: Final = 0.95  # of the time that the taken one needs: who needs less is named
_BLOCK_SIZE: Final = 16


@dataclass(frozen=True, slots=True)
class VariantsConfig:
    """One run."""

    shape: str = knob("smollm2-135m", "random weights of a shape that baton model make knows", metavar="NAME")
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = knob("auto", "of weights and KV; auto: as the shape is stored")
    weight_dtype: Literal["auto", "int8"] = knob("auto", "of the linears' weights; as of a node")
    threads: int = knob(1, "compute threads", low=1, high=1024)
    batches: str = knob("1,8,32", "decode rows of a step", metavar="N,…")
    contexts: str = knob("128,2048", "positions that each decode row sees", metavar="N,…")
    chunks: str = knob("64:0,512:0,512:1536", "prefill chunks, TOKENS:CONTEXT each; empty: none", metavar="N:N,…")
    rounds: int = knob(7, "of each case, in which each variant computes one step", low=1, high=10_000)
    output: Path | None = knob(None, "JSON file for all figures", metavar="FILE")

    def __post_init__(self) -> None:
        if self.shape not in SIZES:
            raise ValueError(f"--shape {self.shape}: must be one of {', '.join(SIZES)}")
        whole_numbers("--batches", self.batches)
        whole_numbers("--contexts", self.contexts)
        parse_chunks(self.chunks)
        check_files(self.output)
        check_kernels()


@dataclass(frozen=True, slots=True)
class Figures:
    """One case, by variant in the order in which nodes take them; medians over rounds."""

    case: str
    step_s: dict[str, float]
    ratio: dict[str, float]  # to the first variant's in the same round

    @property
    def faster(self) -> dict[str, float]:
        """The ratios of those that need less than NOTED of the first one's time."""
        return {name: ratio for name, ratio in self.ratio.items() if ratio < NOTED}


@dataclass(frozen=True, slots=True)
class Comparison:
    """All of it."""

    dtype: str
    cases: list[Figures]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0, 2 for what the user can mend, 130 after Ctrl-C."""
    config = load(VariantsConfig, PROG, "Compare the compiled variants of the kernels on this CPU.", argv)
    set_thread_environment(config.threads)  # before torch loads
    return Bench(PROG, _measure, show, asdict).run(config, argv)


def _measure(config: VariantsConfig, console: Console) -> Comparison:
    import torch

    from bench.engine_steps import Case, Steps, random_memory
    from bench.limits import seconds_of

    torch.set_num_threads(config.threads)
    models = _models(config, console)
    first = next(iter(models.values()))
    console.print(f"{config.shape}, {first.dtype}, {config.threads} threads; a node here takes {next(iter(models))}")
    contexts, batches = whole_numbers("--contexts", config.contexts), whole_numbers("--batches", config.batches)
    cases = [Case(batch, context) for context in contexts for batch in batches]
    cases += [Case(0, context, chunk) for chunk, context in parse_chunks(config.chunks)]
    memory = random_memory(first, _BLOCK_SIZE, cases)
    figures = []
    with StepProgress(console, "rounds", config.rounds * len(cases)) as progress:
        for case in cases:
            steps = {name: Steps(case, model, memory, temperature=1.0) for name, model in models.items()}
            rounds = []
            for number in range(config.rounds):
                at = number % len(steps)
                turns = [*steps][at:] + [*steps][:at]
                rounds.append({name: seconds_of(steps[name].run) for name in turns})
                progress.advance(case.name)
            figures.append(figures_of(case.name, [*steps], rounds))
    return Comparison(first.dtype, figures)


def _models(config: VariantsConfig, console: Console) -> dict[str, Model]:
    """By variant, in the order in which nodes take them. ValueError: none was compiled."""
    import torch

    from bench.engine_shapes import shaped_model
    from kernels.choice import Choice
    from kernels.cpu_build import bits_name
    from kernels.cpu_kernels import CpuKernels
    from kernels.cpu_library import Library

    models = {}
    for variant in usable_variants():
        path = library_path(variant)
        if not path.exists():
            console.print(f"{variant.name}: not compiled; python -m kernels.cpu_build does it")
            continue
        try:
            library = Library(path)
        except OSError as error:  # as where a process may not use tiles
            console.print(f"{variant.name}: {error}")
            continue
        kernels = CpuKernels(library, bits_name(variant), is_int8=config.weight_dtype == "int8")
        choice = Choice(kernels, "")
        models[variant.name] = shaped_model(SIZES[config.shape], config.dtype, choice, torch.device("cpu"))
    if not models:
        raise ValueError("nothing is compiled for this CPU; python -m kernels.cpu_build does it")
    return models


def figures_of(case: str, names: Sequence[str], rounds: Sequence[Mapping[str, float]]) -> Figures:
    """Reduce the seconds of a case's rounds, each by variant."""
    first = names[0]
    return Figures(
        case,
        {name: statistics.median(each[name] for each in rounds) for name in names},
        {name: statistics.median(each[name] / each[first] for each in rounds) for name in names},
    )


def show(console: Console, comparison: Comparison) -> None:
    """The table, and in a sentence whether another variant than the taken one is faster anywhere."""
    figures = comparison.cases
    names = [*figures[0].step_s]
    table = Table(title=None, box=None, pad_edge=False)
    table.add_column("milliseconds of a step", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for other in names[1:]:
        table.add_column(f"{other} ÷ {names[0]}", justify="right", no_wrap=True)
    for each in figures:
        times = [f"{1000 * each.step_s[name]:.2f}" for name in names]
        table.add_row(each.case, *times, *(f"{each.ratio[other]:.2f}" for other in names[1:]))
    console.print(table)
    faster = [f"{name} at {each.case} ({ratio:.2f})" for each in figures for name, ratio in each.faster.items()]
    rest = f": {', '.join(faster)}" if faster else ": none"
    console.print(f"faster than {names[0]}, by more than {1 - NOTED:.0%}{rest}")


if __name__ == "__main__":
    sys.exit(main())
