"""One simulated node on a virtual clock: an engine's steps, one that runs and one planned behind it, timed by rates. Pure.

Steps that tell nobody anything are one stretch with one end, that of the first that does; the engine takes them when the stretch
has ended, or when somebody comes in the middle of it (`sync`), and then only those that are over.
Not here: who is sent where (plan_cluster.py).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from bench.plan_door import Door
from bench.plan_engine import STEPS_AHEAD, Engine, Step, Told, Work
from bench.plan_rates import Rates
from router.events import NodeRef


class SimNode:
    """A node of any role. Whoever changes its engine calls `sync` before and `go` behind it, who only looks at it `aim`."""

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
        self.num_cached = 0  # of prompts, which need not be
        self._rates = rates
        self._steps: deque[Step] = deque()  # that are under way: the first one runs
        self._began_at = 0.0
        self._stretch = 0  # steps before the one that ends at `wake_at`, of which nobody hears
        self._seen_at = 0.0
        self._num_used = 0  # blocks, when it was left alone last

    def sync(self, now: float) -> None:
        """Bring the engine to now. `now` is not behind `wake_at`, and never goes back."""
        self._catch_up(now)
        self._count(now)

    def wake(self, now: float) -> list[Told]:
        """What ended at `wake_at`, which is now."""
        self._catch_up(math.inf)
        self._count(now)
        self.num_tokens += self._steps.popleft().shape.num_tokens
        self._began_at = now
        self.num_steps += 1
        return self.engine.complete()

    def _catch_up(self, until: float) -> None:
        """Take those steps of the stretch that have ended by then."""
        left, self._stretch = self._stretch, 0
        while left:
            shape = self._steps[0].shape
            if (number := min(self.engine.num_uniform(), left)) > 1:
                ended = number if until == math.inf else self._rates.steps_within(shape, until - self._began_at, number)
                self._pass(ended)
                left -= ended
                if ended < number:
                    return
                continue
            ends_at = self._began_at + self._rates.step_s(shape)
            if ends_at > until:
                return
            if self.engine.complete() or ((step := self.engine.plan()) is not None and step.starts):
                raise ValueError(f"a step of {self.ref.name} that was to tell nothing did")
            self._steps.popleft()
            if step is not None:
                self._steps.append(step)
            self._began_at = ends_at
            self.num_steps += 1
            left -= 1

    def _pass(self, num_steps: int) -> None:
        """So many steps, all alike, are over."""
        if num_steps:
            self._began_at += self._rates.run_s(self._steps[0].shape, num_steps)
            self.engine.skip(num_steps)
            self.num_steps += num_steps
            self._steps = deque(step._replace(shape=step.shape.after(num_steps)) for step in self._steps)

    def go(self, now: float, on_start: Callable[[SimNode, Work, int], None], keeps_cache: bool) -> None:
        """Plan what can be planned, and say when to wake; `on_start` hears whose first chunk was planned, and what of
        the prompt a cache had."""
        while len(self._steps) < STEPS_AHEAD and (step := self.engine.plan()) is not None:
            if not self._steps:
                self._began_at = now
            self._steps.append(step)
            for work, num_cached in step.starts:
                self.num_cached += num_cached
                on_start(self, work, num_cached)
        self.aim(now, keeps_cache)

    def aim(self, now: float, keeps_cache: bool) -> None:
        """Say when to wake; `keeps_cache`: before anything is evicted, since the router waits for news of it."""
        self._num_used = self._used()
        if not self._steps:
            self.wake_at = None
            return
        ahead = None if self.door is not None and self.door.line else self.engine.ahead(keeps_cache)
        if ahead is None:
            took_s = self._rates.step_s(self._steps[0].shape)
        else:
            number, shape = ahead
            self._stretch = len(self._steps) + number - 1
            took_s = sum(self._rates.step_s(step.shape) for step in self._steps) + self._rates.run_s(shape, number)
        self.wake_at = max(now, self._began_at + took_s)

    def _count(self, now: float) -> None:
        passed = now - self._seen_at
        if passed < 0:
            raise ValueError(f"the clock of {self.ref.name} goes back by {-passed} s")
        if self._steps:
            self.busy_s += passed
        self.used_block_s += passed * (self._num_used + self._used()) / 2
        self._seen_at = now

    def _used(self) -> int:
        counts = self.engine.pool.counts()
        return counts.used + counts.leased
