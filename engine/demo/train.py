"""Train the demo model and write its directory: text, tokenizer and weights from one seed, in under an hour on two cores.

    python -m engine.demo.train --out deploy/demo_model

Rows grow from short to long: most of what there is to learn is in short ones, which are cheaper; long ones come last, for recall.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

import torch
from safetensors.torch import load, save
from tokenizers import Tokenizer
from torch import Tensor

from engine.byte_tokenizer import write_json, write_tokenizer_files
from engine.demo.examine import EXAMS, draw_exam, share_right
from engine.demo.network import NORM_EPSILON, Network
from engine.demo.stories import story
from engine.demo.talk import conversation
from engine.demo.vocabulary import (
    BEGIN,
    END,
    MESSAGE_END,
    NOT_LEARNED,
    VOCAB_SIZE,
    conversation_ids,
    learn_tokenizer,
    text_ids,
)
from engine.model_sizes import ModelSize, config_json
from engine.weight_files import SINGLE_FILE

SIZE: Final = ModelSize(
    hidden_size=256,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    intermediate_size=512,
    max_position_embeddings=2048,
    ties_embeddings=True,
    architecture="Qwen2ForCausalLM",
    vocab_size=VOCAB_SIZE,
    rope_theta=1e10,
    stored_dtype="bf16",
)


@dataclass(frozen=True, slots=True)
class Phase:
    """Steps over rows of one length."""

    row_tokens: int
    num_rows: int  # of a step
    share: float  # of all steps
    codes_share: float  # of its conversations, those in which half is recall


PHASES: Final = (Phase(256, 12, 0.42, 0.5), Phase(512, 6, 0.28, 0.8), Phase(1152, 3, 0.3, 0.9))
_MOST_ROWS: Final = 64  # of a step: its rows' seeds are its own
_CIRCUIT, _CIRCUIT_RATE = ("model.layers.0.self_attn", "model.layers.1.self_attn"), 0.2  # times the others'
_PEAK_RATE, _WARMUP, _DECAY, _LARGEST_GRADIENT = 2e-3, 0.02, 0.1, 1.0
_CHARACTERS_A_TOKEN: Final = 6  # more than there are: a row is cut, never filled up
_STORY_ROWS: Final = 1 / 24
_STATE: Final = ("step", "exp_avg", "exp_avg_sq")  # of AdamW, for each weight
_TEMPERATURE: Final = 0.3  # for clients that do not say: stories differ, answers do not
_NUM_TOKENIZER_CONVERSATIONS, _NUM_EXAM_TURNS = 2000, 200
_REPORT_STEPS, _EXAM_STEPS, _CHECKPOINT_STEPS = 20, 200, 100


def draw_row(tokenizer: Tokenizer, seed: int, num_tokens: int, codes_share: float = 0.5) -> tuple[list[int], list[int]]:
    """Tokens and targets of one row."""
    rng = Random(seed)
    if rng.random() < _STORY_ROWS:
        ids, targets = text_ids(tokenizer, (story(rng) for _ in range(1 + num_tokens // 64)))
    else:
        ids, targets = conversation_ids(tokenizer, conversation(rng, num_tokens * _CHARACTERS_A_TOKEN, codes_share))
    missing = num_tokens - len(ids)
    return ids[:num_tokens] + [0] * missing, targets[:num_tokens] + [NOT_LEARNED] * missing


def phase_of(done: float) -> Phase:
    """Which phase it is when this share of the steps is done."""
    for phase in PHASES:
        if done < phase.share:
            return phase
        done -= phase.share
    return PHASES[-1]


def rate_of(done: float) -> float:
    """The learning rate: up for a moment, then down by a cosine to nothing."""
    return _PEAK_RATE * min(done / _WARMUP, (1 + math.cos(math.pi * done)) / 2)


@dataclass(frozen=True, slots=True)
class Plan:
    """One training."""

    num_steps: int
    seed: int  # of text and weights
    checkpoint: Path | None = None  # to go on from, and to write


class Trainer:
    """A network in bf16, where the CPU computes with it, and its weights in fp32, which AdamW moves."""

    def __init__(self, network: Network, num_steps: int) -> None:
        self._network = network
        self._num_steps = num_steps
        self._exact = [weight.detach().float() for weight in network.parameters()]
        groups: dict[tuple[float, float], list[Tensor]] = {}
        for (name, _), weight in zip(network.named_parameters(), self._exact, strict=True):
            share = _CIRCUIT_RATE if name.startswith(_CIRCUIT) else 1.0
            groups.setdefault((share, _DECAY if weight.dim() == 2 and share == 1 else 0.0), []).append(weight)
        self._optimizer = torch.optim.AdamW(
            [{"params": each, "weight_decay": decay, "share": share} for (share, decay), each in groups.items()],
            lr=_PEAK_RATE,
            betas=(0.9, 0.98),
            fused=True,
        )

    def save(self, num_steps: int, path: Path) -> None:
        """All that the next step needs, after so many; an interrupted write leaves the older file."""
        tensors: dict[str, Tensor] = {}
        for index, weight in enumerate(self._exact):
            state = self._optimizer.state[weight]
            tensors |= {f"{index}.{name}": state[name] for name in _STATE} | {f"{index}.weight": weight}
        part = path.with_suffix(".part")
        part.write_bytes(save(tensors | {"num_steps": torch.tensor(num_steps)}))
        part.replace(path)

    def load(self, path: Path) -> int:
        """Go on from a saved state; returns how many steps were done."""
        tensors = load(path.read_bytes())
        with torch.no_grad():
            for index, (exact, weight) in enumerate(zip(self._exact, self._network.parameters(), strict=True)):
                exact.copy_(tensors[f"{index}.weight"])
                weight.copy_(exact)
                self._optimizer.state[exact] = {name: tensors[f"{index}.{name}"] for name in _STATE}
        return int(tensors["num_steps"])

    def step(self, index: int, ids: Tensor, targets: Tensor) -> float:
        """Learn from one batch; returns its loss."""
        for group in self._optimizer.param_groups:
            group["lr"] = group["share"] * rate_of((index + 1) / self._num_steps)
        self._network.zero_grad()
        loss: Tensor = self._network(ids, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        for exact, weight in zip(self._exact, self._network.parameters(), strict=True):
            exact.grad = weight.grad.float() if weight.grad is not None else None
        torch.nn.utils.clip_grad_norm_(self._exact, _LARGEST_GRADIENT)
        self._optimizer.step()
        with torch.no_grad():
            for exact, weight in zip(self._exact, self._network.parameters(), strict=True):
                weight.copy_(exact)
        return loss.item()


def train(tokenizer: Tokenizer, plan: Plan, report: Callable[[str], None]) -> Network:
    """A network that has seen all batches of the plan; a line now and then."""
    torch.manual_seed(plan.seed)
    network = Network(SIZE)
    trainer = Trainer(network, plan.num_steps)
    first = trainer.load(plan.checkpoint) if plan.checkpoint is not None and plan.checkpoint.exists() else 0
    began_at, num_tokens, losses = time.monotonic(), 0, deque[float](maxlen=_REPORT_STEPS)
    for index in range(first, plan.num_steps):
        phase = phase_of(index / plan.num_steps)
        row = (plan.seed << 32) + index * _MOST_ROWS
        rows = [draw_row(tokenizer, row + each, phase.row_tokens, phase.codes_share) for each in range(phase.num_rows)]
        num_tokens += phase.num_rows * phase.row_tokens
        ids, targets = (torch.tensor(each) for each in zip(*rows, strict=True))
        losses.append(trainer.step(index, ids, targets))
        done = index + 1
        if done % _REPORT_STEPS == 0 or done == plan.num_steps:
            passed = time.monotonic() - began_at
            left = passed / (done - first) * (plan.num_steps - done)
            loss = sum(losses) / len(losses)
            rate = num_tokens / passed
            report(
                f"{done} of {plan.num_steps} steps, loss {loss:.4f}, {rate:.0f} tokens/s, {passed:.0f} s, {left / 60:.0f} min left"
            )
        if done % _EXAM_STEPS == 0 and done < plan.num_steps:
            report(examine(network, tokenizer, _NUM_EXAM_TURNS // 4, plan.seed))
        if plan.checkpoint is not None and done % _CHECKPOINT_STEPS == 0:
            trainer.save(done, plan.checkpoint)
    return network


def examine(network: Network, tokenizer: Tokenizer, count: int, seed: int) -> str:
    """Right answers of every exam, in a line."""
    shares = {name: share_right(network, tokenizer, draw_exam(name, count, seed)) for name in EXAMS}
    return "right: " + "; ".join(f"{name} {share:.1%}" for name, share in shares.items())


def write_directory(network: Network, tokenizer: Tokenizer, out: Path) -> None:
    """An ordinary model directory."""
    out.mkdir(parents=True, exist_ok=True)
    end_ids = [END, MESSAGE_END]
    own = {"bos_token_id": BEGIN, "eos_token_id": end_ids, "rms_norm_eps": NORM_EPSILON}
    write_json(out / "config.json", config_json(network.size, "bf16") | own)
    sampling = {"do_sample": True, "temperature": _TEMPERATURE}
    write_json(out / "generation_config.json", {"bos_token_id": BEGIN, "eos_token_id": end_ids} | sampling)
    write_tokenizer_files(tokenizer, network.size.max_position_embeddings, out)
    weights = {name: weight.detach().bfloat16().contiguous() for name, weight in network.state_dict().items()}
    (out / SINGLE_FILE).write_bytes(save(weights, metadata={"format": "pt"}))


def main(argv: list[str]) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser("python -m engine.demo.train", description="Train the demo model.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--steps", type=int, default=3800, help="batches of about 3,000 tokens (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of text and weights (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="that torch computes with (default: %(default)s)")
    parser.add_argument("--checkpoint", type=Path, help="file to go on from, and to write now and then")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    tokenizer = learn_tokenizer(
        text
        for index in range(_NUM_TOKENIZER_CONVERSATIONS)
        for turn in conversation(Random(f"tokenizer {arguments.seed} {index}"), 2000)
        for text in (turn.asked, turn.answer)
    )
    network = train(tokenizer, Plan(arguments.steps, arguments.seed, arguments.checkpoint), _say)
    _say(examine(network, tokenizer, _NUM_EXAM_TURNS, arguments.seed + 1))
    write_directory(network, tokenizer, arguments.out)
    return 0


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
