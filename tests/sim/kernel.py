"""Time and order of the simulated world: one queue of events, one clock, no other source of chance than the seed.

A process (here: something with a clock of its own that can crash or be stopped) does nothing outside `run_on`. So there is one
place at which a dead one does nothing, a stopped one does it later, alarms are set, and the invariants are looked at after every
event.

Chance comes from generators that are named after what they decide about: leaving a request or a fault out of a scenario changes
little of what chance does to the others, and that is what lets the shrinker make progress.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Final

from tests.sim.trace import Trace

FOREVER: Final = float("inf")
_TICK_S: Final = 1e-6  # an alarm rings that much after its instant, so that rounding never makes it early


class Process:
    """A process on a host: a label for the log, a clock that runs at its own rate, and whether it runs at all."""

    def __init__(self, kernel: Kernel, host: str, generation: int, rate: float) -> None:
        """`generation` counts the processes of a host. `rate`: seconds of its clock per second of the world's."""
        self.kernel = kernel
        self.host = host
        self.label = f"{host}.{generation}"
        self.rate = rate
        self.is_alive = True
        self.paused_until = 0.0
        self.checked_deadline: float | None = None  # as the invariants saw it last
        self._offset = kernel.rng(f"clock of {self.label}").uniform(0, 10_000)
        self._alarm_at = FOREVER

    def clock(self) -> float:
        """Seconds of its own monotonic clock."""
        return self._offset + self.rate * self.kernel.now

    def seconds(self, own_seconds: float) -> float:
        """A duration by its clock in the world's seconds."""
        return own_seconds / self.rate

    def next_deadline(self) -> float | None:
        """When on_alarm must be called at the latest, by its own clock."""
        raise NotImplementedError

    def on_alarm(self) -> None:
        """Fire what is due."""
        raise NotImplementedError

    def rearm(self) -> None:
        """Set the alarm for the next deadline; an earlier one that is set already is kept."""
        deadline = self.next_deadline()
        if deadline is None:
            return
        at = max((deadline - self._offset) / self.rate, self.kernel.now) + _TICK_S
        if at < self._alarm_at:
            self._alarm_at = at
            self.kernel.at(at, self._ring, self)

    def _ring(self) -> None:
        if self.kernel.now >= self._alarm_at:
            self._alarm_at = FOREVER
            self.on_alarm()


class Kernel:
    """The event queue."""

    def __init__(self, seed: int, trace: Trace | None, check: Callable[[Process], None]) -> None:
        """`check` is called after everything that a process does."""
        self.seed = seed
        self.now = 0.0
        self.trace = trace
        self.num_events = 0
        self.counters: Counter[str] = Counter()  # what happened, by name: tests want to know
        self._check = check
        self._queue: list[tuple[float, int, Callable[[], object], Process | None]] = []
        self._serial = count()

    def count(self, name: str, amount: int = 1) -> None:
        """It has happened once more, or so often."""
        self.counters[name] += amount

    def tell(self, who: str, what: str, why: str = "") -> None:
        """A line of the log, if there is one."""
        if self.trace is not None:
            self.trace.add(self.now, who, what, why)

    def rng(self, name: str) -> random.Random:
        """A generator of its own for whatever has this name."""
        return random.Random(f"{self.seed}/{name}")

    def at(self, when: float, act: Callable[[], object], process: Process | None = None) -> None:
        """Do it at that instant; equal instants keep the order in which they were given."""
        heappush(self._queue, (when, next(self._serial), act, process))

    def after(self, seconds: float, act: Callable[[], object], process: Process | None = None) -> None:
        """Do it so much later."""
        self.at(self.now + seconds, act, process)

    @property
    def next_at(self) -> float:
        """When the next event is due; FOREVER if there is none."""
        return self._queue[0][0] if self._queue else FOREVER

    def step(self) -> None:
        """Let the next event happen."""
        self.now, _, act, process = heappop(self._queue)
        if process is None:
            act()
        else:
            self.run_on(process, act)

    def run_on(self, process: Process, act: Callable[[], object]) -> None:
        """Let a process do something: now, once it goes on, or never."""
        if not process.is_alive:
            return
        if process.paused_until > self.now:
            self.count("done after a pause")
            self.at(process.paused_until, act, process)
            return
        self.num_events += 1
        act()
        if process.is_alive:
            process.rearm()
            self._check(process)
