"""The fence floor: per branch, the lowest attempt that this node still accepts.

Everything that names an attempt raises it: Dispatch and Reserve to that attempt (older ones end here), Cancel and Release above
it, also for attempts that never came this far, and an attempt's own end. So a message that was overtaken by its own end is
refused however late it arrives.

A floor stands as long as its attempt lives here, and then until its deadline, MAX_REST_S at most: nothing of an ended attempt
is under way for longer, and if it were, its tokens would be refused by the router, which knows the current attempt. The table is
bounded; when it is full new work is refused (BUSY) rather than an old floor forgotten.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Final

from proto.attempt_key import AttemptKey, BranchKey

# How long a floor is kept without a living attempt: until the deadline, but within these.
MIN_REST_S: Final = 10.0
MAX_REST_S: Final = 60.0


class FenceFloor:
    """The floors of all branches that this node heard of lately."""

    def __init__(self, max_branches: int) -> None:
        self._max_branches = max_branches
        self._floors: dict[BranchKey, int] = {}
        self._until: dict[BranchKey, float] = {}
        self._refused: dict[BranchKey, int] = {}  # the last attempt that was, until a newer one begins
        self._expiry: list[tuple[float, BranchKey]] = []  # of each branch one entry counts: the one at _looked_at
        self._looked_at: dict[BranchKey, float] = {}  # never later than _until

    def admits(self, key: AttemptKey) -> bool:
        """Whether this attempt is at or above its branch's floor."""
        return key.attempt >= self._floors.get(key.branch, 0)

    def was_refused(self, key: AttemptKey) -> bool:
        """Whether this attempt was refused here, and nothing is known of a newer one."""
        return self._refused.get(key.branch) == key.attempt == self._floors[key.branch] - 1

    def has_room(self, *branches: BranchKey) -> bool:
        """Whether floors for all these different branches can be remembered."""
        num_new = sum(branch not in self._floors for branch in branches)
        return not num_new or len(self._floors) + num_new <= self._max_branches

    def begin(self, key: AttemptKey, deadline: float) -> bool:
        """An attempt begins here: refuse older ones until it ends, soon after its deadline at the latest. False: no room."""
        branch = key.branch
        if not self.has_room(branch):
            return False
        self._floors[branch] = max(key.attempt, self._floors.get(branch, 0))
        if self._refused.get(branch, key.attempt) < key.attempt:
            del self._refused[branch]
        # One that is being committed, or drained, at its deadline still lives a moment later.
        self._keep(branch, max(deadline + MIN_REST_S, self._until.get(branch, 0.0)))
        return True

    def end(self, key: AttemptKey, deadline: float, now: float) -> bool:
        """This attempt and all older ones have ended, or must never begin: refuse them while anything of them may come.

        False if the table is full.
        """
        branch = key.branch
        if not self.has_room(branch):
            return False
        if key.attempt >= self._floors.get(branch, 0):  # else a newer one lives, or ended after this one
            self._floors[branch] = key.attempt + 1
            self._keep(branch, now + min(max(deadline - now, MIN_REST_S), MAX_REST_S))
        return True

    def refuse(self, key: AttemptKey, deadline: float, now: float) -> None:
        """The same, of an attempt that begins here in vain: whoever asks again for it is told so (`was_refused`)."""
        if self.end(key, deadline, now):
            self._refused[key.branch] = key.attempt

    def _keep(self, branch: BranchKey, until: float) -> None:
        self._until[branch] = until
        if until < self._looked_at.get(branch, float("inf")):
            self._looked_at[branch] = until
            heappush(self._expiry, (until, branch))
            if len(self._expiry) > 2 * len(self._looked_at) + 64:  # most are of ended attempts, and far away
                self._expiry = [(at, each) for each, at in self._looked_at.items()]
                heapify(self._expiry)

    def tick(self, now: float) -> None:
        """Forget the floors whose time has passed."""
        while self._expiry and self._expiry[0][0] <= now:
            at, branch = heappop(self._expiry)
            if self._looked_at.get(branch) != at:
                continue
            del self._looked_at[branch]
            if (until := self._until[branch]) > now:
                self._keep(branch, until)
            else:
                del self._floors[branch], self._until[branch]
                self._refused.pop(branch, None)

    def next_expiry(self) -> float | None:
        """When tick has something to look at."""
        return self._expiry[0][0] if self._expiry else None

    def __len__(self) -> int:
        return len(self._floors)

    @property
    def num_entries(self) -> int:
        """Instants in memory, those that count no more included."""
        return len(self._expiry)
