"""How far a node plans ahead of its runner."""

from __future__ import annotations

from typing import Final

from engine.scheduler import Scheduler
from node.events import RunStep

STEPS_AHEAD: Final = (
    2  # plans given to the runner and not read yet: one runs, the next waits, so that the runner never does
)


def plan_ahead(scheduler: Scheduler, most: int = STEPS_AHEAD) -> list[RunStep]:
    """Every plan that can be made now, where so many may be unread at most."""
    steps: list[RunStep] = []
    while scheduler.steps_in_flight < most and (plan := scheduler.plan()) is not None:
        steps.append(RunStep(plan))
    return steps
