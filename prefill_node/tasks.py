"""The attempts on a prefill node, which of their branches are still open, and the fences in front of them. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from connector.fence import FenceFloor
from node.events import Ended, RouterId
from prefill_node.task import PrefillTask, Work
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey, BranchKey


class Tasks:
    """Each branch is open in one attempt at most: the newest one. What has ended is fenced."""

    def __init__(self, max_attempts: int, max_fences: int) -> None:
        self.fence = FenceFloor(max_fences)
        self._max_attempts = max_attempts
        self._tasks: dict[Hashable, PrefillTask] = {}  # by Work.key, an AttemptKey
        self._here: set[AttemptKey] = set()  # of every branch of those, over or not
        self._holders: dict[BranchKey, PrefillTask] = {}  # the one that has the branch open

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[PrefillTask]:
        return iter(self._tasks.values())

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._tasks

    def __getitem__(self, key: AttemptKey) -> PrefillTask:
        return self._tasks[key]

    def get(self, key: Hashable) -> PrefillTask | None:
        """The attempt that goes by this key, however far it is given up."""
        return self._tasks.get(key)

    def of_router(self, router: RouterId) -> list[PrefillTask]:
        """All that came from this router process."""
        return [task for task in self if task.work.router == router]

    def is_stale(self, work: Work) -> bool:
        """Whether this attempt is here already, or a branch of it has ended or gone on elsewhere."""
        return not all(self.fence.admits(key) and key not in self._here for key in work.keys)

    def lack(self, work: Work) -> str | None:
        """Why there is no room for another attempt, in words."""
        if len(self._tasks) < self._max_attempts and self.fence.has_room(*(key.branch for key in work.keys)):
            return None
        return f"{len(self._tasks)} attempts and {len(self.fence)} fences are the most that it keeps"

    def add(self, task: PrefillTask) -> None:
        """Take the attempt; older ones of its branches were ended with `older`."""
        work = task.work
        self._tasks[work.key] = task
        self._here.update(work.keys)
        for key in work.keys:
            self._holders[key.branch] = task

    def older(self, key: AttemptKey) -> tuple[PrefillTask, AttemptKey] | None:
        """The attempt that has the branch of `key` open, and its number there, if it is an older one."""
        task = self._holders.get(key.branch)
        if task is None or task.work.key.attempt >= key.attempt:
            return None
        return task, key._replace(attempt=task.work.key.attempt)

    def close(self, task: PrefillTask, key: AttemptKey, outcome: str) -> None:
        """This node has nothing more to say of the branch."""
        del task.open[key], self._holders[key.branch]
        task.outcomes[key] = outcome

    def close_with(self, task: PrefillTask, error: pb.PDError) -> list[pb.NodeMessage]:
        """The node's last word on every branch that is open: this error, with the tokens of each."""
        messages = []
        for key in tuple(task.open):
            of_branch = pb.PDError()
            of_branch.CopyFrom(error)
            of_branch.key.CopyFrom(key.to_proto())
            of_branch.completion_token_ids[:] = task.completion_token_ids(key)
            messages.append(pb.NodeMessage(error=of_branch))
            self.close(task, key, pb.ErrorCode.Name(error.code))
        return messages

    def forget(self, task: PrefillTask, outcome: str, now: float) -> list[Ended]:
        """Nothing of the attempt is left here; `outcome` is that of the branches still open."""
        for key in tuple(task.open):
            self.close(task, key, outcome)
        del self._tasks[task.work.key]
        self._here.difference_update(task.work.keys)
        for key in task.work.keys:
            self.fence.end(key, task.work.deadline, now)
        return [Ended(key, task.outcomes[key]) for key in task.work.keys]
