"""One node's engine without a model, for `baton plan --exact`: the product's scheduler decides every step. Pure.

    Work    one attempt at a request: a prompt, and what is to be said behind it
    Step    what a planned step computes, which is all that its time depends on
    Told    what a step's results said of one attempt

Not here: time (plan_node.py); the same without the scheduler, many steps at once (plan_fast.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import numpy as np

from bench.plan_rates import Shape, pairs_of
from engine.block_pool import BlockPool
from engine.plan import NO_TOKEN, PREEMPTED_TOKEN_ID, Plan, PrefillChunk, SamplingParams, SlotMark, StepResult
from engine.reserve import ReserveConfig
from engine.scheduler import Scheduler, SchedulerConfig
from engine.sequence import SequenceSpec

STEPS_AHEAD: Final = 2  # one that runs, one planned behind it, as in a node
_GREEDY: Final = SamplingParams(0.0, 0)
_TOKEN: Final = 1  # whatever is said
KEY_SEED: Final = b"baton plan"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one node; a node's flags of these names."""

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    reserve: ReserveConfig = field(default_factory=ReserveConfig)

    def __post_init__(self) -> None:
        if min(self.num_blocks, self.block_size, self.max_num_seqs) < 1:
            raise ValueError(f"{self.num_blocks} blocks of {self.block_size} for {self.max_num_seqs} sequences")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"{self.max_num_batched_tokens} batched tokens for {self.max_num_seqs} sequences: one each"
            )

    @property
    def max_model_len(self) -> int:
        """The longest sequence that fits."""
        return self.num_blocks * self.block_size


@dataclass(slots=True, eq=False)
class Work:
    """One attempt on one node."""

    request: int  # its index
    num_prompt: int  # tokens of the client's prompt
    num_given: int  # tokens known at the start: with those that earlier attempts said
    num_new: int  # that are still to be said, at least 1
    keys: Sequence[bytes]  # of the prompt's full blocks
    token_ids: tuple[int, ...] = ()  # the prompt's, where the scheduler is the product's


class Step(NamedTuple):
    """A planned step."""

    shape: Shape
    starts: tuple[tuple[Work, int], ...]  # whose first chunk is in it, and behind how many cached positions


class Told(NamedTuple):
    """Of one attempt, by a step's results."""

    work: Work
    num_computed: int
    is_first: bool  # its first token was said
    finish: str | None  # "length", or "preempted": it does not go on here
    num_left: int = 0  # tokens that were still to be said, of one that was preempted


class Engine(Protocol):
    """What a node does with its sequences; plan_node.py drives it."""

    pool: BlockPool

    def submit(self, work: Work) -> None:
        """Queue a prompt."""

    def adopt(self, work: Work, block_ids: Sequence[int], num_promised: int) -> None:
        """Decode on behind a prompt whose KV came from elsewhere, in a reserved slot; its first token has been said."""

    def release(self, work: Work) -> None:
        """Nobody reads a finished prompt's blocks any more."""

    def admits(self, num_blocks: int, remaining: Sequence[int], granted: Sequence[int]) -> bool:
        """As Scheduler.admits."""

    def reserve_slot(self) -> bool:
        """Keep a slot for an adopt()."""

    def unreserve_slot(self) -> None:
        """Give back what reserve_slot() took."""

    def plan(self) -> Step | None:
        """The next step, or None."""

    def complete(self) -> list[Told]:
        """Read the oldest unread step: first tokens, ends, chunks of prompts."""

    def num_uniform(self) -> int:
        """How many further plans will be the last one again, each row a position on."""

    def skip(self, num_steps: int) -> None:
        """As many complete() and plan(), of those that num_uniform() promised."""

    def ahead(self, keeps_cache: bool = False) -> tuple[int, Shape] | None:
        """How many further plans there will be until a step tells anything, that one's included, if all that are planned tell
        nothing; and the shape of the first, each of the others a position on. None: that is not known.
        `keeps_cache`: until something is evicted, too, for whoever is to hear of that."""

    @property
    def promises_growth(self) -> bool:
        """Whether adopt() wants promises."""

    @property
    def num_preempted(self) -> int:
        """So far."""


def make_scheduler(sizes: Sizes, pool: BlockPool, role: str) -> Scheduler:
    """As a node of this role has it, but that what is said is not offered to the prefix cache: no trace says what it was."""
    config = SchedulerConfig(
        num_slots=sizes.max_num_seqs,
        max_batched_tokens=sizes.max_num_batched_tokens,
        max_model_len=sizes.max_model_len,
        cache_generated=False,
        reserve=sizes.reserve,
        resumes_preempted=role == "mixed",
    )
    return Scheduler(config, pool, KEY_SEED)


