"""The fence floor: per branch, the lowest attempt that this node still accepts.

Everything that names an attempt raises it: Dispatch and Reserve to that attempt (older ones end here), Cancel and Release above
it, also for attempts that never came this far. So a message that was overtaken by its own cancellation is refused however late
it arrives. A floor is kept until the request's deadline; the table is bounded, and when it is full new work is refused (BUSY)
rather than an old floor forgotten.
"""

from __future__ import annotations

from heapq import heappop, heappush

from proto.attempt_key import AttemptKey, BranchKey


class FenceFloor:
    """The floors of all branches that this node heard of and whose deadline has not passed."""

    def __init__(self, max_branches: int) -> None:
        self._max_branches = max_branches
        self._floors: dict[BranchKey, int] = {}
        self._until: dict[BranchKey, float] = {}
        self._expiry: list[tuple[float, BranchKey]] = []  # lazily: an entry counts if it is the branch's current time

    def admits(self, key: AttemptKey) -> bool:
        """Whether this attempt is at or above its branch's floor."""
        return key.attempt >= self._floors.get(key.branch, 0)

    def has_room(self, branch: BranchKey) -> bool:
        """Whether a floor for this branch can be remembered."""
        return branch in self._floors or len(self._floors) < self._max_branches

    def raise_to(self, branch: BranchKey, attempt: int, until: float) -> bool:
        """Accept only `attempt` and newer ones from now on, at least up to the instant `until`; never lowers a floor.

        Returns whether it is remembered; False only if the table is full.
        """
        if not self.has_room(branch):
            return False
        self._floors[branch] = max(attempt, self._floors.get(branch, 0))
        if until > self._until.get(branch, float("-inf")):
            self._until[branch] = until
            heappush(self._expiry, (until, branch))
        return True

    def tick(self, now: float) -> None:
        """Forget the floors whose time has passed."""
        while self._expiry and self._expiry[0][0] <= now:
            until, branch = heappop(self._expiry)
            if self._until.get(branch) == until:
                del self._floors[branch], self._until[branch]

    def next_expiry(self) -> float | None:
        """When tick has something to forget, at the earliest."""
        return self._expiry[0][0] if self._expiry else None

    def __len__(self) -> int:
        return len(self._floors)
