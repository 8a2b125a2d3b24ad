"""Sampling parameters and logprobs through scheduler, runner and model: alone, together, and cut in two."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from engine.batch import Segment, build_batch
from engine.block_pool import BlockPool
from engine.kv_memory import KvMemory
from engine.local_engine import LocalEngine
from engine.logprobs import LogitsError, token_logprobs
from engine.model import Model, load_model
from engine.plan import BranchToken, Plan, SamplingParams, StepResult, TokenLogprobs
from engine.runner import TorchRunner
from engine.scheduler import Scheduler, SchedulerConfig
from engine.sequence import Progress, SequenceSpec
from proto.block_key import block_keys, seed_key
from tests.engine_torch.conftest import VOCAB_SIZE, ModelDirs
from tests.kernels_choice import KERNELS

BLOCK_SIZE = 16
KEY_SEED = seed_key(b"sampled sequences")
PROMPT = tuple(range(30, 71))


@dataclass
class Answer:
    """What one sequence gave."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


class Engine:
    """One engine over a model; answers with everything."""

    def __init__(self, model: Model, num_slots: int = 4, max_batched_tokens: int = 64) -> None:
        self.pool = BlockPool(64, BLOCK_SIZE)
        scheduler = Scheduler(SchedulerConfig(num_slots, max_batched_tokens, 256), self.pool, KEY_SEED)
        self.memory = KvMemory(model.config, BLOCK_SIZE, 64, model.dtype)
        self._runner = TorchRunner(model, self.memory, num_slots, 256)
        self._engine = LocalEngine(scheduler, self)
        self.num_computed = 0  # token positions

    def run(self, plan: Plan) -> StepResult:
        """The runner, watched."""
        self.num_computed += plan.num_tokens
        return self._runner.run(plan)

    def progress(self, *specs: SequenceSpec) -> Iterable[Progress]:
        return self._engine.run(specs)

    def answer(self, *specs: SequenceSpec) -> list[Answer]:
        answers = {spec.sequence_id: Answer() for spec in specs}
        for progress in self._engine.run(specs):
            answer = answers[progress.sequence_id]
            answer.prompt_logprobs += progress.prompt_logprobs
            if progress.token_id is not None:
                answer.token_ids.append(progress.token_id)
                answer.logprobs.append(progress.logprobs)
        return list(answers.values())


def spec_of(
    name: str,
    sampling: SamplingParams,
    *,
    prompt: Sequence[int] = PROMPT,
    generated: Sequence[int] = (),
    max_tokens: int = 16,
) -> SequenceSpec:
    token_ids = (*prompt, *generated)
    return SequenceSpec(
        sequence_id=name,
        token_ids=token_ids,
        num_generated=len(generated),
        sampling=sampling,
        max_new_tokens=max_tokens - len(generated),
        stop_token_ids=frozenset(),
        block_keys=tuple(block_keys(KEY_SEED, token_ids, BLOCK_SIZE)),
    )


def draw_sampling(draw: random.Random) -> SamplingParams:
    """Any of the parameters, each on half of the time; few tokens are likely, so that penalties have something to do."""

    def maybe(value: float, off: float) -> float:
        return draw.choice((value, off))

    likely = draw.sample(range(VOCAB_SIZE), 12)
    return SamplingParams(
        temperature=maybe(0.9, 0.0),
        seed=draw.getrandbits(64),
        top_k=draw.choice((0, 8)),
        top_p=maybe(0.95, 1.0),
        min_p=maybe(0.01, 0.0),
        presence_penalty=maybe(0.6, 0.0),
        frequency_penalty=maybe(0.3, 0.0),
        repetition_penalty=maybe(1.2, 1.0),
        min_tokens=draw.choice((0, 5)),
        stop_token_ids=frozenset(likely[:4]),
        logit_bias=tuple((token_id, 6.0) for token_id in likely),
        num_logprobs=draw.choice((None, 0, 3)),
        prompt_logprobs=draw.choice((False, True)),
    )


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def model(request: pytest.FixtureRequest, model_dirs: ModelDirs) -> Model:
    return load_model(model_dirs("group1", request.param), "auto", KERNELS)


