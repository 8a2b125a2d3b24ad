"""What generates here, and what it says to its routers: however a branch began, handed over or computed here. Pure.

    begin -> one batch per router and step -> finish, or a PD Error with all its tokens, behind the last batch

An attempt ends here once, and its fence with it. What gave way to older sequences is either resumed by the scheduler, and nobody
outside notices but for the pause, or ends (SchedulerConfig.resumes_preempted): its PD Error says every token, since the
scheduler tells of it only after the last one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

from connector.fence import FenceFloor
from engine.scheduler import Scheduler
from engine.sequence import Progress
from node import events as ev
from node.identity import NodeIdentity
from node.pd_error import ENDS_WITHOUT_TOKEN, pd_error
from node.sampling import to_logprobs_message
from node.timers import Timers
from node.token_batches import TokenBatches
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey, BranchKey


@dataclass(slots=True)
class RunningBranch:
    """An attempt of one branch, from its Commit, or from its Dispatch to this node, to its end."""

    key: AttemptKey
    router: ev.RouterId
    deadline: float
    token_ids: list[int]  # of the whole completion, those of earlier attempts included
    is_local: bool = False  # its prompt is computed here
    prompt_logprobs: list[pb.TokenLogprobs] = field(default_factory=list)  # not told yet


class RunningBranches:
    """Owned by the decode core; `fence` is shared with it."""

    def __init__(self, identity: NodeIdentity, scheduler: Scheduler, fence: FenceFloor) -> None:
        self._identity = identity
        self._scheduler = scheduler
        self._fence = fence
        self._branches: dict[AttemptKey, RunningBranch] = {}
        self._timers: Timers[AttemptKey] = Timers()
        self.out: list[ev.Action] = []  # the core takes them at the end of its turn

    def __len__(self) -> int:
        return len(self._branches)

    @property
    def num_local(self) -> int:
        """Those whose prompt is computed here."""
        return sum(branch.is_local for branch in self._branches.values())

    def begin(self, branch: RunningBranch) -> None:
        """The scheduler has its sequence, under the same key."""
        self._branches[branch.key] = branch
        self._timers.set(branch.key, branch.deadline)

    # ------------------------------------------------------------ what it says

    def read(self, progress: Iterable[Progress], now: float) -> None:
        """Tell what a step gave; see PartOfCore."""
        batches = TokenBatches(from_receiver=True)
        for item in progress:
            branch = self._branches.get(cast(AttemptKey, item.sequence_id))
            if branch is None:
                continue
            branch.prompt_logprobs += map(to_logprobs_message, item.prompt_logprobs)
            if item.token_id is not None:
                self._say(branch, item.token_id, item, batches)
                if item.finish is not None:
                    self._forget(branch, "finished", now)
            elif item.finish is not None:  # else it was a chunk, of a new prompt or of one that gave way
                self._give_up(branch, *ENDS_WITHOUT_TOKEN[item.finish], now)
        self.out += batches.to_actions()

    def _say(self, branch: RunningBranch, token_id: int, item: Progress, batches: TokenBatches) -> None:
        index = len(branch.token_ids)
        tokens = batches.add(branch.router, branch.key, index, [token_id], item.finish, item.logprobs)
        tokens.prompt_logprobs.extend(branch.prompt_logprobs)
        branch.prompt_logprobs.clear()
        branch.token_ids.append(token_id)

    def _give_up(self, branch: RunningBranch, code: pb.ErrorCode.ValueType, reason: str, now: float) -> None:
        """End a branch with a PD Error behind its last batch."""
        error = pd_error(code, reason, branch.key, self._identity.name, completion_token_ids=branch.token_ids)
        self.out.append(ev.ToRouter(branch.router, pb.NodeMessage(error=error)))
        self._stop(branch, pb.ErrorCode.Name(code), now)

    # ------------------------------------------------------------ ends

    def expire(self, now: float) -> None:
        """Give up whose deadline has passed."""
        for key in self._timers.pop_due(now):
            self._give_up(self._branches[key], pb.DEADLINE, "the request's deadline has passed", now)

    def next_deadline(self) -> float | None:
        """When `expire` has something to do."""
        return self._timers.next()

    def end_older(self, floors: Mapping[BranchKey, int], now: float) -> None:
        """End every attempt below its branch's floor."""
        for branch in [each for key, each in self._branches.items() if key.attempt < floors.get(key.branch, 0)]:
            self._stop(branch, "cancelled", now)

    def end_of_router(self, router: ev.RouterId, now: float) -> None:
        """End all that this router asked for."""
        for branch in [each for each in self._branches.values() if each.router == router]:
            self._stop(branch, "router lost", now)

    def _stop(self, branch: RunningBranch, outcome: str, now: float) -> None:
        """Take it out of the engine; its blocks follow when no launched step uses them."""
        self._scheduler.abort(branch.key)
        self._forget(branch, outcome, now)

    def _forget(self, branch: RunningBranch, outcome: str, now: float) -> None:
        self._fence.end(branch.key, branch.deadline, now)
        del self._branches[branch.key]
        self._timers.set(branch.key, None)
        self.out.append(ev.Ended(branch.key, outcome))
