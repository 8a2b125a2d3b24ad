"""What every runner owes the scheduler when a slot is taken away: one suite for the fake one, each back end, and CUDA (Q09)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cache, partial

import numpy as np
import pytest
import torch

from engine.block_pool import BlockPool
from engine.device import CPU
from engine.fake_runner import BYTES_PER_TOKEN, FakeRunner
from engine.kv_memory import KvMemory
from engine.model import load_model
from engine.plan import NO_TOKEN, PREEMPTED_TOKEN_ID, Plan, Runner, SamplingParams, SlotMark, StepResult
from engine.reserve import ReserveConfig
from engine.runner import TorchRunner
from engine.scheduler import Scheduler, SchedulerConfig
from engine.sequence import SequenceSpec
from proto.block_key import block_keys, seed_key
from tests.engine_torch.conftest import VOCAB_SIZE, ModelDirs
from tests.kernels_choice import KERNELS
from tests.thorough import only_thorough

BLOCK_SIZE = 16
NUM_SLOTS = 4
MAX_MODEL_LEN = 256
KEY_SEED = seed_key(b"signal contract")
ZERO = ((0, 1000.0),)  # a bias with which every model says token 0

Make = Callable[..., Runner]


@pytest.fixture(scope="module", params=["fake", "compiled", "torch", "mirrored", "asynchronous", "cuda", "cuda-torch"])
def make_runner(request: pytest.FixtureRequest, model_dirs: ModelDirs) -> Make:
    """Give a function that makes a runner over so many blocks; `says_zero`: a fake one then knows no other token.

    "mirrored" and "asynchronous" do on a CPU what is done on a device that has memory of its own, and that computes by itself.
    """
    kind: str = request.param
    if kind.startswith("cuda") and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")

    def make(num_blocks: int, says_zero: bool = False) -> Runner:
        if kind == "fake":
            memory = np.zeros((num_blocks, BYTES_PER_TOKEN * BLOCK_SIZE), dtype=np.uint8)
            return FakeRunner(memory, BLOCK_SIZE, 1 if says_zero else VOCAB_SIZE, NUM_SLOTS)
        device = torch.device("cuda") if kind.startswith("cuda") else CPU
        model = load_model(
            model_dirs("group4"), "fp32", "torch" if kind in ("torch", "cuda-torch") else KERNELS, device
        )
        is_like_cuda = kind in ("mirrored", "asynchronous") or None
        kv = KvMemory(model.config, BLOCK_SIZE, num_blocks, "fp32", device, mirror=is_like_cuda)
        is_asynchronous = kind == "asynchronous" or None
        return TorchRunner(model, kv, NUM_SLOTS, MAX_MODEL_LEN, is_asynchronous=is_asynchronous)

    return make


@dataclass
class Rig:
    """A scheduler over a runner; every raw answer is kept.

    Where the runner can, a plan is launched as soon as it is made, before the results of earlier ones are read; else it runs
    when they are.
    """

    runner: Runner
    num_blocks: int
    chunk_tokens: int = 64
    told: dict[Hashable, list[int]] = field(default_factory=dict)
    answers: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # by (slot, generation), in order
    unread: deque[Callable[[], StepResult]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks, BLOCK_SIZE)
        reserve = ReserveConfig("none")
        self.scheduler = Scheduler(
            SchedulerConfig(NUM_SLOTS, self.chunk_tokens, MAX_MODEL_LEN, reserve=reserve), self.pool, KEY_SEED
        )

    def submit(self, name: str, prompt: list[int], max_new_tokens: int, says_zero: bool = False) -> None:
        sampling = SamplingParams(1.0, ord(name[0]), logit_bias=ZERO if says_zero else ())
        keys = tuple(block_keys(KEY_SEED, prompt, BLOCK_SIZE))
        self.told[name] = []
        spec = SequenceSpec(name, tuple(prompt), 0, sampling, max_new_tokens, frozenset(), keys)
        self.scheduler.submit(spec)

    def plan(self) -> Plan | None:
        plan = self.scheduler.plan()
        if plan is not None:
            runner = self.runner
            self.unread.append(
                runner.launch(plan).read if isinstance(runner, TorchRunner) else partial(runner.run, plan)
            )
        return plan

    def read(self) -> StepResult:
        result = self.unread.popleft()()
        for answer in result:
            self.answers.setdefault((answer.slot, answer.generation), []).append(answer.token_id)
        for progress in self.scheduler.complete(result):
            if progress.token_id is not None:
                self.told[progress.sequence_id].append(progress.token_id)
        return result

    def run(self, depth: int) -> None:
        while True:
            while len(self.unread) < depth and self.plan() is not None:
                pass
            if not self.unread:
                return
            self.read()


def prompt_of(name: str, length: int) -> list[int]:
    return [(7 * ord(name[0]) + index) % VOCAB_SIZE for index in range(length)]


NAMES = "abcdef"


def load_on(rig: Rig, says_zero: bool = False) -> None:
    for number, name in enumerate(NAMES):
        rig.submit(name, prompt_of(name, 20 + 5 * number), 60, says_zero)


@cache
def told_in_calm(make_runner: Make) -> dict[Hashable, list[int]]:
    """What the load says where nobody gives way."""
    calm = Rig(make_runner(64), 64)
    load_on(calm)
    calm.run(2)
    assert calm.scheduler.num_preempted == 0
    return calm.told


@pytest.mark.covers("Q01", "Q09")
def test_in_the_middle_of_a_prompt_a_slot_answers_no_token_which_is_no_preemption(make_runner: Make) -> None:
    rig = Rig(make_runner(16), 16, chunk_tokens=8)
    rig.submit("a", prompt_of("a", 100), 1)
    rig.run(2)
    ((_, answers),) = rig.answers.items()
    assert answers[:-1] == [NO_TOKEN] * 12 and answers[-1] >= 0
    assert rig.scheduler.num_preempted == 0 and rig.told["a"] == answers[-1:]


@pytest.mark.covers("Q02", "Q08", "Q09", "S10")
@pytest.mark.parametrize("depth", [1, pytest.param(2, marks=only_thorough), 3])
def test_in_half_the_pool_every_token_comes_once_in_order_and_is_the_right_one(make_runner: Make, depth: int) -> None:
    tight = Rig(make_runner(16), 16)
    load_on(tight)
    tight.run(depth)
    assert tight.told == told_in_calm(make_runner) and all(len(tokens) == 60 for tokens in tight.told.values())
    assert tight.scheduler.num_preempted > 0
    marked = [answers for answers in tight.answers.values() if PREEMPTED_TOKEN_ID in answers]
    assert len(marked) == tight.scheduler.num_preempted
    assert all(answers.index(PREEMPTED_TOKEN_ID) == len(answers) - 1 for answers in marked), "nothing follows the mark"
    counts = tight.pool.counts()
    assert counts.used == counts.leased == 0 and tight.scheduler.num_free_slots == NUM_SLOTS


@pytest.mark.covers("Q03", "Q09")
def test_token_0_is_a_token_like_any_other(make_runner: Make) -> None:
    rig = Rig(make_runner(16, says_zero=True), 16)
    load_on(rig, says_zero=True)
    rig.run(2)
    assert rig.told == {name: [0] * 60 for name in NAMES} and rig.scheduler.num_preempted > 0


@pytest.mark.covers("Q04", "Q09")
def test_a_step_in_which_every_slot_is_marked_still_answers(make_runner: Make) -> None:
    rig = Rig(make_runner(16), 16)
    rig.submit("a", prompt_of("a", 30), 60)
    rig.plan()
    rig.read()
    held = rig.pool.lease(rig.pool.num_available)
    while (plan := rig.plan()) is not None and not plan.marks:
        rig.read()
    assert plan is not None and not plan.num_tokens
    result = rig.read()
    assert [answer.token_id for answer in result] == [PREEMPTED_TOKEN_ID]
    rig.pool.release_lease(held)
    rig.run(2)
    assert len(rig.told["a"]) == 60


@pytest.mark.covers("Q04", "Q09")
def test_a_step_of_nothing_but_marks_answers_each_of_them(make_runner: Make) -> None:
    rig = Rig(make_runner(64), 64)
    for name in NAMES[:2]:
        rig.submit(name, prompt_of(name, 20), 60)
    for _ in range(3):
        rig.plan()
        rig.read()
    assert all(rig.scheduler.pause(name) for name in NAMES[:2])
    plan = rig.plan()
    assert plan is not None and not plan.num_tokens
    result = rig.read()
    assert [answer.token_id for answer in result] == [PREEMPTED_TOKEN_ID] * 2
    for name in NAMES[:2]:
        rig.scheduler.resume(name)
    rig.run(2)
    assert all(len(rig.told[name]) == 60 for name in NAMES[:2])


@pytest.mark.covers("Q05", "Q09")
def test_a_slots_next_owner_sees_neither_the_last_ones_token_nor_its_mark(make_runner: Make) -> None:
    after = Rig(make_runner(16), 16)
    load_on(after)
    after.run(3)
    owners = sorted(after.answers)
    assert any(generation > 1 for _, generation in owners), "no slot had a second owner"
    for (_, generation), answers in after.answers.items():
        assert generation == 1 or answers[0] != PREEMPTED_TOKEN_ID
    assert after.told == told_in_calm(make_runner)


@pytest.mark.covers("Q05", "Q09")
@pytest.mark.parametrize("generation", [0, 2])
def test_a_mark_for_another_owner_is_refused(make_runner: Make, generation: int) -> None:
    rig = Rig(make_runner(16), 16)
    rig.submit("a", prompt_of("a", 5), 9)
    rig.plan()
    rig.read()
    with pytest.raises(Exception, match="generation"):
        rig.runner.run(Plan(1, marks=(SlotMark(0, generation),)))
