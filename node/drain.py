"""The stages in which a node ends, or takes another role, without a loss: what it has is handed over, and its word arrived. Pure.

    SERVING --asked--> DRAINING --the core has drained--> DELIVERING --all of it arrived--> OVER
       ^                  '------its time is over-----------^   |'---nobody takes it---------^ ^
       |                                                        v another role is to follow    | an end is asked for
       '----------------- the next role is taken up --------- SWITCHING -----------------------'

Asked again meanwhile, the earlier end counts: who has less patience decides, and with none it is over at once. At the deadline the
core itself gives up what is left; it gets CORE_LATE_S to say so. An end wins over a change of role, however far that is; no change
is begun beside an end or another change. A process that ends may leave behind what is not quiet yet, one that goes on may not: it
waits ROLE_LATE_S for that, and what is not quiet by then never will be, a bug (`is_stuck`).

Not here: what draining means for what runs (the cores); signals, calls and the clock (node/ending.py); what a change replaces
(node/incarnation.py).
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum
from typing import Final

from node.roles import RoleName

CORE_LATE_S: Final = 0.5  # behind the deadline, which is a timer of the core's
DELIVERY_S: Final = 2.0  # a session's grace: by then a router has acknowledged, or its session is lost
ROLE_LATE_S: Final = 15.0  # behind it: longer than a lease's life, and than anybody takes to answer a call


class Stage(Enum):
    """How far it is."""

    SERVING = "serving"
    DRAINING = "draining"  # the core hands over what is here
    DELIVERING = "delivering"  # the last words are on their way
    SWITCHING = "switching"  # nothing is here; the next role is about to be taken up
    OVER = "over"


class Answer(Enum):
    """What becomes of the wish for another role."""

    BEGUN = "begun"
    HAS_IT = "the node serves in that role"
    ENDS = "the node is to end"
    CHANGES = "the node is changing its role already"
    UNABLE = "the process was started for its one role, not by `baton prefill`, `baton decode` or `baton mixed`"


class Drain:
    """One node's role, and its end; `now` is an argument everywhere."""

    def __init__(self, role: RoleName, roles: Collection[RoleName]) -> None:
        """`roles`: those that it can take."""
        self.role = role
        self._roles = roles
        self.next_role: RoleName | None = None  # that follows; None: nothing does
        self.stage = Stage.SERVING
        self.deadline = float("inf")
        self.was_cut_short = False  # something was given up
        self.is_stuck = False  # it did not come to rest, and must not go on
        self._deliver_by = float("inf")

    def ask(self, timeout_s: float, now: float) -> None:
        """The node is to end within `timeout_s`; 0: now."""
        self.deadline = min(self.deadline, now + timeout_s)
        self.next_role = None
        if timeout_s <= 0 or self.stage is Stage.SWITCHING:
            self.was_cut_short |= self.stage in (Stage.SERVING, Stage.DRAINING)
            self.stage = Stage.OVER
        elif self.stage is Stage.SERVING:
            self.stage = Stage.DRAINING

    def ask_role(self, role: RoleName, timeout_s: float, now: float) -> Answer:
        """The node is to serve in another role; what is not handed over within `timeout_s` is given up, 0: all of it."""
        if self.stage is not Stage.SERVING:
            return Answer.ENDS if self.next_role is None else Answer.CHANGES
        if role == self.role:
            return Answer.HAS_IT
        if role not in self._roles:
            return Answer.UNABLE
        self.next_role, self.stage, self.deadline = role, Stage.DRAINING, now + timeout_s
        self.was_cut_short = False
        return Answer.BEGUN

    def look(self, has_drained: bool, num_undelivered: int, now: float) -> Stage:
        """How far it is, given whether the core has drained, and how much of what it said has not arrived.

        For another role to follow it has drained when nothing, whosever it is, touches a block of KV any more.
        """
        late_s = CORE_LATE_S if self.next_role is None else ROLE_LATE_S
        if self.stage is Stage.DRAINING and (has_drained or now >= self.deadline + late_s):
            if self.next_role is not None and not has_drained:
                self.is_stuck, self.next_role, self.stage = True, None, Stage.OVER
                return self.stage
            self.stage = Stage.DELIVERING
            self.was_cut_short = now >= self.deadline
            self._deliver_by = now + DELIVERY_S
        if self.stage is Stage.DELIVERING and (num_undelivered == 0 or now >= self._deliver_by):
            self.stage = Stage.OVER if self.next_role is None else Stage.SWITCHING
        return self.stage

    def take_up(self) -> None:
        """The next role begins."""
        assert self.stage is Stage.SWITCHING and self.next_role is not None, f"no role follows while {self.stage.value}"
        self.role, self.next_role = self.next_role, None
        self.stage, self.deadline = Stage.SERVING, float("inf")
