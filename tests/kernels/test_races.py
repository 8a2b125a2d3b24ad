"""Tokens drawn from rows that top_p, penalties, bias or bans are about, by who wins among all: those that looking at each gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import engine.race
from engine.draw import Draw
from engine.plan import SamplingParams
from engine.sampler import sample
from engine.token_counts import TokenCounts
from engine.truncation import Kept, Row, kept
from kernels.cpu_kernels import CpuKernels
from tests.kernels.back_ends import COMPILED

PLAIN = SamplingParams(temperature=1.0, seed=0)
VOCAB_SIZE = 20_000
NUM_DRAWS = 60


def random_logits(seed: int, scale: float = 1.5) -> Tensor:
    return torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SamplingParams]]:
    """What was truncated by looking at all of a row."""
    calls: list[SamplingParams] = []

    def counting(below: Row, sampling: SamplingParams) -> Kept:
        calls.append(sampling)
        return kept(below, sampling)

    monkeypatch.setattr(engine.race, "kept", counting)
    yield calls


@pytest.mark.covers("A02", "M04")
@pytest.mark.parametrize("kernels", COMPILED, ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("scale", [0.015, 1.5, 12.0])
@pytest.mark.parametrize("top_p", [0.2, 0.95, 0.9999])
@pytest.mark.parametrize("is_coarse", [False, True], ids=["fine", "coarse"])
def test_with_top_p_who_wins_is_who_wins_among_what_it_leaves(
    kernels: CpuKernels, scale: float, top_p: float, is_coarse: bool, fresh_seed: int
) -> None:
    logits = random_logits(fresh_seed % 2**31, scale)
    if is_coarse:  # many are equal, and the last that are kept are some of those
        logits = (logits / scale).round() * scale
    seeds = [(fresh_seed + number) % 2**64 for number in range(20)]
    draws = [Draw(replace(PLAIN, top_p=top_p, min_p=0.0 if seed % 2 else 0.01, seed=seed), 0) for seed in seeds]
    rows = logits.expand(len(draws), -1)
    assert sample(rows, draws, kernels) == sample(rows, draws)


@pytest.mark.covers("A02", "M04")
@pytest.mark.parametrize("kernels", COMPILED, ids=lambda kernels: kernels.name)
@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 0.4},
        {"repetition_penalty": 3.0},
        {"presence_penalty": -2.0},
        {"frequency_penalty": -2.0, "temperature": 0.5},
        {"logit_bias": ((7, 9.0), (11, -100.0), (500, 8.0))},
        {"min_tokens": 50, "stop_token_ids": frozenset(range(100, 4000))},
    ],
    ids=str,
)
def test_what_was_changed_is_drawn_beside_what_was_not_and_beside_rows_of_all_kinds(
    kernels: CpuKernels, changes: dict[str, Any], fresh_seed: int
) -> None:
    """The said tokens are nobody's favourites as they are, so that a back end would not tell of them."""
    truncations: list[dict[str, Any]] = [{}, {"top_p": 0.8}, {"top_k": 40}, {"min_p": 0.2}, {"temperature": 1e-31}]
    logits = random_logits(fresh_seed % 2**31)
    said = logits[0].argsort(descending=True)[30:330].tolist()
    draws = [
        Draw(
            replace(
                PLAIN, **{"seed": (fresh_seed + number) % 2**64, **changes, **truncations[number % len(truncations)]}
            ),
            20,
            TokenCounts([], said) if any("penalty" in name for name in changes) else None,
        )
        for number in range(NUM_DRAWS)
    ]
    rows = logits.expand(NUM_DRAWS, -1)
    assert sample(rows, draws, kernels) == sample(rows, draws)


@pytest.mark.covers("A02", "M04")
@pytest.mark.parametrize("kernels", COMPILED, ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("is_changed", [False, True], ids=["as they are", "changed"])
def test_who_wins_among_all_and_is_left_by_top_p_is_drawn_without_sorting(
    kernels: CpuKernels, is_changed: bool, counted: list[SamplingParams], fresh_seed: int
) -> None:
    logits = random_logits(fresh_seed % 2**31)
    sampling = replace(PLAIN, top_p=0.9)
    if is_changed:
        sampling = replace(sampling, repetition_penalty=1.3, logit_bias=((7, 6.0), (11, -100.0)))
    counts = TokenCounts([1, 2, 3], range(20)) if is_changed else None
    draws = [Draw(replace(sampling, seed=(fresh_seed + number) % 2**64), 20, counts) for number in range(NUM_DRAWS)]
    quick = sample(logits.expand(NUM_DRAWS, -1), draws, kernels)
    num_sorted = len(counted)
    assert quick == sample(logits.expand(NUM_DRAWS, -1), draws)
    assert len(counted) - num_sorted == NUM_DRAWS, "without a back end all of a row is looked at"
    if is_changed:
        assert num_sorted < NUM_DRAWS / 2, "a tenth are expected: those whose winner top_p leaves out"
    else:
        assert num_sorted <= 2, "of those the likelier run once more"
