"""A node's runner in the simulation: the fake runner on the node's memory, plans two deep, steps that take their time.

A step reads and writes KV at some instant between its launch and its result. Until the scheduler has read the result, every block
of the step's sequences must stay theirs, and what the step writes must be theirs (design, section 6).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.block_pool import BlockPool, BlockState
from engine.fake_runner import FakeRunner
from engine.plan import BROKEN_ROW, DecodeRow, Plan, PrefillChunk, SlotMark, StepResult
from engine.scheduler import Scheduler
from proto.attempt_key import AttemptKey
from tests.sim.kernel import Process
from tests.sim.scenario import Knobs

P_EARLY = 0.3  # of a step that touches KV when it is launched; the others do when they end


@dataclass(frozen=True, slots=True)
class Launched:
    """A plan whose result the scheduler has not read, and the blocks that each of its sequences had at its launch."""

    plan: Plan
    blocks: tuple[tuple[Hashable, tuple[int, ...]], ...]


class SimRunner:
    """Takes plans in order; `done` hears each result."""

    def __init__(
        self,
        process: Process,
        parts: tuple[Scheduler, BlockPool, npt.NDArray[np.uint8], FakeRunner],
        knobs: Knobs,
        rng: random.Random,
        done: Callable[[StepResult], None],
        computes: Callable[[AttemptKey, int], None],
    ) -> None:
        """`parts`: scheduler, pool, KV memory and runner. `computes` hears of each token that a decode row feeds, and where."""
        self._process = process
        self._scheduler, self._pool, self._memory, self._runner = parts
        self._knobs = knobs
        self._rng = rng
        self._done = done
        self._computes = computes
        self._plans: deque[Plan] = deque()
        self.unread: deque[Launched] = deque()
        self.breaks_next_row = False

    def submit(self, plan: Plan) -> None:
        """One more plan."""
        slots = self._scheduler.snapshot()["slots"]
        assert isinstance(slots, tuple)
        rows: tuple[DecodeRow | PrefillChunk | SlotMark, ...] = (*plan.decodes, *plan.chunks, *plan.marks)
        owners = [slots[row.slot] for row in rows]
        self.unread.append(Launched(plan, tuple((name, self._scheduler.block_ids(name)) for name in owners)))
        for name, row in zip(owners, plan.decodes, strict=False):
            self._computes(name, row.position)
        self._plans.append(plan)
        assert len(self._plans) <= 2, f"{self._process.label}: more than two plans under way"
        self._process.kernel.count("plans")
        if any(start.branch_seeds for start in plan.starts):
            self._process.kernel.count("plans with several branches")
        if len(self._plans) == 1:
            self._begin()

    def read(self) -> None:
        """The scheduler is about to read the oldest result."""
        self.unread.popleft()

    @property
    def is_idle(self) -> bool:
        """Nothing runs and nothing is unread."""
        return not self._plans and not self.unread

    def _begin(self) -> None:
        result = self._run() if self._rng.random() < P_EARLY else None
        step_s = self._knobs.step_s * self._rng.uniform(0.5, 1.5)
        self._process.kernel.after(step_s, lambda: self._end(result), self._process)

    def _run(self) -> StepResult:
        before = self._memory.copy()
        result = self._runner.run(self._plans[0])
        states = self._pool.snapshot()["states"]
        assert isinstance(states, tuple)
        theirs = {block_id for launched in self.unread for _, block_ids in launched.blocks for block_id in block_ids}
        for block_id in np.flatnonzero((before != self._memory).any(axis=1)):
            assert states[block_id] is BlockState.USED and block_id in theirs, (
                f"{self._process.label}: a step wrote into block {block_id}, which is {states[block_id].value}"
                f"{'' if block_id in theirs else ' and none of its sequences has'}"
            )
        self._process.kernel.count("preempted", len(self._plans[0].marks))
        if self.breaks_next_row and self._plans[0].num_tokens:
            self.breaks_next_row = False
            self._process.kernel.count("broken row")
            first, *others = result
            first = first._replace(token_id=BROKEN_ROW, logprobs=None, branch_tokens=())
            result = StepResult.of(result.step_id, [first, *others])
        return result

    def _end(self, result: StepResult | None) -> None:
        result = self._run() if result is None else result
        self._plans.popleft()
        self._done(result)
        if self._plans:
            self._begin()
