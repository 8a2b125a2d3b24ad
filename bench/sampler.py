"""`python -m bench.sampler`: what a token's draw costs by what a request asks for, beside a plain draw and beside transformers.

Rows of logits as a language model has them: a token's rank decides its probability by Zipf's law with a head that is steeper
(`--spread`: what noise is added to logits), in an order of chance. Each round draws a batch in every way, one way after the
other; a ratio is the median over rounds. transformers: its processors and warpers, softmax and torch.multinomial, on the same
rows at once. Not here: the draws that a step makes for itself in C++ (bench.engine), grammars (bench.grammar_step).
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from rich.console import Console
from rich.table import Table

from bench.frame import Bench, check_files, check_kernels
from bench.progress import StepProgress
from runtime.config import knob, load, set_thread_environment

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from engine.plan import SamplingParams

PROG: Final = "python -m bench.sampler"
NUM_SAID: Final = 600  # tokens of prompt and completion, where they count
_STEEPNESS: Final = 1.3  # of Zipf's law


@dataclass(frozen=True, slots=True)
class SamplerBenchConfig:
    """One run."""

    vocab: int = knob(49_152, "tokens of the vocabulary", low=1000, high=1_000_000)
    rows: int = knob(8, "rows of a batch", low=1, high=1024)
    spread: float = knob(1.0, "standard deviation of what is added to each logit", low=0.0, high=100.0)
    kernels: Literal["cpu", "numba", "torch"] = knob("cpu", "what tells who can win; as of a node")
    threads: int = knob(1, "compute threads", low=1, high=1024)
    rounds: int = knob(30, "rounds of all ways", low=2, high=100_000)
    seed: int = knob(0, "of logits and draws", low=0)
    output: Path | None = knob(None, "JSON file for all figures", metavar="FILE")

    def __post_init__(self) -> None:
        check_kernels()
        check_files(self.output)


@dataclass(frozen=True, slots=True)
class Figures:
    """What one way gave; seconds of a row, medians over rounds."""

    asked: str
    row_s: float
    ratio_to_plain: float  # of medians over rounds, as the next
    peer_row_s: float
    ratio_to_peer: float


def ways() -> dict[str, SamplingParams]:
    """What requests ask for."""
    from engine.plan import SamplingParams

    plain = SamplingParams(temperature=0.8, seed=0)
    return {
        "greedy": replace(plain, temperature=0.0),
        "plain": plain,
        "top_p 0.95": replace(plain, top_p=0.95),
        "top_p 0.8": replace(plain, top_p=0.8),
        "top_k 50": replace(plain, top_k=50),
        "top_k 20, top_p 0.95": replace(plain, top_k=20, top_p=0.95),
        "min_p 0.05": replace(plain, min_p=0.05),
        "repetition_penalty 1.1": replace(plain, repetition_penalty=1.1),
        "repetition_penalty 1.1, top_p 0.95": replace(plain, repetition_penalty=1.1, top_p=0.95),
        "temperature 2, top_p 0.95": replace(plain, temperature=2.0, top_p=0.95),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0, or 2 for what the user can mend, 130 after Ctrl-C."""
    config = load(SamplerBenchConfig, PROG, "Measure what drawing a token costs, by what is asked for.", argv)
    set_thread_environment(config.threads)
    return Bench(PROG, _measure, _show, _to_json).run(config, argv)


def _to_json(figures: Sequence[Figures]) -> dict[str, Any]:
    return {"ways": [asdict(each) for each in figures]}


def _measure(config: SamplerBenchConfig, console: Console) -> list[Figures]:
    import numpy as np
    import torch

    from engine.draw import Draw
    from engine.sampler import sample
    from engine.token_counts import TokenCounts
    from kernels.choice import choose_kernels

    torch.set_num_threads(config.threads)
    kernels = choose_kernels(config.kernels).kernels
    rng = np.random.default_rng(config.seed)
    logits = torch.from_numpy(_logits(config, rng))
    said = rng.integers(0, config.vocab, NUM_SAID).tolist()
    counts = TokenCounts(said[: NUM_SAID // 2], said[NUM_SAID // 2 :])
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways()}
    with StepProgress(console, "rounds", config.rounds) as progress:
        for number in range(config.rounds):
            for name, sampling in ways().items():
                draws = [
                    Draw(replace(sampling, seed=row), number, counts if sampling.has_penalties else None)
                    for row in range(config.rows)
                ]
                own = _seconds(lambda draws=draws: sample(logits, draws, kernels))  # type: ignore[misc]
                peer = _seconds(lambda sampling=sampling: _peer(logits, sampling, said))  # type: ignore[misc]
                seconds[name].append((own / config.rows, peer / config.rows))
            progress.advance(f"{config.rows} rows of {config.vocab}")
    return [
        Figures(
            asked=name,
            row_s=statistics.median(own for own, _ in rounds),
            ratio_to_plain=statistics.median(
                own / plain for (own, _), (plain, _) in zip(rounds, seconds["plain"], strict=True)
            ),
            peer_row_s=statistics.median(peer for _, peer in rounds),
            ratio_to_peer=statistics.median(own / peer for own, peer in rounds),
        )
        for name, rounds in seconds.items()
    ]


def _logits(config: SamplerBenchConfig, rng: np.random.Generator) -> np.ndarray:
    """[rows, vocab] float32."""
    import numpy as np

    ranks = np.argsort(rng.random((config.rows, config.vocab)), axis=1)
    noise = rng.normal(0, config.spread, ranks.shape)
    return (-_STEEPNESS * np.log(ranks + 1) + noise).astype(np.float32)


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _peer(logits: Tensor, sampling: SamplingParams, said: list[int]) -> Tensor:
    """As `generate` of transformers draws."""
    import torch

    transformers: Any = import_module("transformers")  # a peer, and no part of ours
    token_ids = torch.tensor([said] * len(logits))
    scores = logits
    if sampling.repetition_penalty != 1:
        scores = transformers.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(token_ids, scores)
    if sampling.temperature == 0:
        greatest: Tensor = scores.argmax(-1)
        return greatest
    scores = transformers.TemperatureLogitsWarper(sampling.temperature)(token_ids, scores)
    if sampling.top_k:
        scores = transformers.TopKLogitsWarper(sampling.top_k)(token_ids, scores)
    if sampling.top_p < 1:
        scores = transformers.TopPLogitsWarper(sampling.top_p)(token_ids, scores)
    if sampling.min_p > 0:
        scores = transformers.MinPLogitsWarper(sampling.min_p)(token_ids, scores)
    return torch.multinomial(torch.softmax(scores, -1), 1)


def _show(console: Console, figures: Sequence[Figures]) -> None:
    table = Table(title=None, box=None, pad_edge=False)
    for heading in ("asked for", "µs a row", "of plain", "transformers, µs", "of transformers"):
        table.add_column(heading, justify="left" if heading == "asked for" else "right")
    for each in figures:
        table.add_row(
            each.asked,
            f"{each.row_s * 1e6:.0f}",
            f"{each.ratio_to_plain:.2f}",
            f"{each.peer_row_s * 1e6:.0f}",
            f"{each.ratio_to_peer:.2f}",
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
