"""What a core asks of its scheduler at the end of a turn: how far a node plans ahead of its runner, what it saves."""

from __future__ import annotations

from typing import Final

from engine.scheduler import Scheduler
from node.events import RunStep, SaveBlocks, TakeOutBlocks

STEPS_AHEAD: Final = (
    2  # plans given to the runner and not read yet: one runs, the next waits, so that the runner never does
)


def plan_ahead(scheduler: Scheduler, most: int = STEPS_AHEAD) -> list[RunStep]:
    """Every plan that can be made now, where so many may be unread at most."""
    steps: list[RunStep] = []
    while scheduler.steps_in_flight < most and (plan := scheduler.plan()) is not None:
        steps.append(RunStep(plan))
    return steps


def saves_of(scheduler: Scheduler) -> list[SaveBlocks | TakeOutBlocks]:
    """What is to be stored by now, or taken out: at the end of every turn, or a core with nothing else to do would never ask."""
    saves: list[SaveBlocks | TakeOutBlocks] = [SaveBlocks(save.save_id, save.blocks) for save in scheduler.take_saves()]
    broken = scheduler.take_broken()
    return [*saves, TakeOutBlocks(broken)] if broken else saves


class StepsAhead:
    """Plans ahead, and remembers whether the scheduler's queue can move."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.is_held_up = False  # the head of the queue found no room in the last plan

    def plan(self) -> list[RunStep]:
        """Every plan that can be made now."""
        steps = plan_ahead(self._scheduler)
        if not self._scheduler.num_waiting:
            self.is_held_up = False
        elif steps:
            self.is_held_up = not steps[-1].plan.chunks  # a step that has a chunk has begun, or goes on with, somebody
        elif self._scheduler.steps_in_flight < STEPS_AHEAD:
            self.is_held_up = True
        return steps
