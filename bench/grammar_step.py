"""`python -m bench.grammar_step`: what a step costs more when its rows are bound by grammars.

    free       any text
    one        all rows are bound by one JSON schema: one process follows them all
    each       each row is bound by a schema of its own: as many processes as rows

Scheduler, runner, its thread and the processes of grammars are a node's own; sessions are left out. The ways take turns, and a
ratio is the median over rounds. What the processes compute beside the step, on other cores, is told too, for each bound row.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, cast

from rich.console import Console
from rich.table import Table

from bench.frame import Bench, check_files, check_model, whole_numbers
from bench.overlap import Load, plain, step_s
from bench.progress import StepProgress
from runtime.config import knob, load, set_thread_environment
from runtime.process import computed_s, run_async

if TYPE_CHECKING:
    from engine.model import Model
    from engine.plan import Grammar, SamplingParams
    from node.grammar_processes import GrammarProcesses

PROG: Final = "python -m bench.grammar_step"
WAYS: Final = ("free", "one", "each")
_DEPTH: Final = 2  # as a node's


@dataclass(frozen=True, slots=True)
class GrammarStepConfig:
    """One run."""

    model: Path = knob(help="model directory in Hugging Face layout, with a tokenizer.json", metavar="DIR")
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = knob(
        "auto", "of weights and KV; auto: what the model's files hold"
    )
    kernels: Literal["cpu", "numba", "torch", "triton"] = knob("cpu", "what computes; as of a node")
    threads: int = knob(1, "compute threads; loop and grammars need a core of their own beside", low=1, high=1024)
    batches: str = knob("1,8,32", "sequences that decode together", metavar="N,…")
    prompt_tokens: int = knob(32, "tokens of each prompt", low=1, high=100_000)
    steps: int = knob(100, "decode steps of a round", low=2, high=1000)
    rounds: int = knob(7, "rounds of each way", low=1, high=10_000)
    output: Path | None = knob(None, "JSON file for all figures", metavar="FILE")

    def __post_init__(self) -> None:
        self.batch_sizes()
        check_model(self.model)
        check_files(self.output)

    def batch_sizes(self) -> list[int]:
        """The numbers of --batches. ValueError: they are none."""
        return whole_numbers("--batches", self.batches, 64)


@dataclass(frozen=True, slots=True)
class Figures:
    """One batch size and way; medians over rounds."""

    batch: int
    way: str
    step_s: float
    ratio: float  # to "free" in the same round
    beside_s: float  # of processors, that the processes of grammars took for each row of a step


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0, or 2 for what the user can mend, 130 after Ctrl-C."""
    config = load(GrammarStepConfig, PROG, "Measure what grammars cost the steps of a node.", argv)
    set_thread_environment(config.threads)  # before torch loads
    return Bench(PROG, _measure, show, lambda figures: {"cases": [asdict(each) for each in figures]}).run(config, argv)


def _measure(config: GrammarStepConfig, console: Console) -> list[Figures]:
    import torch

    from engine.grammars import GrammarError
    from engine.model import load_model
    from node.grammar_processes import GrammarProcesses

    torch.set_num_threads(config.threads)
    model = load_model(config.model, config.dtype, config.kernels)
    console.print(f"{config.model}, {model.dtype}, kernels {model.kernels.name}, {config.threads} threads")
    grammars = GrammarProcesses(config.model, model.config.vocab_size)
    ways = {batch: [way for way in WAYS if batch > 1 or way != "each"] for batch in config.batch_sizes()}
    figures: list[Figures] = []
    try:
        grammars.open()
        with StepProgress(console, "rounds", config.rounds * sum(map(len, ways.values()))) as progress:
            for batch, of_it in ways.items():
                rounds = []
                for number in range(config.rounds):
                    at = number % len(of_it)
                    rounds.append({way: _round(model, grammars, config, batch, way) for way in of_it[at:] + of_it[:at]})
                    for way in of_it:
                        progress.advance(f"{batch} rows, {way}")
                figures += [figures_of(batch, way, rounds) for way in of_it]
    except GrammarError as error:
        raise ValueError(f"--model {config.model}: {error}") from None
    finally:
        grammars.close()
    return figures


def _round(
    model: Model, grammars: GrammarProcesses, config: GrammarStepConfig, batch: int, way: str
) -> tuple[float, float]:
    """Seconds of a step, and of other processes' processors for each of its rows."""

    def bound(number: int) -> SamplingParams:
        return replace(plain(number), grammar=_grammar(config, model, 0 if way == "one" else 1 + number))

    if way != "free":
        for number in range(batch):  # compiled in front of a node's core
            grammars.check(cast("Grammar", bound(number).grammar))
    before_s = _beside_s(grammars)
    sequences = Load(batch, config.prompt_tokens, config.steps)
    seconds = run_async(step_s(model, sequences, _DEPTH, plain if way == "free" else bound, grammars))
    return seconds, (_beside_s(grammars) - before_s) / (config.steps * batch)


def _grammar(config: GrammarStepConfig, model: Model, number: int) -> Grammar:
    """A list of objects that nobody comes to the end of."""
    from engine.plan import Grammar

    kinds = {"name": {"type": "string"}, f"age_{number}": {"type": "integer"}, "kind": {"enum": ["red", "green"]}}
    item = {"type": "object", "properties": kinds, "required": [*kinds]}
    schema = {"type": "array", "items": item, "minItems": config.steps // 4 + 1}
    return Grammar("json_schema", json.dumps(schema), is_compact=True, end_token_ids=(model.config.vocab_size - 1,))


def _beside_s(grammars: GrammarProcesses) -> float:
    """By all processes of grammars that there are."""
    children = Path(f"/proc/{grammars.pid}/task/{grammars.pid}/children").read_text(encoding="ascii")
    return sum(computed_s(int(pid)) for pid in children.split())


def figures_of(batch: int, way: str, rounds: Sequence[Mapping[str, tuple[float, float]]]) -> Figures:
    """Reduce the rounds of one way, each the seconds of a step and of what is beside it; ratios are taken within a round."""
    median = statistics.median
    ratio = median(each[way][0] / each["free"][0] for each in rounds)
    return Figures(batch, way, median(each[way][0] for each in rounds), ratio, median(each[way][1] for each in rounds))


def show(console: Console, figures: Sequence[Figures]) -> None:
    """One table."""
    table = Table(title=None, box=None, pad_edge=False)
    for heading in ("rows", "bound by", "ms of a step", "ratio", "µs beside, a row"):
        table.add_column(heading, justify="left" if heading == "bound by" else "right", no_wrap=True)
    for each in figures:
        cells = (f"{1000 * each.step_s:.2f}", f"{each.ratio:.2f}", f"{1e6 * each.beside_s:.0f}")
        table.add_row(str(each.batch), each.way, *cells)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
