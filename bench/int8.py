"""`python -m bench.int8`: what weights in 8 bits (--weight-dtype int8) lose, on a fixed token text.

Every token of the text is predicted from those before it by the same model three times, and each way is held against fp32:

    bf16              what a node computes by default: how much rounding alone does
    int8              the same with the linears' weights, the head's too, in 8 bits

    perplexity        exp of the mean -log probability of the text's next token
    top-1             share of positions whose likeliest token is fp32's
    KL                mean over positions of KL(fp32 || this), in nats

The text is --text through the model's tokenizer, or what the model itself says at temperature 1 from seed 0, computed in fp32: a
random model is surprised by any other. --exams asks the demo model besides what it never saw, and counts answers without one wrong
token. Not here: speed (bench.engine --weight-dtype).
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from rich.console import Console
from rich.table import Table

from bench.frame import check_files, check_kernels, write_result, writing
from bench.machine import machine, utc_date
from bench.page import write_page
from bench.progress import StepProgress
from runtime.config import knob, load, set_thread_environment
from runtime.process import fatal

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor

    from engine.model import Model

PROG: Final = "python -m bench.int8"
_BLOCK_SIZE: Final = 16
_EXAM_SEED: Final = 3  # not bench.accuracy's


@dataclass(frozen=True, slots=True)
class Int8Config:
    """One run."""

    model: Path = knob(help="model directory in Hugging Face layout", metavar="DIR")
    kernels: Literal["cpu", "numba", "torch"] = knob("cpu", "what computes; as of a node")
    threads: int = knob(2, "compute threads", low=1, high=1024)
    text: Path | None = knob(None, "UTF-8 text; none: what the model says", metavar="FILE")
    sequences: int = knob(16, "stretches of the text, each predicted from its own beginning", low=1, high=4096)
    length: int = knob(256, "tokens of each", low=2, high=1 << 20)
    exams: int = knob(0, "held-out questions of each kind that each way answers; the demo model's", low=0, high=100_000)
    output: Path | None = knob(None, "JSON file for all figures; a page goes beside it", metavar="FILE")

    def __post_init__(self) -> None:
        check_files(self.output)
        check_kernels()


@dataclass(slots=True)
class Loss:
    """Sums over positions, then means; the fields are keys of the JSON result."""

    way: str
    perplexity: float = 0.0
    top1_share: float = 0.0
    kl_nats: float = 0.0


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; 0, or 2 for what the user can mend."""
    config = load(Int8Config, PROG, "Measure what weights in 8 bits lose.", argv)
    set_thread_environment(config.threads)  # before torch loads
    console = Console(highlight=False, markup=False, soft_wrap=True)
    try:
        losses, exams = measure(config, console)
    except (ValueError, OSError) as error:
        fatal(f"{PROG}: {error}")
    table = Table(box=None, pad_edge=False)
    for heading in ("against fp32", "perplexity", "top-1", "KL, nats"):
        table.add_column(heading, no_wrap=True)
    for each in losses:
        table.add_row(each.way, f"{each.perplexity:.4f}", f"{100 * each.top1_share:.2f} %", f"{each.kl_nats:.2e}")
    console.print(table)
    for name, right in exams.items():
        told = ", ".join(f"{way} {100 * share:.1f} %" for way, share in right.items())
        console.print(f"{name}, right of {config.exams}: {told}")
    if config.output is not None:
        command = f"{PROG} {shlex.join(sys.argv[1:] if argv is None else argv)}"
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(config).items()}
        result: dict[str, Any] = {"command": command, "date": utc_date(), "machine": machine(), "settings": settings}
        content = {**result, "losses": [asdict(each) for each in losses], "exams": exams}
        write_result(PROG, config.output, content)
        with writing(PROG, "--output", config.output):
            page = write_page(config.output)
        console.print(f"written: {config.output}, {page}")
    return 0


def measure(config: Int8Config, console: Console) -> tuple[list[Loss], dict[str, dict[str, float]]]:
    """Of fp32, bf16, and bf16 with int8 weights; and of each exam the share that each answers right. ValueError in one sentence."""
    import torch

    from engine.demo.vocabulary import VOCAB_SIZE
    from engine.model import load_model

    torch.set_num_threads(config.threads)
    exact = load_model(config.model, "fp32", config.kernels)
    if config.exams and exact.config.vocab_size != VOCAB_SIZE:
        sizes = f"{exact.config.vocab_size} tokens, the demo model {VOCAB_SIZE}"
        raise ValueError(f"--exams: {config.model} has {sizes}: it was never taught these")
    rounded = load_model(config.model, "bf16", config.kernels)
    int8 = load_model(config.model, "bf16", config.kernels, weight_dtype="int8")
    ways = {"fp32": exact, "bf16": rounded, "int8": int8}
    losses = [Loss(way) for way in ways]
    with StepProgress(console, "sequences", config.sequences) as progress:
        texts = _texts(config, exact)
        for token_ids in texts:
            truth = torch.log_softmax(_logits(exact, token_ids), -1)
            for loss, model in zip(losses, ways.values(), strict=True):
                _add(loss, truth, torch.log_softmax(_logits(model, token_ids), -1), token_ids)
            progress.advance("")
    for loss in losses:
        loss.perplexity = float(torch.exp(torch.tensor(loss.perplexity / len(texts))))
        loss.top1_share /= len(texts)
        loss.kl_nats /= len(texts)
    return losses, _exams(config, ways, console)


