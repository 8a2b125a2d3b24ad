"""Bias, bans, penalties and truncation: the distribution that they define, exactly, whatever else is in the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.draw import Draw
from engine.gumbel import gumbel_noise
from engine.plan import SamplingParams
from engine.sampler import sample
from engine.token_counts import TokenCounts
from kernels.choice import choose_kernels
from kernels.interface import Kernels
from tests.engine_torch.test_sampler import chi_square, chi_square_bound
from tests.kernels_choice import KERNELS
from tests.thorough import examples

VOCAB_SIZE = 60
NUM_SEEDS = 12  # draws of one distribution: one alone seldom tells it from another
PLAIN = SamplingParams(temperature=1.0, seed=0)
EVERYTHING = SamplingParams(
    temperature=0.8,
    seed=0,
    top_k=20,
    top_p=0.9,
    min_p=0.02,
    presence_penalty=0.7,
    frequency_penalty=-0.4,
    repetition_penalty=1.3,
    min_tokens=9,
    stop_token_ids=frozenset({3, 11}),
    logit_bias=((5, 2.5), (6, -100.0), (11, 50.0)),
)
ids = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30)
samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    seed=st.integers(0, 2**64 - 1),
    top_k=st.sampled_from([0, 1, 5, 30, VOCAB_SIZE, 10**6]),
    top_p=st.sampled_from([1.0, 1e-9, 0.3, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    presence_penalty=st.sampled_from([0.0, -2.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 2.0]),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.7]),
    min_tokens=st.integers(0, 4),
    stop_token_ids=st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=5),
    logit_bias=st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.floats(-100, 100, width=32), max_size=5).map(
        lambda biases: tuple(biases.items())
    ),
)
back_ends = st.sampled_from([None, choose_kernels(KERNELS).kernels])  # None: nobody tells the sampler who can win


def random_logits(seed: int, num_rows: int = 1, vocab_size: int = VOCAB_SIZE) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 1.5


def draw_of(sampling: SamplingParams, index: int, prompt: Sequence[int], generated: Sequence[int]) -> Draw:
    return Draw(sampling, index, TokenCounts(prompt, generated) if sampling.has_penalties else None)


def naive_scores(
    logits: Sequence[float], sampling: SamplingParams, index: int, prompt: Sequence[int], generated: Sequence[int]
) -> list[float]:
    """Token by token what the parameters say, up to the temperature."""
    biases = dict(sampling.logit_bias)
    scores = [logit + biases.get(token_id, 0.0) for token_id, logit in enumerate(logits)]
    for token_id, score in enumerate(scores):
        if index < sampling.min_tokens and token_id in sampling.stop_token_ids:
            score = -math.inf
        if token_id in prompt or token_id in generated:
            score = score / sampling.repetition_penalty if score > 0 else score * sampling.repetition_penalty
        if token_id in generated:
            score -= sampling.frequency_penalty * list(generated).count(token_id) + sampling.presence_penalty
        scores[token_id] = score / (sampling.temperature or 1.0)
    return scores


def naive_distribution(scores: Sequence[float], sampling: SamplingParams) -> dict[int, float]:
    """The exact probabilities behind truncation; of equal scores the lowest ids come first."""
    order = sorted(range(len(scores)), key=lambda token_id: (-scores[token_id], token_id))
    order = order[: sampling.top_k or None]
    weights = [math.exp(scores[token_id] - scores[order[0]]) for token_id in order]
    kept = 1
    while kept < len(order) and math.fsum(weights[:kept]) < sampling.top_p * math.fsum(weights):
        kept += 1
    left = {t: w for t, w in zip(order[:kept], weights[:kept], strict=True) if w >= sampling.min_p * weights[0]}
    return {token_id: weight / math.fsum(left.values()) for token_id, weight in left.items()}


@pytest.mark.covers("A02")
@pytest.mark.parametrize(
    "sampling",
    [
        replace(PLAIN, top_k=7),
        replace(PLAIN, top_p=0.7),
        replace(PLAIN, min_p=0.05),
        replace(PLAIN, presence_penalty=1.5),
        replace(PLAIN, frequency_penalty=0.8),
        replace(PLAIN, repetition_penalty=1.6),
        replace(PLAIN, min_tokens=9, stop_token_ids=frozenset({0, 1, 2, 3})),
        replace(PLAIN, logit_bias=((0, 4.0), (1, -3.0))),
        EVERYTHING,
    ],
    ids=["top_k", "top_p", "min_p", "presence", "frequency", "repetition", "min_tokens", "logit_bias", "everything"],
)
def test_draws_have_exactly_the_distribution_that_the_parameter_defines(
    sampling: SamplingParams, fresh_seed: int
) -> None:
    prompt, generated = [0, 1, 2, 30], [0, 0, 0, 4, 5, 31]
    logits, num_draws = random_logits(3)[0], examples(10_000, 3)
    logits[:6] += 2  # the tokens that the parameters are about
    logits -= logits[:6].mean()  # the repetition penalty tells apart which side of 0 a logit is on
    index = len(generated)
    draws = [
        draw_of(replace(sampling, seed=(fresh_seed + number) % 2**64), index, prompt, generated)
        for number in range(num_draws)
    ]
    observed = np.bincount(sample(logits.expand(num_draws, -1), draws), minlength=VOCAB_SIZE).astype(np.float64)
    scores = naive_scores(logits.tolist(), sampling, index, prompt, generated)
    distribution = naive_distribution(scores, sampling)
    assert not observed[[t for t in range(VOCAB_SIZE) if t not in distribution]].any(), "what was cut off was drawn"
    assert is_likely(observed, distribution)
    assert not is_likely(observed, naive_distribution(logits.tolist(), PLAIN)), "nobody would notice the parameter"


def is_likely(observed: np.ndarray, distribution: dict[int, float]) -> bool:
    """Whether a right sampler of this distribution gives such counts but once in ten million runs."""
    expected = np.array([observed.sum() * distribution.get(token_id, 0.0) for token_id in range(VOCAB_SIZE)])
    common = expected >= 5  # the approximation's usual condition; the rest is one class
    classes = [np.append(x[common], max(x[~common].sum(), 1e-9)) for x in (observed, expected)]
    return chi_square(*classes) < chi_square_bound(int(common.sum()))


@pytest.mark.covers("A02")
@settings(max_examples=examples(150, 3))
@given(
    sampling=samplings,
    row=st.integers(0, 2**30),
    prompt=ids,
    generated=ids,
    levels=st.sampled_from([0.5, 2.0, None]),
    kernels=back_ends,
)
def test_a_draw_is_the_greatest_noisy_score_that_a_naive_sampler_leaves(
    sampling: SamplingParams,
    row: int,
    prompt: list[int],
    generated: list[int],
    levels: float | None,
    kernels: Kernels | None,
) -> None:
    logits = random_logits(row)
    if levels is not None:  # coarse logits, as bf16's: many are equal
        logits = (logits * levels).round() / levels
    index = len(generated)
    seeds = [(sampling.seed + number) % 2**64 for number in range(NUM_SEEDS)]
    draws = [draw_of(replace(sampling, seed=seed), index, prompt, generated) for seed in seeds]
    drawn = sample(logits.expand(NUM_SEEDS, -1), draws, kernels)
    scores = naive_scores(logits[0].double().tolist(), sampling, index, prompt, generated)
    if sampling.temperature == 0:
        assert drawn == [max(range(VOCAB_SIZE), key=lambda token_id: (scores[token_id], -token_id))] * NUM_SEEDS
        return
    kept = naive_distribution(scores, sampling)
    for seed, token_id in zip(seeds, drawn, strict=True):
        noisy = np.array(scores) + gumbel_noise(seed, index, np.arange(VOCAB_SIZE))
        assert token_id == max(kept, key=lambda other: noisy[other])


@pytest.mark.covers("A02")
@settings(max_examples=examples(100, 3))
@given(sampling=samplings.filter(lambda s: s.temperature > 0), row=st.integers(0, 2**30), prompt=ids)
def test_truncation_and_repetition_penalty_are_those_of_hugging_face_in_their_order(
    sampling: SamplingParams, row: int, prompt: list[int]
) -> None:
    import transformers  # here: all that collect tests would wait for it

    sampling = replace(sampling, presence_penalty=0.0, frequency_penalty=0.0, min_tokens=0, logit_bias=())
    logits = random_logits(row)
    scores, said = logits.double(), torch.tensor([prompt], dtype=torch.int64)
    steps = [
        transformers.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty),
        transformers.TemperatureLogitsWarper(sampling.temperature),
    ]
    if sampling.top_k:
        steps.append(transformers.TopKLogitsWarper(sampling.top_k))
    steps += [transformers.TopPLogitsWarper(sampling.top_p), transformers.MinPLogitsWarper(sampling.min_p)]
    for step in steps:
        scores = step(said, scores)
    seeds = [(sampling.seed + number) % 2**64 for number in range(NUM_SEEDS)]
    noise = np.stack([gumbel_noise(seed, 0, np.arange(VOCAB_SIZE)) for seed in seeds])
    draws = [draw_of(replace(sampling, seed=seed), 0, prompt, ()) for seed in seeds]
    assert sample(logits.expand(NUM_SEEDS, -1), draws) == (scores.numpy() + noise).argmax(1).tolist()


@pytest.mark.covers("A02", "M06")
@settings(max_examples=examples(50, 3))
@given(
    batch=st.lists(st.tuples(samplings, ids, ids), min_size=2, max_size=20),
    row=st.integers(0, 2**30),
    kernels=back_ends,
)
def test_a_row_draws_the_same_alone_and_beside_others(
    batch: list[tuple[SamplingParams, list[int], list[int]]], row: int, kernels: Kernels | None
) -> None:
    logits = random_logits(row, len(batch))
    draws = [draw_of(sampling, len(generated), prompt, generated) for sampling, prompt, generated in batch]
    alone = [sample(logits[at : at + 1], [draw])[0] for at, draw in enumerate(draws)]
    assert sample(logits, draws, kernels) == alone


@pytest.mark.covers("A02")
def test_a_ban_of_everything_is_none() -> None:
    sampling = SamplingParams(0.0, 0, min_tokens=5, stop_token_ids=frozenset(range(VOCAB_SIZE)))
    logits = random_logits(1)
    assert sample(logits, [Draw(sampling, 0)]) == [int(logits.argmax())]


@pytest.mark.covers("A02")
def test_stop_tokens_are_banned_up_to_min_tokens_and_not_beyond() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 7] = 9.0
    sampling = SamplingParams(0.0, 0, min_tokens=3, stop_token_ids=frozenset({7}))
    assert [sample(logits, [Draw(sampling, index)])[0] == 7 for index in range(5)] == [False, False, False, True, True]


@settings(max_examples=examples(50, 3))
@given(prompt=ids, generated=ids, later=ids)
def test_counts_are_the_same_however_much_was_known_at_the_start(
    prompt: list[int], generated: list[int], later: list[int]
) -> None:
    counts = TokenCounts(prompt, generated)
    for token_id in later:
        counts.add(token_id)
    said = [*generated, *later]
    right = {token_id: said.count(token_id) for token_id in {*prompt, *said}}
    assert dict(zip(counts.token_ids.tolist(), counts.counts.tolist(), strict=True)) == right
    assert len(counts.token_ids) == len(right)
