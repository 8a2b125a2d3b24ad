"""The oracle: transformers on the same unmodified directory."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.batch import Segment, build_batch
from engine.kv_memory import KvMemory
from engine.model import Model, load_model
from engine.plan import DecodeRow, Decodes, Plan, PrefillChunk, SamplingParams, SlotStart
from engine.runner import TorchRunner
from tests.engine_torch.conftest import SHAPES, VOCAB_SIZE, ModelDirs
from tests.kernels_choice import KERNELS

# Of the row's largest logit; M01's bounds.
BOUNDS = {"fp32": 1e-4, "bf16": 2e-2}
BLOCK_SIZE = 16
NUM_TOKENS = 150  # three attention tiles, the last one partly filled
MAX_PROMPTS = 10  # once in a long while a completion of random weights says the same few tokens over and over


@cache
def oracle(model_dir: Path) -> Any:
    """Load by transformers, in the directory's own dtype. Imported here: it takes seconds."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir, dtype="auto")


def random_prompt(num_tokens: int) -> list[int]:
    seed = torch.seed()
    print(f"prompt seed {seed}")  # noqa: T201 - pytest shows it with a failure
    return torch.randint(0, VOCAB_SIZE, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def cuts(how: str) -> list[int]:
    """Where one prompt of NUM_TOKENS is cut into steps."""
    return {
        "prefill": [0, NUM_TOKENS],
        "chunked prefill": [0, 50, 64, 65, 130, NUM_TOKENS],
        "decode": [0, 60, *range(61, NUM_TOKENS + 1)],
    }[how]


@pytest.mark.covers("M01", "M02")
@pytest.mark.parametrize("how", ["prefill", "chunked prefill", "decode"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_transformers(model_dirs: ModelDirs, shape: str, dtype: str, how: str) -> None:
    model_dir = model_dirs(shape, dtype)
    prompt = random_prompt(NUM_TOKENS)
    model = load_model(model_dir, "auto", KERNELS)
    kv = KvMemory(model.config, BLOCK_SIZE, 10, model.dtype)
    blocks = [7, 2, 9, 0, 4, 1, 3, 8, 6, 5]
    rows: list[Tensor] = []
    borders = cuts(how)
    for start, end in pairwise(borders):
        segment = Segment(prompt[start:end], start, blocks, end - start)
        rows.append(model.forward(build_batch([segment], BLOCK_SIZE), kv.tensor))
    ours = torch.cat(rows).float()
    with torch.no_grad():
        theirs = oracle(model_dir)(torch.tensor([prompt])).logits[0].float()
    distance = (ours - theirs).abs().amax(-1) / theirs.abs().amax(-1)
    assert float(distance.max()) <= BOUNDS[dtype]


def greedy_completion(model: Model, prompt: list[int], num_tokens: int) -> list[int]:
    """By a runner, of a prompt of 75 tokens in two chunks; its blocks lie in no order."""
    runner = TorchRunner(model, KvMemory(model.config, BLOCK_SIZE, 12, "fp32"), num_slots=3, max_model_len=192)
    start = SlotStart(1, 1, SamplingParams(0.0, 0), 0, 0)
    plans = [
        Plan(0, (start,), chunks=(PrefillChunk(1, 1, 0, tuple(prompt[:40]), (3, 4, 5), False),)),
        Plan(1, chunks=(PrefillChunk(1, 1, 40, tuple(prompt[40:]), (0, 11), True),)),
    ]
    for step in range(num_tokens - 1):
        position = len(prompt) + step
        new_blocks = (6 + position // BLOCK_SIZE - 5,) if position % BLOCK_SIZE == 0 else ()
        plans.append(Plan(2 + step, decodes=Decodes.of(DecodeRow(1, 1, position, new_blocks))))
    return [runner.run(plan)[0].token_id for plan in plans][1:]


@pytest.mark.covers("M01")
def test_greedy_completions_of_64_tokens_are_those_of_transformers(model_dirs: ModelDirs) -> None:
    model_dir = model_dirs()
    model = load_model(model_dir, "fp32", KERNELS)
    most_different = 0
    for _ in range(MAX_PROMPTS):
        prompt = random_prompt(75)
        completion = greedy_completion(model, prompt, 64)
        theirs = oracle(model_dir).generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=64,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert completion == theirs[0, len(prompt) :].tolist()
        most_different = max(most_different, len(set(completion)))
        if most_different > 10:
            break
    assert most_different > 10, "a few tokens again and again prove little"
