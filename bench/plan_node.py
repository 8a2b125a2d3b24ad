"""One simulated node on a virtual clock: an engine's steps, one that runs and one planned behind it, timed by rates. Pure.

Where the engine says that its next plans are all alike, their steps are one stretch with one end; who comes in the middle of it
finds the node as it is then (`sync`). Not here: who is sent where (plan_cluster.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from bench.plan_door import Door
from bench.plan_engine import STEPS_AHEAD, Engine, Step, Told, Work
from bench.plan_rates import Rates
from router.events import NodeRef


class SimNode:
    """A node of any role. Whoever changes its engine calls `sync` before and `go` behind it."""

    def __init__(self, ref: NodeRef, role: str, engine: Engine, rates: Rates) -> None:
        self.ref = ref
        self.role = role
        self.engine = engine
        self.door = Door(engine) if role == "decode" else None
        self.link_free_at = 0.0  # when what it has to send is sent
        self.wake_at: float | None = None  # when its step, or its stretch, ends
        self.busy_s = 0.0
        self.used_block_s = 0.0  # blocks in use or leased, times seconds
        self.num_steps = 0
        self.num_tokens = 0  # of prompts, computed
        self._rates = rates
        self._steps: deque[Step] = deque()  # that are under way: the first one runs
        self._began_at = 0.0
        self._stretch = 0  # steps until `wake_at`; 0: one, whose results are read then
        self._seen_at = 0.0

    def sync(self, now: float) -> None:
        """Bring the engine to now. `now` is not behind `wake_at`, and never goes back."""
        self._count(now)
        if self._stretch:
            shape = self._steps[0].shape
            self._pass(self._rates.steps_within(shape, now - self._began_at, self._stretch))
            self._stretch = 0

    def wake(self, now: float) -> list[Told]:
        """What ended at `wake_at`, which is now."""
        self._count(now)
        if self._stretch:
            self._pass(self._stretch)
            self._began_at, self._stretch = now, 0
            return []
        self.num_tokens += self._steps.popleft().shape.num_tokens
        self._began_at = now
        self.num_steps += 1
        return self.engine.complete()

    def _pass(self, num_steps: int) -> None:
        """So many steps of a stretch are over."""
        if num_steps:
            self._began_at += self._rates.run_s(self._steps[0].shape, num_steps)
            self.engine.skip(num_steps)
            self.num_steps += num_steps
            self._steps = deque(step._replace(shape=step.shape.after(num_steps)) for step in self._steps)

    def go(self, now: float, on_start: Callable[[SimNode, Work], None]) -> None:
        """Plan what can be planned, and say when to wake; `on_start` hears whose first chunk was planned."""
        while len(self._steps) < STEPS_AHEAD and (step := self.engine.plan()) is not None:
            if not self._steps:
                self._began_at = now
            self._steps.append(step)
            for work in step.starts:
                on_start(self, work)
        if not self._steps:
            self.wake_at = None
            return
        shape = self._steps[0].shape
        number = 0 if self.door is not None and self.door.line else self.engine.num_uniform()
        if number > 1:
            self._stretch = number
            self.wake_at = max(now, self._began_at + self._rates.run_s(shape, number))
        else:
            self.wake_at = max(now, self._began_at + self._rates.step_s(shape))

    def _count(self, now: float) -> None:
        passed = now - self._seen_at
        if passed < 0:
            raise ValueError(f"the clock of {self.ref.name} goes back by {-passed} s")
        if self._steps:
            self.busy_s += passed
        counts = self.engine.pool.counts()
        self.used_block_s += passed * (counts.used + counts.leased)
        self._seen_at = now
