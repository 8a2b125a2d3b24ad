"""A device that computes by itself: steps are launched before earlier ones are read, and say what they say on a CPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import replace
from random import Random

import pytest
from torch import Tensor

from engine.block_pool import BlockPool
from engine.kv_memory import KvMemory
from engine.model import Model, load_model
from engine.plan import BranchToken, Done, Launched, SamplingParams, TokenLogprobs
from engine.runner import TorchRunner
from engine.scheduler import Scheduler, SchedulerConfig
from engine.sequence import SequenceSpec
from tests.engine_torch.conftest import VOCAB_SIZE, ModelDirs

BLOCK_SIZE, NUM_BLOCKS, NUM_SLOTS, MAX_MODEL_LEN = 16, 64, 4, 128
Said = dict[Hashable, list[tuple[int | None, TokenLogprobs | None, tuple[BranchToken, ...]]]]


@pytest.fixture(scope="module")
def model(model_dirs: ModelDirs) -> Model:
    return load_model(model_dirs("group4"), "fp32", "torch")


def drawn_specs(rng: Random, is_plain: bool) -> list[SequenceSpec]:
    """Sequences of different lengths; where not plain, each second one asks for what only the host can draw or tell."""
    more: list[Callable[[SamplingParams], SamplingParams]] = [
        lambda params: replace(params, top_k=5),
        lambda params: replace(params, repetition_penalty=1.3, presence_penalty=0.5),
        lambda params: replace(params, num_logprobs=2),
        lambda params: replace(params, logit_bias=((7, 4.0),)),
        lambda params: replace(params, num_logprobs=0, prompt_logprobs=True),
    ]
    specs = []
    for number in range(10):
        prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 60)))
        sampling = SamplingParams(rng.choice([0.0, 0.7, 1.0]), rng.getrandbits(64))
        if not is_plain and number % 2:
            sampling = more[number // 2](sampling)
        spec = SequenceSpec(number, prompt, 0, sampling, rng.randint(1, 30), frozenset(), ())
        if not is_plain and number == 4:
            spec = replace(spec, max_new_tokens=1, branch_seeds=(5, 6), lends=True)
        specs.append(spec)
    return specs


def run(model: Model, specs: list[SequenceSpec], is_asynchronous: bool) -> tuple[Said, list[Launched]]:
    """What every sequence said, and the steps in order; each is read when the one behind it has been launched."""
    memory = KvMemory(model.config, BLOCK_SIZE, NUM_BLOCKS, model.dtype, mirror=is_asynchronous)
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    scheduler = Scheduler(SchedulerConfig(NUM_SLOTS, 32, MAX_MODEL_LEN), pool, b"key")
    runner = TorchRunner(model, memory, NUM_SLOTS, MAX_MODEL_LEN, is_asynchronous=is_asynchronous)
    said: Said = {spec.sequence_id: [] for spec in specs}
    for spec in specs:
        scheduler.submit(spec)
    unread: deque[Launched] = deque()
    steps: list[Launched] = []
    while True:
        while len(unread) < 2 and (plan := scheduler.plan()) is not None:
            unread.append(runner.launch(plan))
            steps.append(unread[-1])
        if not unread:
            return said, steps
        for item in scheduler.complete(unread.popleft().read()):
            if item.token_id is not None:
                said[item.sequence_id].append((item.token_id, item.logprobs, item.branch_tokens))
            if item.finish is not None and item.sequence_id == 4:
                scheduler.release(4)


@pytest.mark.covers("Q09")
@pytest.mark.parametrize("is_plain", [True, False])
def test_an_asynchronous_runner_says_what_a_synchronous_one_says(model: Model, is_plain: bool, fresh_seed: int) -> None:
    specs = drawn_specs(Random(fresh_seed), is_plain)
    expected, computed = run(model, specs, is_asynchronous=False)
    said, steps = run(model, specs, is_asynchronous=True)
    assert all(isinstance(step, Done) for step in computed)
    assert said == expected and all(said.values())
    num_waited_for = sum(isinstance(step, Done) for step in steps)
    assert num_waited_for == 0 if is_plain else num_waited_for > 0


@pytest.mark.parametrize("kernels", ["torch", "cpu"])
def test_a_runner_says_when_a_step_is_not_computed_yet(model_dirs: ModelDirs, kernels: str) -> None:
    model = load_model(model_dirs("group4"), "fp32", kernels)
    memory = KvMemory(model.config, BLOCK_SIZE, NUM_BLOCKS, model.dtype)
    scheduler = Scheduler(SchedulerConfig(NUM_SLOTS, 32, MAX_MODEL_LEN), BlockPool(NUM_BLOCKS, BLOCK_SIZE), b"key")
    runner = TorchRunner(model, memory, NUM_SLOTS, MAX_MODEL_LEN)
    scheduler.submit(SequenceSpec(0, (1, 2, 3), 0, SamplingParams(0.0, 0), 4, frozenset(), ()))
    num_steps, seen = 0, list[Tensor]()
    while (plan := scheduler.plan()) is not None:
        before = memory.tensor.clone()
        launched = runner.launch(plan, lambda: seen.append(memory.tensor.clone()))
        num_steps += 1
        assert len(seen) == num_steps and seen[-1].equal(before) and not memory.tensor.equal(before)
        scheduler.complete(launched.read())
    assert num_steps == 4
