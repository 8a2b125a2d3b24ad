"""A scheduler that always has its slots full, and answers that nobody computed: what is left is its bookkeeping.

Whenever a sequence ends the next one is submitted, so that the scheduler knows as many as before. Prompts and completions are
log-uniform in length; about one token in a thousand stops a sequence early. No prompt begins like another one. Steps overlap as
in a node. Times are the thread's own: what others do on the machine is not counted, though it slows the caches. Not here: what is
reported (scheduler.py).
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from dataclasses import dataclass
from random import Random
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.block_pool import BlockPool
from engine.plan import NO_TOKEN, PREEMPTED_TOKEN_ID, Plan, PrefillChunk, SamplingParams, SlotMark, StepResult
from engine.reserve import ReserveConfig, ReservePolicy
from engine.scheduler import Scheduler, SchedulerConfig
from engine.sequence import SequenceSpec
from proto.block_key import KEY_BYTES, seed_key

SHORTEST: Final = 16  # tokens of a prompt, and of a completion
LONGEST: Final = 1024
MEAN_TOKENS: Final = 2 * (LONGEST - SHORTEST) / math.log(LONGEST / SHORTEST)  # of a prompt and a completion together
VOCAB_SIZE: Final = 1000
STOPS: Final = frozenset({0})
SAMPLING: Final = SamplingParams(1.0, 0)
_STEPS_AHEAD: Final = 2  # as in a node
_REFERENCE_REPEATS: Final = 20


@dataclass(frozen=True, slots=True)
class LoadSizes:
    """One case."""

    num_slots: int
    num_sequences: int  # known at any time, those in slots included
    policy: ReservePolicy
    pool_percent: int  # of what the slots' sequences need at their limits, on average
    block_size: int
    max_batched_tokens: int

    @property
    def num_blocks(self) -> int:
        """At least one sequence at its limit fits."""
        needed = self.num_slots * MEAN_TOKENS * self.pool_percent / 100
        return -(-max(int(needed), 2 * LONGEST) // self.block_size)


class Step(NamedTuple):
    """One plan() and one complete(); seconds."""

    plan_s: float
    complete_s: float
    is_quiet: bool  # every row is a decode, and nobody's last


class Load:
    """The scheduler, and whoever keeps it busy."""

    def __init__(self, sizes: LoadSizes, seed: int) -> None:
        self._random = Random(seed)
        self._stream = self._random.choices(range(VOCAB_SIZE), k=8 * LONGEST)
        self._tokens = np.random.default_rng(seed)
        self._block_size = sizes.block_size
        reserve = ReserveConfig(sizes.policy)
        batched = max(sizes.max_batched_tokens, sizes.num_slots)
        config = SchedulerConfig(sizes.num_slots, batched, 2 * LONGEST, reserve=reserve)
        self.scheduler = Scheduler(config, BlockPool(sizes.num_blocks, sizes.block_size), seed_key(b"bench"))
        self._unread: deque[Plan] = deque()
        self.num_ended = 0
        self.num_rows = 0  # decode rows read
        for self._next_id in range(sizes.num_sequences):
            self.scheduler.submit(self._spec(self._next_id))

    def step(self) -> Step:
        """Read one step, with the next one planned."""
        clock, scheduler = time.thread_time, self.scheduler
        plan_s, is_quiet = 0.0, True
        while len(self._unread) < _STEPS_AHEAD:
            begin = clock()
            plan = scheduler.plan()
            plan_s += clock() - begin
            if plan is None:
                break
            is_quiet &= not (plan.chunks or plan.marks)
            self._unread.append(plan)
        plan = self._unread.popleft()
        is_quiet &= not (plan.chunks or plan.marks)
        result = self._answers(plan)
        begin = clock()
        progress = scheduler.complete(result)
        complete_s = clock() - begin
        for item in progress.others:
            if item.finish is not None:
                is_quiet = False
                self.num_ended += 1
                self._next_id += 1
                scheduler.submit(self._spec(self._next_id))
        return Step(plan_s, complete_s, is_quiet)

    def _answers(self, plan: Plan) -> StepResult:
        self.num_rows += len(plan.decodes)
        others: tuple[PrefillChunk | SlotMark, ...] = (*plan.chunks, *plan.marks)
        drawn = self._tokens.integers(VOCAB_SIZE, size=len(plan.decodes))
        of_chunks = [self._random.randrange(VOCAB_SIZE) if chunk.samples else NO_TOKEN for chunk in plan.chunks]
        return StepResult(
            plan.step_id,
            _joined(plan.decodes.slots, [row.slot for row in others]),
            _joined(plan.decodes.generations, [row.generation for row in others]),
            _joined(drawn, [*of_chunks, *(PREEMPTED_TOKEN_ID for _ in plan.marks)]),
            {},
        )

    def _spec(self, sequence_id: int) -> SequenceSpec:
        num_prompt, num_new = self._length(), self._length()
        start = self._random.randrange(len(self._stream) - num_prompt)
        keys = (self._random.randbytes(KEY_BYTES) for _ in range(num_prompt // self._block_size))
        return SequenceSpec(
            sequence_id=sequence_id,
            token_ids=tuple(self._stream[start : start + num_prompt]),
            num_generated=0,
            sampling=SAMPLING,
            max_new_tokens=num_new,
            stop_token_ids=STOPS,
            block_keys=tuple(keys),
        )

    def _length(self) -> int:
        return round(math.exp(self._random.uniform(math.log(SHORTEST), math.log(LONGEST))))


def _joined(array: NDArray[np.int64], rest: list[int]) -> NDArray[np.int64]:
    return np.concatenate((array, np.array(rest, np.int64)))


def reference_s(num_slots: int) -> float:
    """A list of so many numbers, made by a loop: the least that Python does for every slot. The median of some."""

    def once() -> float:
        numbers: list[int] = []
        begin = time.thread_time()
        for number in range(num_slots):
            numbers.append(number)
        return time.thread_time() - begin

    return statistics.median(once() for _ in range(_REFERENCE_REPEATS))
