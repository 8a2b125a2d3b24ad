"""What generates here, and what it says to its routers: however a branch began, handed over or computed here. Pure.

    begin -> one batch per router and step -> finish, or a PD Error with all its tokens, behind the last batch

An attempt ends here once, and its fence with it. What gave way to older sequences is either resumed by the scheduler, and nobody
outside notices but for the pause, or goes to another node or ends (SchedulerConfig.resumes_preempted): its PD Error says every
token, since the scheduler tells of it only after the last one. How it goes to another node: decode_node/mover.py.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping

from connector.fence import FenceFloor
from decode_node.draining import Draining
from decode_node.mover import Mover, Outcome, Verdict
from decode_node.running_branch import RunningBranch
from engine.sequence import Progress, Progresses
from node import events as ev
from node.identity import NodeIdentity
from node.pd_error import ENDS_WITHOUT_TOKEN, TOO_LATE, pd_error
from node.sampling import to_logprobs_message
from node.timers import Timers, earliest
from node.token_batches import TokenBatches
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey, BranchKey
from proto.own_copy import own_copy


class RunningBranches:
    """Owned by the decode core; `fence` is shared with it."""

    def __init__(self, identity: NodeIdentity, fence: FenceFloor, mover: Mover) -> None:
        self._identity = identity
        self._fence = fence
        self._mover = mover
        self._draining = Draining(mover)
        self._branches: dict[Hashable, RunningBranch] = {}  # by AttemptKey
        self._timers: Timers[AttemptKey] = Timers()
        self.out = mover.out  # the core takes them at the end of its turn

    def __len__(self) -> int:
        return len(self._branches)

    @property
    def num_local(self) -> int:
        """Those whose prompt is computed here."""
        return sum(branch.is_local for branch in self._branches.values())

    def __iter__(self) -> Iterator[RunningBranch]:
        return iter(self._branches.values())

    def snapshot(self) -> Mapping[str, object]:
        """How many, and how far those are that move."""
        return {
            "branches": len(self) - self.num_local,
            "local_branches": self.num_local,
            "branches_moving": self._mover.states(),
        }

    def begin(self, branch: RunningBranch) -> None:
        """The scheduler has its sequence, under the same key."""
        self._branches[branch.key] = branch
        self._timers.set(branch.key, branch.deadline)

    # ------------------------------------------------------------ what it says

    def read(self, progress: Progresses, now: float) -> None:
        """Tell what a step gave; see PartOfCore."""
        batches, stopped = TokenBatches(from_receiver=True), list[tuple[RunningBranch, str]]()
        for sequence_id, _, token_id in progress.plain():
            branch = self._branches.get(sequence_id)
            if branch is None:
                continue
            if branch.times is None and not branch.prompt_logprobs:  # nearly always
                batches.add_one(branch.router, branch.key, len(branch.token_ids), token_id)
                branch.token_ids.append(token_id)
            else:
                self._say(branch, token_id, batches, now)
        for item in progress.others:
            branch = self._branches.get(item.sequence_id)
            if branch is None:
                continue
            branch.prompt_logprobs += map(to_logprobs_message, item.prompt_logprobs)
            if item.token_id is not None:
                self._say(branch, item.token_id, batches, now, item)
                if item.finish is not None:
                    self._mover.ended(branch.key, now)
                    self._forget(branch, "finished", now)
            elif item.finish is not None:  # else it was a chunk, of a new prompt or of one that gave way
                stopped.append((branch, item.finish))
        self.out += batches.to_actions()
        for branch, finish in stopped:
            match finish:
                case "paused":
                    self._obey(self._mover.stopped(branch.key, now), now)
                case "preempted":
                    self._obey(self._mover.gave_way(branch, now), now)
                case _:
                    self.give_up(branch, *ENDS_WITHOUT_TOKEN[finish], now)
        self._mover.look(now)

    def _say(
        self, branch: RunningBranch, token_id: int, batches: TokenBatches, now: float, more: Progress | None = None
    ) -> None:
        """One more token; `more`: what else the step gave, where it gave anything."""
        finish, logprobs, num_cached = None, None, 0
        if more is not None:
            finish, logprobs, num_cached = more.finish, more.logprobs, more.num_cached
        scored = branch.prompt_logprobs
        tokens = batches.add(branch.router, branch.key, len(branch.token_ids), (token_id,), finish, logprobs, scored)
        branch.token_ids.append(token_id)
        if logprobs is not None:
            branch.logprobs.extend(map(own_copy, tokens.logprobs))
        if scored:
            branch.prompt_logprobs.clear()
        if branch.times is not None:
            timing, goes_on = branch.times.next_token(branch.key, now, num_cached)
            batches.time(timing)
            branch.times = branch.times if goes_on else None

    def give_up(self, branch: RunningBranch, code: pb.ErrorCode.ValueType, reason: str, now: float) -> None:
        """End a branch with a PD Error behind its last batch; if its Commit is under way the error says so."""
        self._report(branch, code, reason, is_sent=self._mover.is_sent(branch.key))
        self._stop(branch, pb.ErrorCode.Name(code), now)

    def _report(self, branch: RunningBranch, code: pb.ErrorCode.ValueType, reason: str, *, is_sent: bool) -> None:
        known = branch.token_ids
        error = pd_error(
            code, reason, branch.key, self._identity.name, completion_token_ids=known, commit_unanswered=is_sent
        )
        self.out.append(ev.ToRouter(branch.router, pb.NodeMessage(error=error)))

    # ------------------------------------------------------------ moves

    def take(self, event: ev.Event, now: float) -> None:
        """What a target, or a link to one, has said."""
        self._obey(self._mover.take(event, now), now)

    def move(self, message: pb.Move, now: float) -> None:
        """The router names a target, or says that there is none."""
        self._obey(self._mover.answer(message, now), now)

    def _obey(self, verdicts: Iterable[Verdict], now: float) -> None:
        """What does not go on here is told, and forgotten."""
        for branch, outcome in verdicts:
            match outcome:
                case Outcome.MOVED:
                    self._forget(branch, "moved", now)
                case Outcome.UNANSWERED:
                    self._report(branch, pb.TRANSFER_FAILED, "the move's Commit was not answered", is_sent=True)
                    self._forget(branch, "TRANSFER_FAILED", now)
                case Outcome.PREEMPTED:
                    self._report(branch, *ENDS_WITHOUT_TOKEN["preempted"], is_sent=False)
                    self._forget(branch, "PREEMPTED", now)

    def drain(self, deadline: float) -> None:
        """Have everything move, and be done by then."""
        self._draining.begin(deadline)

    def settle(self, now: float) -> None:
        """At the end of a turn: ask for targets while the node drains, and give up what is left when its time is over."""
        if self._draining.is_over(now):
            for branch in list(self._branches.values()):
                self.give_up(branch, pb.DRAINING, "no other node took it before this one had to end", now)
        self._draining.ask(self._branches.values(), now)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing runs here, and nothing that ran has a link or an answer outstanding."""
        return not self._branches and self._mover.is_quiet

    # ------------------------------------------------------------ ends

    def expire(self, now: float) -> None:
        """Give up whose deadline has passed; of what may be another node's, that one says so."""
        for key in self._timers.pop_due(now):
            branch = self._branches[key]
            if self._mover.is_sent(key):
                self._stop(branch, "DEADLINE", now)
            else:
                self.give_up(branch, pb.DEADLINE, TOO_LATE, now)
        self._obey(self._mover.expire(now), now)

    def next_deadline(self) -> float | None:
        """When `expire` or `settle` has something to do."""
        return earliest(self._timers.next(), self._mover.next_deadline(), self._draining.next_deadline())

    def end_older(self, floors: Mapping[BranchKey, int], now: float) -> None:
        """End every attempt below its branch's floor."""
        for branch in [each for each in self if each.key.attempt < floors.get(each.key.branch, 0)]:
            self._stop(branch, "cancelled", now)

    def end_of_router(self, router: ev.RouterId, now: float) -> None:
        """End all that this router asked for."""
        for branch in [each for each in self._branches.values() if each.router == router]:
            self._stop(branch, "router lost", now)

    def _stop(self, branch: RunningBranch, outcome: str, now: float) -> None:
        """Take it out of the engine; its blocks follow when no launched step uses them."""
        self._mover.stop(branch.key, now)
        self._forget(branch, outcome, now)

    def _forget(self, branch: RunningBranch, outcome: str, now: float) -> None:
        self._fence.end(branch.key, branch.deadline, now)
        del self._branches[branch.key]
        self._timers.set(branch.key, None)
        self.out.append(ev.Ended(branch.key, outcome))
