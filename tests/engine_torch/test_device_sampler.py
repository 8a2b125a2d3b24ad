"""Draws where the logits are equal those of the host's sampler, and what cannot be drawn there is known."""

from __future__ import annotations

from random import Random

import pytest
import torch

from engine.device_sampler import sample_on_device
from engine.plan import BROKEN_ROW, SamplingParams
from engine.sampler import Draw, is_decided_by_logits, sample

VOCAB_SIZE = 4099


@pytest.mark.covers("Q09")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_device_draws_what_the_host_draws(dtype: torch.dtype, fresh_seed: int) -> None:
    rng = Random(fresh_seed)
    generator = torch.Generator().manual_seed(fresh_seed)
    for _ in range(40):
        num_rows = rng.randint(1, 9)
        logits = (3 * torch.randn(num_rows, VOCAB_SIZE, generator=generator)).to(dtype)
        draws = [
            Draw(SamplingParams(rng.choice([0.0, 1e-30, 0.3, 1.0, 5.0]), rng.getrandbits(64)), rng.randint(0, 5000))
            for _ in range(num_rows)
        ]
        assert all(map(is_decided_by_logits, draws))
        assert sample_on_device(logits, draws).tolist() == sample(logits, draws)


def test_of_equal_logits_the_lowest_id_is_the_greedy_one_and_a_row_without_numbers_is_broken() -> None:
    logits = torch.zeros(4, 7)
    logits[0, [5, 3]] = 1.0
    logits[1] = float("nan")
    logits[2, 6] = float("inf")
    draws = [Draw(SamplingParams(temperature, 1), 0) for temperature in (0.0, 0.0, 1.0, 0.0)]
    assert sample_on_device(logits, draws).tolist() == [3, BROKEN_ROW, BROKEN_ROW, 0]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1e-40, 1),  # fp32 has no quotients by it
        SamplingParams(1.0, 1, top_k=4),
        SamplingParams(1.0, 1, top_p=0.5),
        SamplingParams(1.0, 1, min_p=0.1),
        SamplingParams(0.0, 1, logit_bias=((3, 1.0),)),
        SamplingParams(0.0, 1, stop_token_ids=frozenset({3}), min_tokens=2),
    ],
)
def test_what_needs_more_than_a_temperature_is_left_to_the_host(params: SamplingParams) -> None:
    assert not is_decided_by_logits(Draw(params, 0))
