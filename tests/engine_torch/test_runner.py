"""Slots: what they keep between steps, and what a new owner must never see."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest
import torch

from engine.gumbel import gumbel_noise
from engine.kv_memory import KvMemory
from engine.model import Model, load_model
from engine.plan import (
    BROKEN_ROW,
    NO_DECODES,
    NO_TOKEN,
    DecodeRow,
    Decodes,
    Plan,
    PrefillChunk,
    Runner,
    SamplingParams,
    SlotResult,
    SlotStart,
)
from engine.runner import PlanError, TorchRunner
from tests.engine_torch.conftest import VOCAB_SIZE, ModelDirs
from tests.kernels_choice import KERNELS

BLOCK_SIZE = 16
NUM_BLOCKS = 64
GREEDY = SamplingParams(0.0, 0)
PROMPT = tuple(range(30, 70))


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def model(request: pytest.FixtureRequest, model_dirs: ModelDirs) -> Model:
    return load_model(model_dirs("group1", request.param), "auto", KERNELS)


@pytest.fixture
def kv(model: Model) -> KvMemory:
    return KvMemory(model.config, BLOCK_SIZE, NUM_BLOCKS, model.dtype)


@pytest.fixture
def runner(model: Model, kv: KvMemory) -> Runner:
    return TorchRunner(model, kv, num_slots=4, max_model_len=256)


@pytest.fixture
def block_ids() -> Iterator[int]:
    """Give blocks that no other sequence of the test has."""
    return iter(range(NUM_BLOCKS))


def run_one(runner: Runner, *, starts: tuple[SlotStart, ...] = (), row: DecodeRow | PrefillChunk) -> SlotResult:
    decodes, chunks = (Decodes.of(row), ()) if isinstance(row, DecodeRow) else (NO_DECODES, (row,))
    (answer,) = runner.run(Plan(0, starts, decodes, chunks))
    assert answer.slot == row.slot and answer.generation == row.generation
    return answer


def complete(
    runner: Runner,
    blocks: Iterator[int],
    *,
    prompt: tuple[int, ...] = PROMPT,
    sampling: SamplingParams = GREEDY,
    slot: int = 0,
    generation: int = 1,
    num_tokens: int = 12,
    next_index: int = 0,
) -> list[int]:
    """Prefill a prompt in one chunk, decode the rest."""
    needed = [next(blocks) for _ in range(-(-(len(prompt) + num_tokens) // BLOCK_SIZE))]
    start = SlotStart(slot, generation, sampling, next_index, 0, prompt_token_ids=prompt)
    chunk = PrefillChunk(slot, generation, 0, prompt, tuple(needed), True)
    tokens = [run_one(runner, starts=(start,), row=chunk).token_id]
    for position in range(len(prompt), len(prompt) + num_tokens - 1):
        tokens.append(run_one(runner, row=DecodeRow(slot, generation, position, ())).token_id)
    return tokens


@pytest.mark.covers("M06")
def test_sequences_give_the_same_tokens_alone_and_sharing_steps_with_others(
    model: Model, runner: Runner, block_ids: Iterator[int]
) -> None:
    prompts = [tuple(range(5 * slot, 5 * slot + 20 + 7 * slot)) for slot in range(4)]
    samplings = [SamplingParams(0.9 * (slot % 2), slot) for slot in range(4)]
    own_memory = KvMemory(model.config, BLOCK_SIZE, NUM_BLOCKS, model.dtype)
    alone_runner, alone_blocks = TorchRunner(model, own_memory, 4, 256), iter(range(NUM_BLOCKS))
    alone = [
        complete(alone_runner, alone_blocks, prompt=prompt, sampling=sampling, slot=slot)
        for slot, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
    ]
    # Sequence s is cut into chunks of 9 from step s on, so that prefill, decode and different lengths share steps.
    together: list[list[int]] = [[] for _ in prompts]
    done = [0] * 4
    for step in count():
        starts: list[SlotStart] = []
        decodes: list[DecodeRow] = []
        chunks: list[PrefillChunk] = []
        for slot, prompt in enumerate(prompts):
            if slot == step:
                starts.append(SlotStart(slot, 1, samplings[slot], 0, 0))
            if slot > step or len(together[slot]) == 12:
                continue
            left = len(prompt) - done[slot]
            width = min(9, left) if left > 0 else 1
            have = -(-done[slot] // BLOCK_SIZE)
            new = tuple(next(block_ids) for _ in range(-(-(done[slot] + width) // BLOCK_SIZE) - have))
            if left > 0:
                ids = prompt[done[slot] : done[slot] + width]
                chunks.append(PrefillChunk(slot, 1, done[slot], ids, new, left <= 9))
            else:
                decodes.append(DecodeRow(slot, 1, done[slot], new))
            done[slot] += width
        if not decodes and not chunks:
            break
        result = runner.run(Plan(step, tuple(starts), Decodes.of(*decodes), tuple(chunks)))
        assert [answer.slot for answer in result] == [d.slot for d in decodes] + [c.slot for c in chunks]
        for answer in result:
            if answer.token_id != NO_TOKEN:
                together[answer.slot].append(answer.token_id)
    assert together == alone


@pytest.mark.covers("Q03")
def test_token_0_is_sampled_fed_and_answered_like_any_other(runner: Runner, block_ids: Iterator[int]) -> None:
    everything = np.arange(VOCAB_SIZE)
    seed = next(seed for seed in count() if gumbel_noise(seed, 0, everything).argmax() == 0)
    noise_only = SamplingParams(1e9, seed)  # so hot that the logits do not count
    start = SlotStart(1, 1, noise_only, 0, 0)
    blocks = tuple(next(block_ids) for _ in range(4))
    first = run_one(runner, starts=(start,), row=PrefillChunk(1, 1, 0, PROMPT, blocks, True))
    assert first.token_id == 0
    second = run_one(runner, row=DecodeRow(1, 1, len(PROMPT), ()))
    # The same with the 0 as part of the prompt.
    start = SlotStart(2, 1, noise_only, 1, 0)
    blocks = tuple(next(block_ids) for _ in range(4))
    chunk = PrefillChunk(2, 1, 0, (*PROMPT, 0), blocks, True)
    assert run_one(runner, starts=(start,), row=chunk).token_id == second.token_id


def test_a_chunk_that_is_not_the_last_answers_no_token(runner: Runner, block_ids: Iterator[int]) -> None:
    start = SlotStart(0, 1, GREEDY, 0, 0)
    blocks = tuple(next(block_ids) for _ in range(4))
    first = run_one(runner, starts=(start,), row=PrefillChunk(0, 1, 0, PROMPT[:25], blocks, False))
    assert first.token_id == NO_TOKEN
    last = run_one(runner, row=PrefillChunk(0, 1, 25, PROMPT[25:], (), True))
    assert last.token_id == complete(runner, block_ids, slot=3, num_tokens=1)[0]


@pytest.mark.covers("Q05")
def test_the_next_owner_of_a_slot_sees_nothing_of_the_last(runner: Runner, block_ids: Iterator[int]) -> None:
    seeded = SamplingParams(1.0, 77)
    fresh = complete(runner, block_ids, sampling=seeded, slot=3, num_tokens=20)
    complete(
        runner, block_ids, prompt=tuple(range(100, 199)), sampling=SamplingParams(0.7, 5), generation=1, num_tokens=9
    )
    assert complete(runner, block_ids, sampling=seeded, generation=2, num_tokens=20) == fresh


@pytest.mark.covers("Q05", "R09")
@pytest.mark.parametrize(
    "seeded", [SamplingParams(1.0, 123), SamplingParams(0.0, 0, frequency_penalty=1.0, repetition_penalty=1.5)]
)
def test_a_slot_that_takes_over_a_sequence_feeds_the_token_and_counts_the_tokens_it_is_given(
    runner: Runner, block_ids: Iterator[int], seeded: SamplingParams
) -> None:
    """What a decode node does after a handoff: no chunk, the KV is there already."""
    fresh = complete(runner, block_ids, sampling=seeded, slot=0, num_tokens=10)
    complete(runner, block_ids, prompt=tuple(range(200, 240)), slot=1, num_tokens=5)
    table = (0, 1, 2, 3)
    start = SlotStart(1, 2, seeded, 4, fresh[3], PROMPT, tuple(fresh[:4]))
    tokens = [run_one(runner, starts=(start,), row=DecodeRow(1, 2, len(PROMPT) + 3, table)).token_id]
    for index in range(5, 10):
        tokens.append(run_one(runner, row=DecodeRow(1, 2, len(PROMPT) + index - 1, ())).token_id)
    assert tokens == fresh[4:]


@pytest.mark.covers("Q05")
def test_a_plan_for_a_former_owner_is_refused(runner: Runner, block_ids: Iterator[int]) -> None:
    complete(runner, block_ids, num_tokens=2)
    complete(runner, block_ids, generation=2, num_tokens=2)
    with pytest.raises(PlanError, match="slot 0 is at generation 2"):
        run_one(runner, row=DecodeRow(0, 1, len(PROMPT) + 2, ()))
    with pytest.raises(PlanError, match="generation 2 does not follow 2"):
        runner.run(Plan(0, (SlotStart(0, 2, GREEDY, 0, 0),)))


def test_rows_past_their_blocks_or_outside_the_pool_are_refused(runner: Runner) -> None:
    start = SlotStart(0, 1, GREEDY, 0, 0)
    with pytest.raises(ValueError, match="position 39 is past the 2 blocks"):
        run_one(runner, starts=(start,), row=PrefillChunk(0, 1, 0, PROMPT, (0, 1), True))
    with pytest.raises(PlanError, match="not all in a pool of 64"):
        run_one(runner, row=PrefillChunk(0, 1, 0, PROMPT, (64,), True))
    with pytest.raises(PlanError, match="more than max_model_len has"):
        run_one(runner, row=PrefillChunk(0, 1, 0, PROMPT, tuple(range(17)), True))


@pytest.mark.parametrize("samples", [True, False])
def test_a_chunk_of_no_positions_is_refused_before_it_reaches_kernels_that_take_it_for_one(
    runner: Runner, samples: bool
) -> None:
    start = SlotStart(0, 1, GREEDY, 0, 0)
    with pytest.raises(ValueError, match="slot 0: a chunk of no positions"):
        run_one(runner, starts=(start,), row=PrefillChunk(0, 1, 0, (), (0,), samples))


def test_a_plan_without_rows_answers_without_rows(runner: Runner) -> None:
    result = runner.run(Plan(9))
    assert (result.step_id, *result) == (9,)


def test_broken_kv_ends_in_an_error_for_its_own_sequence_only(
    kv: KvMemory, runner: Runner, block_ids: Iterator[int]
) -> None:
    healthy = complete(runner, block_ids, slot=3, num_tokens=2)
    kv.tensor.fill_(torch.nan)
    assert complete(runner, block_ids, slot=1, num_tokens=2) == healthy
    row = DecodeRow(0, 1, len(PROMPT), tuple(range(50, 53)))
    assert run_one(runner, starts=(SlotStart(0, 1, GREEDY, 1, 0),), row=row).token_id == BROKEN_ROW
    run_one(runner, row=DecodeRow(0, 1, len(PROMPT) + 1, ()))  # planned before the answer was read
