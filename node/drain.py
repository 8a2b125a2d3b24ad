"""The stages in which a node ends without a loss: what it has is handed over, what it said has arrived, then it goes. Pure.

    SERVING --asked--> DRAINING --the core has drained--> DELIVERING --all of it arrived--> OVER
                          '------its time is over-----------^   '----nobody takes it---------^

Asked again meanwhile, the earlier end counts: who has less patience decides, and with none it is over at once. At the deadline the
core itself gives up what is left; it gets CORE_LATE_S to say so. Not here: what draining means for what runs (the cores);
signals, calls and the clock (node/ending.py).
"""

from __future__ import annotations

from enum import Enum
from typing import Final

CORE_LATE_S: Final = 0.5  # behind the deadline, which is a timer of the core's
DELIVERY_S: Final = 2.0  # a session's grace: by then a router has acknowledged, or its session is lost


class Stage(Enum):
    """How far the end is."""

    SERVING = "serving"
    DRAINING = "draining"  # the core hands over what is here
    DELIVERING = "delivering"  # the last words are on their way
    OVER = "over"


class Drain:
    """One node's end; `now` is an argument everywhere."""

    def __init__(self) -> None:
        self.stage = Stage.SERVING
        self.deadline = float("inf")
        self.was_cut_short = False  # something was given up
        self._deliver_by = float("inf")

    def ask(self, timeout_s: float, now: float) -> None:
        """The node is to end within `timeout_s`; 0: now."""
        self.deadline = min(self.deadline, now + timeout_s)
        if timeout_s <= 0:
            self.was_cut_short |= self.stage in (Stage.SERVING, Stage.DRAINING)
            self.stage = Stage.OVER
        elif self.stage is Stage.SERVING:
            self.stage = Stage.DRAINING

    def look(self, has_drained: bool, num_undelivered: int, now: float) -> Stage:
        """How far it is, given whether the core has drained, and how much of what it said has not arrived."""
        if self.stage is Stage.DRAINING and (has_drained or now >= self.deadline + CORE_LATE_S):
            self.stage = Stage.DELIVERING
            self.was_cut_short = now >= self.deadline
            self._deliver_by = now + DELIVERY_S
        if self.stage is Stage.DELIVERING and (num_undelivered == 0 or now >= self._deliver_by):
            self.stage = Stage.OVER
        return self.stage