def _exams(config: Int8Config, ways: Mapping[str, Model], console: Console) -> dict[str, dict[str, float]]:
    """Greedy decoding says the answer exactly where the likeliest token is the answer's at each of its positions."""
    from engine.demo.examine import EXAMS, draw_exam
    from engine.demo.vocabulary import NOT_LEARNED, conversation_ids

    if not config.exams:
        return {}
    tokenizer = _tokenizer(config.model)
    shares = {name: dict.fromkeys(ways, 0.0) for name in EXAMS}
    with StepProgress(console, "questions", len(EXAMS) * config.exams) as progress:
        for name, right in shares.items():
            for turn in draw_exam(name, config.exams, _EXAM_SEED):
                token_ids, targets = conversation_ids(tokenizer, [turn])
                asked = [at for at, target in enumerate(targets) if target != NOT_LEARNED]
                for way, model in ways.items():
                    said = _logits(model, token_ids)[asked].argmax(-1).tolist()
                    right[way] += (said == [targets[at] for at in asked]) / config.exams
                progress.advance(name)
    return shares


def _add(loss: Loss, truth: Tensor, found: Tensor, token_ids: list[int]) -> None:
    """One sequence's means. truth, found: [len(token_ids), vocab_size] log probabilities; the last row has no next token."""
    import torch

    next_ids = torch.tensor(token_ids[1:])[:, None]
    loss.perplexity -= found[:-1].gather(1, next_ids).mean().item()
    loss.top1_share += (found.argmax(-1) == truth.argmax(-1)).float().mean().item()
    loss.kl_nats += (truth.exp() * (truth - found)).sum(-1).mean().item()


def _logits(model: Model, token_ids: list[int]) -> Tensor:
    """Of every position, fp32 (fp64 where sums of them are small): [len(token_ids), vocab_size]."""
    from engine.batch import Segment, build_batch
    from engine.kv_memory import KvMemory

    kv = KvMemory(model.config, _BLOCK_SIZE, -(-len(token_ids) // _BLOCK_SIZE), model.dtype)
    segment = Segment(token_ids, 0, range(kv.num_blocks), len(token_ids))
    return model.forward(build_batch([segment], _BLOCK_SIZE), kv.tensor).double()


def _texts(config: Int8Config, model: Model) -> list[list[int]]:
    if config.text is None:
        return _said_by(model, config.sequences, config.length)
    token_ids = _tokenizer(config.model).encode(config.text.read_text(encoding="utf-8"), add_special_tokens=False).ids
    texts = [token_ids[begin : begin + config.length] for begin in range(0, len(token_ids), config.length)]
    texts = [text for text in texts if len(text) == config.length][: config.sequences]
    if not texts:
        raise ValueError(f"--text {config.text}: {len(token_ids)} tokens are fewer than --length {config.length}")
    return texts


def _tokenizer(model_dir: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


def _said_by(model: Model, num_sequences: int, length: int) -> list[list[int]]:
    """Sequences that begin with a token each and go on at temperature 1."""
    from engine.batch import Segment, build_batch
    from engine.draw import Draw
    from engine.kv_memory import KvMemory
    from engine.plan import SamplingParams
    from engine.sampler import sample

    blocks = -(-length // _BLOCK_SIZE)
    kv = KvMemory(model.config, _BLOCK_SIZE, num_sequences * blocks, model.dtype)
    texts = [[index % 256] for index in range(num_sequences)]
    for position in range(length - 1):
        segments = [
            Segment(text[-1:], position, range(index * blocks, (index + 1) * blocks), 1)
            for index, text in enumerate(texts)
        ]
        logits = model.forward(build_batch(segments, _BLOCK_SIZE), kv.tensor)
        draws = [Draw(SamplingParams(1.0, seed), position) for seed in range(num_sequences)]
        for text, token_id in zip(texts, sample(logits, draws, model.kernels), strict=True):
            text.append(token_id)
    return texts


if __name__ == "__main__":
    sys.exit(main())