@pytest.mark.covers("A02", "M06")
def test_tokens_and_the_bits_of_logprobs_are_the_same_alone_and_together(model: Model, fresh_seed: int) -> None:
    draw = random.Random(fresh_seed)
    specs = [
        spec_of(
            f"r{number}",
            draw_sampling(draw),
            prompt=[draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, 60))],
        )
        for number in range(6)
    ]
    together = Engine(model, max_batched_tokens=20).answer(*specs)
    for spec, among in zip(specs, together, strict=True):
        (alone,) = Engine(model).answer(spec)
        assert among == alone, spec.sampling


@pytest.mark.covers("R09", "R08", "A02")
def test_a_completion_cut_anywhere_goes_on_with_the_same_tokens_and_logprobs(model: Model, fresh_seed: int) -> None:
    draw = random.Random(fresh_seed)
    samplings = [draw_sampling(draw) for _ in range(3)]
    everything = replace(
        samplings[0], temperature=0.9, presence_penalty=0.6, repetition_penalty=1.2, min_tokens=5, num_logprobs=3
    )
    for sampling in (everything, *samplings):
        engine = Engine(model)
        (whole,) = engine.answer(spec_of("whole", sampling))
        for cut in range(1, 16):
            (rest,) = engine.answer(spec_of(f"from {cut}", sampling, generated=whole.token_ids[:cut]))
            assert (rest.token_ids, rest.logprobs) == (whole.token_ids[cut:], whole.logprobs[cut:]), (cut, sampling)
            assert rest.prompt_logprobs == whole.prompt_logprobs


@pytest.mark.covers("Q05")
def test_a_slots_next_owner_sees_nothing_of_the_last_ones_counts_and_prompt(model: Model) -> None:
    """One slot; what leaks would change a penalised owner's tokens, a plain one's, or the prompt logprobs."""
    penalised = SamplingParams(
        0.0, 0, repetition_penalty=1.5, frequency_penalty=1.0, num_logprobs=1, prompt_logprobs=True
    )
    last = spec_of("last", penalised, prompt=range(200, 240), max_tokens=30)
    for sampling in (penalised, SamplingParams(0.0, 0, num_logprobs=1), SamplingParams(0.0, 0, presence_penalty=1.0)):
        (fresh,) = Engine(model, num_slots=1).answer(spec_of("next", sampling))
        assert (fresh.logprobs[0] is None) == (sampling.num_logprobs is None)
        assert Engine(model, num_slots=1).answer(last, spec_of("next", sampling))[1] == fresh


@pytest.mark.covers("A02")
def test_logprobs_are_the_logarithm_of_the_models_own_softmax(model: Model) -> None:
    sampling = SamplingParams(
        1.0, 5, top_k=3, repetition_penalty=2.0, logit_bias=((4, 9.0),), num_logprobs=5, prompt_logprobs=True
    )
    (answer,) = Engine(model).answer(spec_of("a", sampling))
    token_ids = [*PROMPT, *answer.token_ids]
    memory = KvMemory(model.config, BLOCK_SIZE, 8, model.dtype)
    logits = model.forward(
        build_batch([Segment(token_ids[:-1], 0, range(8), len(token_ids) - 1)], BLOCK_SIZE), memory.tensor
    )
    right = torch.log_softmax(logits.double(), -1)
    given = [*answer.prompt_logprobs, *answer.logprobs]
    assert len(given) == len(token_ids) - 1 and len(answer.prompt_logprobs) == len(PROMPT) - 1
    for row, (token_id, logprobs) in enumerate(zip(token_ids[1:], given, strict=True)):
        assert logprobs is not None
        assert logprobs.logprob == pytest.approx(float(right[row, token_id]), abs=1e-5)
        order = sorted(range(VOCAB_SIZE), key=lambda other: (-float(logits[row, other]), other))
        assert [top_id for top_id, _ in logprobs.top] == order[:5]
        assert [value for _, value in logprobs.top] == pytest.approx(
            [float(right[row, t]) for t in order[:5]], abs=1e-5
        )


