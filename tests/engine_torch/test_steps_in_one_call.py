"""Which steps are laid out, computed and drawn in one call, and that their tokens are those of any other way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.kv_memory import KvMemory
from engine.model import Model, load_model
from engine.plan import NO_DECODES, DecodeRow, Decodes, Plan, PrefillChunk, SamplingParams, SlotResult, SlotStart
from engine.runner import TorchRunner
from kernels.choice import choose_kernels
from kernels.cpu_contest import CpuNearHead
from kernels.cpu_kernels import CpuKernels
from tests.engine_torch.conftest import ModelDirs

BLOCK_SIZE = 16
PROMPT = tuple(range(30, 70))
NUM_TOKENS = 40
SAMPLED = SamplingParams(0.8, 5)

pytestmark = pytest.mark.skipif(
    not isinstance(choose_kernels("cpu").kernels, CpuKernels),
    reason="compiled kernels alone have such a head",
)


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def model(request: pytest.FixtureRequest, model_dirs: ModelDirs) -> Model:
    return load_model(model_dirs("tied", request.param), "auto")


def near_head_of(model: Model) -> CpuNearHead:
    assert isinstance(model.ends.near_head, CpuNearHead)
    return model.ends.near_head


def in_full(model: Model) -> Model:
    """The same model without another head."""
    ends = model.ends._replace(near_head=None)
    return replace(model, ends=ends).first_layers(model.config.num_layers)


def layer_by_layer(model: Model) -> Model:
    """The same model, whose steps are laid out in Python and drawn by the sampler."""
    return replace(model, whole=None, stack=None)


def completions(model: Model, *samplings: SamplingParams) -> list[list[SlotResult]]:
    """A slot each: the same prompt, and so many tokens."""
    runner = TorchRunner(model, KvMemory(model.config, BLOCK_SIZE, 64, model.dtype), 4, 256)
    per_slot = -(-(len(PROMPT) + NUM_TOKENS) // BLOCK_SIZE)
    answers: list[list[SlotResult]] = [[] for _ in samplings]
    for slot, sampling in enumerate(samplings):
        start = SlotStart(slot, 1, sampling, 0, 0, prompt_token_ids=PROMPT)
        blocks = tuple(range(slot * per_slot, (slot + 1) * per_slot))
        answers[slot] += runner.run(Plan(0, (start,), NO_DECODES, (PrefillChunk(slot, 1, 0, PROMPT, blocks, True),)))
    for position in range(len(PROMPT), len(PROMPT) + NUM_TOKENS - 1):
        rows = [DecodeRow(slot, 1, position, ()) for slot in range(len(samplings))]
        for answer in runner.run(Plan(position, (), Decodes.of(*rows), ())):
            answers[answer.slot].append(answer)
    return answers


@pytest.mark.covers("M04", "D07")
def test_plain_rows_take_it_with_a_head_in_8_bits_and_say_the_tokens_of_the_head_in_full(model: Model) -> None:
    samplings = (SamplingParams(0.0, 1), SAMPLED, SamplingParams(1.7, 6))
    head = near_head_of(model)
    before = head.num_told
    near = completions(model, *samplings)
    assert head.num_told - before == NUM_TOKENS - 1  # every decode step, no prefill
    assert near == completions(in_full(model), *samplings) == completions(layer_by_layer(model), *samplings)


@pytest.mark.covers("M04", "D07")
def test_rows_come_and_go_between_steps_of_either_kind_and_say_what_they_say_alone(model: Model) -> None:
    """Slots with prompts, penalties and plain draws by turns: what a step notes is what the next of the other kind reads."""
    kinds = (SAMPLED, replace(SAMPLED, presence_penalty=1.5), SamplingParams(0.0, 1), SamplingParams(1.7, 6))
    alone = [completions(model, sampling)[0] for sampling in kinds]
    runner = TorchRunner(model, KvMemory(model.config, BLOCK_SIZE, 64, model.dtype), 4, 256)
    per_slot = -(-(len(PROMPT) + NUM_TOKENS) // BLOCK_SIZE)
    answers: list[list[SlotResult]] = [[] for _ in kinds]
    for step in range(4 * NUM_TOKENS):
        chunks, starts, rows = [], [], []
        for slot, sampling in enumerate(kinds):
            if step == 7 * slot:
                starts.append(SlotStart(slot, 1, sampling, 0, 0, prompt_token_ids=PROMPT))
                blocks = tuple(range(slot * per_slot, (slot + 1) * per_slot))
                chunks.append(PrefillChunk(slot, 1, 0, PROMPT, blocks, True))
            elif 0 < len(answers[slot]) < NUM_TOKENS and (slot != 1 or step % 3 == 0):
                rows.append(DecodeRow(slot, 1, len(PROMPT) + len(answers[slot]) - 1, ()))
        for answer in runner.run(Plan(step, tuple(starts), Decodes.of(*rows), tuple(chunks))):
            answers[answer.slot].append(answer)
    assert [[each.token_id for each in row] for row in answers] == [[each.token_id for each in row] for row in alone]


@pytest.mark.covers("M04")
@pytest.mark.parametrize(
    "sampling",
    [
        replace(SAMPLED, top_k=40),
        replace(SAMPLED, top_p=0.9),
        replace(SAMPLED, min_p=0.1),
        replace(SAMPLED, presence_penalty=1.5),
        replace(SAMPLED, frequency_penalty=1.5),
        replace(SAMPLED, repetition_penalty=1.5),
        replace(SAMPLED, logit_bias=((7, 4.0),)),
        replace(SAMPLED, min_tokens=30, stop_token_ids=frozenset(range(0, 260, 2))),
        replace(SAMPLED, num_logprobs=3),
        replace(SAMPLED, temperature=0.0, repetition_penalty=1.5),
        replace(SAMPLED, temperature=0.0, num_logprobs=0),
    ],
    ids=lambda sampling: " ".join(
        f"{name}" for name in sampling.__slots__ if getattr(sampling, name) != getattr(SAMPLED, name)
    ),
)
def test_a_step_with_a_row_that_needs_more_is_computed_in_full(model: Model, sampling: SamplingParams) -> None:
    head = near_head_of(model)
    before = head.num_told + head.num_untold
    answers = completions(model, SAMPLED, sampling)
    assert head.num_told + head.num_untold == before
    assert answers == completions(in_full(model), SAMPLED, sampling)


@pytest.mark.covers("M04")
def test_a_greedy_row_takes_it_whatever_it_is_told_of_sets_of_likely_tokens(model: Model) -> None:
    head = near_head_of(model)
    before = head.num_told
    completions(model, SamplingParams(0.0, 1, top_k=5, top_p=0.5, min_p=0.2))
    assert head.num_told - before == NUM_TOKENS - 1


def test_a_head_of_its_own_and_a_head_in_8_bits_have_no_other(model_dirs: ModelDirs) -> None:
    assert load_model(model_dirs("group4", "bf16"), "auto").ends.near_head is None
    assert load_model(model_dirs("tied", "bf16"), "auto", weight_dtype="int8").ends.near_head is None
