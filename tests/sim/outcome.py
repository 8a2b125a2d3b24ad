"""Running a scenario to its outcome, and saying what failed in a way that two runs can be compared by."""

from __future__ import annotations

import re
import traceback
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from tests.sim.scenario import Scenario
from tests.sim.trace import Trace
from tests.sim.world import World


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run."""

    scenario: Scenario
    error: str | None  # one line; None: everything held
    where: str  # the end of the traceback, for people
    counters: Mapping[str, int]
    num_events: int
    trace: Trace | None

    @property
    def kind(self) -> str | None:
        """The error without what differs from run to run: names, numbers, lists."""
        return None if self.error is None else re.sub(r"\[.*\]|\b[a-z]*-?\d[\w./#-]*|\d+", "#", self.error)[:80]


def run_scenario(scenario: Scenario, *, is_traced: bool = False) -> Outcome:
    """Run it; whatever goes wrong, in the world or in the code under test, is the outcome's error."""
    trace = Trace() if is_traced else None
    world: World | None = None
    error, where = None, ""
    try:
        world = World(scenario, trace)  # a scenario that the shrinker made may be none at all
        world.run()
    except Exception as problem:  # any exception of the code under test is a finding, and the seed must be told with it
        first_line = (str(problem).splitlines() or [""])[0]
        error = f"{type(problem).__name__}: {first_line}"
        where = "".join(traceback.format_exception(problem, limit=-4))
        if world is not None:
            world.kernel.tell("CHECK", "failed", error)
    kernel = None if world is None else world.kernel
    counters = Counter[str]() if kernel is None else kernel.counters
    return Outcome(scenario, error, where, counters, 0 if kernel is None else kernel.num_events, trace)