class ExactEngine:
    """The product's Scheduler, asked for every step."""

    def __init__(self, sizes: Sizes, role: str) -> None:
        """`role`: "prefill" (prompts end with their first token, and lend), "decode" or "mixed"."""
        self.pool = BlockPool(sizes.num_blocks, sizes.block_size)
        self._lends = role == "prefill"
        self._scheduler = make_scheduler(sizes, self.pool, role)
        self._unread: deque[Plan] = deque()
        self._works: dict[int, Work] = {}
        self._limit: dict[int, int] = {}  # position behind the last that is fed, by request
        self._has_said: set[int] = set()

    def submit(self, work: Work) -> None:
        """See Engine."""
        self._begin(work, work.num_given - 1 + (1 if self._lends else work.num_new))
        self._scheduler.submit(self._spec(work, 0, 1 if self._lends else work.num_new, self._lends))

    def adopt(self, work: Work, block_ids: Sequence[int], num_promised: int) -> None:
        """See Engine."""
        self._begin(work, work.num_given - 1 + work.num_new)
        self._has_said.add(work.request)
        self._scheduler.adopt(self._spec(work, 1, work.num_new - 1, False), block_ids, num_promised)

    def _begin(self, work: Work, limit: int) -> None:
        self._works[work.request], self._limit[work.request] = work, limit
        self._has_said.discard(work.request)

    def _spec(self, work: Work, num_said: int, max_new_tokens: int, lends: bool) -> SequenceSpec:
        num_generated = work.num_given - work.num_prompt + num_said
        token_ids = (*work.token_ids[: work.num_prompt], *[_TOKEN] * num_generated)
        keys = tuple(work.keys)
        return SequenceSpec(
            work.request, token_ids, num_generated, _GREEDY, max_new_tokens, frozenset(), keys, lends=lends
        )

    def release(self, work: Work) -> None:
        """See Engine."""
        self._scheduler.release(work.request)

    def admits(self, num_blocks: int, remaining: Sequence[int], granted: Sequence[int]) -> bool:
        """See Engine."""
        return self._scheduler.admits(num_blocks, remaining, granted)

    def reserve_slot(self) -> bool:
        """See Engine."""
        return self._scheduler.reserve_slots(1)

    def unreserve_slot(self) -> None:
        """Give back what reserve_slot() took."""
        self._scheduler.unreserve_slots(1)

    @property
    def promises_growth(self) -> bool:
        """See Engine."""
        return self._scheduler.promises_growth

    @property
    def num_preempted(self) -> int:
        """See Engine."""
        return self._scheduler.num_preempted

    def plan(self) -> Step | None:
        """See Engine."""
        plan = self._scheduler.plan()
        if plan is None:
            return None
        self._unread.append(plan)
        starts: list[tuple[Work, int]] = []
        sizes = [(len(chunk.token_ids), chunk.start) for chunk in plan.chunks]
        if plan.chunks:
            slots = self._scheduler.snapshot()["slots"]
            assert isinstance(slots, tuple)
            begun = {start.slot for start in plan.starts}
            starts = [(self._works[slots[each.slot]], each.start) for each in plan.chunks if each.slot in begun]
        num_rows, num_positions = len(plan.decodes), int((plan.decodes.positions + 1).sum())
        num_tokens = sum(number for number, _ in sizes)
        shape = Shape(num_rows, num_positions, num_tokens, sum(pairs_of(*each) for each in sizes))
        return Step(shape, tuple(starts))

    def complete(self) -> list[Told]:
        """See Engine."""
        plan = self._unread.popleft()
        rows: list[PrefillChunk | SlotMark] = [*plan.chunks, *plan.marks]
        of_rows = [_TOKEN if chunk.samples else NO_TOKEN for chunk in plan.chunks]
        of_rows += [PREEMPTED_TOKEN_ID] * len(plan.marks)
        result = StepResult(
            plan.step_id,
            np.concatenate((plan.decodes.slots, np.array([row.slot for row in rows], np.int64))),
            np.concatenate((plan.decodes.generations, np.array([row.generation for row in rows], np.int64))),
            np.concatenate((np.full(len(plan.decodes), _TOKEN, np.int64), np.array(of_rows, np.int64))),
            {},
        )
        told: list[Told] = []
        for progress in self._scheduler.complete(result):
            work = self._works[int(str(progress.sequence_id))]
            is_first = progress.token_id is not None and work.request not in self._has_said
            if is_first:
                self._has_said.add(work.request)
            if is_first or progress.finish is not None or self._lends:
                left = self._limit[work.request] - progress.num_computed
                told.append(Told(work, progress.num_computed, is_first, progress.finish, left))
        return told

    def num_uniform(self) -> int:
        """Nothing is skipped."""
        return 0

    def ahead(self, keeps_cache: bool = False) -> None:
        """Nothing is known before it is planned."""
        return

    def skip(self, num_steps: int) -> None:
        """Nothing is skipped."""
        if num_steps:
            raise ValueError("the product's scheduler plans every step")