@pytest.mark.covers("A02", "M06")
@pytest.mark.parametrize("max_batched_tokens", [4, 7, 16, 64])
def test_what_a_prompt_tells_is_what_its_completion_told_bit_by_bit(model: Model, max_batched_tokens: int) -> None:
    """However it is chunked: the completion's logprobs come from decode rows, the prompt's from chunks."""
    sampling = SamplingParams(1.0, 5, num_logprobs=2, prompt_logprobs=True)
    (answer,) = Engine(model, num_slots=4).answer(spec_of("a", sampling))
    longer = spec_of("b", sampling, prompt=(*PROMPT, *answer.token_ids))
    (again,) = Engine(model, max_batched_tokens=max_batched_tokens).answer(longer)
    assert again.prompt_logprobs == [*answer.prompt_logprobs, *answer.logprobs]


@pytest.mark.covers("A02", "P02")
def test_a_prompt_whose_logprobs_are_wanted_is_computed_again_and_still_cached_for_others(model: Model) -> None:
    engine = Engine(model)
    plain, telling = SamplingParams(0.0, 0), SamplingParams(0.0, 0, num_logprobs=0, prompt_logprobs=True)
    (first,) = engine.answer(spec_of("first", telling))
    assert engine.pool.counts().cached > 0
    (second,) = engine.answer(spec_of("second", telling))
    assert second == first and len(second.prompt_logprobs) == len(PROMPT) - 1
    once = engine.num_computed // 2
    (third,) = engine.answer(spec_of("third", plain))
    assert third.token_ids == first.token_ids
    assert engine.num_computed == 3 * once - len(PROMPT) // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.covers("A02", "M06")
def test_the_first_tokens_of_further_branches_are_those_of_sequences_of_their_own(
    model: Model, fresh_seed: int
) -> None:
    draw = random.Random(fresh_seed)
    for _ in range(8):
        sampling, seeds = draw_sampling(draw), [draw.getrandbits(64) for _ in range(3)]
        alone = Engine(model).answer(
            *(spec_of(str(seed), replace(sampling, seed=seed), max_tokens=1) for seed in seeds),
            spec_of("own", sampling),
        )
        engine = Engine(model)
        branch_tokens: list[BranchToken] = []
        spec = replace(spec_of("own", sampling), branch_seeds=tuple(seeds))
        own = Answer()
        for progress in engine.progress(spec):
            branch_tokens += progress.branch_tokens
            if progress.token_id is not None:
                own.token_ids.append(progress.token_id)
        assert own.token_ids == alone[-1].token_ids, "branches changed what the sequence itself says"
        assert [(t.token_id, t.logprobs) for t in branch_tokens] == [
            (a.token_ids[0], a.logprobs[0]) for a in alone[:-1]
        ]


def test_rows_that_are_not_numbers_raise_and_ties_go_to_the_lowest_id() -> None:
    (tied,) = token_logprobs(torch.zeros(1, 8), [5], 3)
    assert [token_id for token_id, _ in tied.top] == [0, 1, 2]
    assert tied.logprob == pytest.approx(-2.0794415)
    assert len(token_logprobs(torch.zeros(1, 3), [0], 20)[0].top) == 3
    with pytest.raises(LogitsError):
        token_logprobs(torch.full((1, 4), torch.nan), [0], 0)


@pytest.mark.covers("P02")
def test_a_cached_block_without_numbers_breaks_one_sequence_and_not_each_that_begins_like_it(model: Model) -> None:
    """A bit that flips in an exponent: each that found the block would break, and keep it from being evicted."""
    engine = Engine(model)
    spec = spec_of("s", SamplingParams(0.0, 0))
    (right,) = engine.answer(spec)
    block_id = engine.pool.find(spec.block_keys[1])
    assert block_id is not None
    engine.memory.tensor[block_id, 0, 1, 3] = torch.nan
    assert [progress.finish for progress in engine.progress(spec)] == ["broken"]
    before = engine.num_computed
    assert engine.answer(spec) == [right]
    assert engine.num_computed - before >= len(PROMPT), "nothing of what broke is found"
    assert engine.pool.counts().used == 0
