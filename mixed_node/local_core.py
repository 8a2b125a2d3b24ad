"""What a node decides about a Dispatch whose target is itself: nothing is handed over, it computes and generates in one go. Pure.

    Dispatch -> a sequence per branch, to its full length -> one batch per router and step -> finish

The router hears everything as from the receiver of a handoff, which owns the attempt from its first batch on
(router/ownership.py); there is no other node that could contradict. Branches share their prompt by the prefix cache. A preempted
sequence is resumed by the scheduler, first in line, with all that it said (SchedulerConfig.resumes_preempted): nobody outside
notices but for the pause.

Each branch is here in one attempt at most, the newest. Blocks and slots are the scheduler's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

from connector.fence import FenceFloor
from engine.scheduler import Scheduler
from engine.sequence import Progress, SequenceSpec
from node import events as ev
from node.identity import NodeIdentity, NodeLimits
from node.pd_error import ENDS_WITHOUT_TOKEN, pd_error, refusal
from node.sampling import to_logprobs_message, to_sampling_params
from node.timers import Timers
from node.token_batches import TokenBatches
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey, BranchKey, attempt_key
from proto.block_key import block_keys


@dataclass(slots=True)
class LocalBranch:
    """An attempt of one branch, from its Dispatch to its end."""

    key: AttemptKey
    router: ev.RouterId
    deadline: float
    token_ids: list[int]  # of the whole completion, those of earlier attempts included
    prompt_logprobs: list[pb.TokenLogprobs] = field(default_factory=list)  # not told yet


class LocalCore:
    """What a mixed node does for itself. One of several cores over its scheduler (PartOfCore)."""

    def __init__(
        self, identity: NodeIdentity, limits: NodeLimits, scheduler: Scheduler, block_size: int, key_seed: bytes
    ) -> None:
        self._identity = identity
        self._limits = limits
        self._scheduler = scheduler
        self._block_size = block_size
        self._key_seed = key_seed
        self._branches: dict[BranchKey, LocalBranch] = {}
        self._fence = FenceFloor(limits.max_fences)
        self._timers: Timers[BranchKey] = Timers()
        self._out: list[ev.Action] = []

    # ------------------------------------------------------------ a part of a core

    def take(self, event: ev.Event, now: float) -> None:
        """See PartOfCore."""
        match event:
            case ev.FromRouter(router, message) if message.WhichOneof("kind") == "dispatch":
                self._dispatch(router, message.dispatch, now)
            case ev.FromRouter(_, message) if message.WhichOneof("kind") == "cancel":
                key = attempt_key(message.cancel.key)
                self._fence.end(key, now + message.cancel.ms_left / 1000, now)
                self._end_older(key._replace(attempt=key.attempt + 1), now)
            case ev.RouterLost(router):
                for branch in [each for each in self._branches.values() if each.router == router]:
                    self._stop(branch, "router lost", now)

    def read(self, progress: Iterable[Progress], now: float) -> None:
        """See PartOfCore."""
        batches = TokenBatches(from_receiver=True)
        for item in progress:
            key = cast(AttemptKey, item.sequence_id)
            branch = self._branches.get(key.branch)
            if branch is None or branch.key != key:
                continue
            branch.prompt_logprobs += map(to_logprobs_message, item.prompt_logprobs)
            if item.token_id is not None:
                self._say(branch, item.token_id, item, batches)
                if item.finish is not None:
                    self._forget(branch, "finished", now)
            elif item.finish is not None:
                self._give_up(branch, *ENDS_WITHOUT_TOKEN[item.finish], now)
        self._out += batches.to_actions()

    def expire(self, now: float) -> None:
        """See PartOfCore."""
        self._fence.tick(now)
        for branch_key in self._timers.pop_due(now):
            self._give_up(self._branches[branch_key], pb.DEADLINE, "the request's deadline has passed", now)

    def settle(self, now: float) -> list[ev.Action]:
        """See PartOfCore."""
        out, self._out = self._out, []
        return out

    def next_deadline(self) -> float | None:
        """See NodeCore."""
        times = (self._timers.next(), self._fence.next_expiry())
        return min((at for at in times if at is not None), default=None)

    def snapshot(self) -> Mapping[str, object]:
        """See NodeCore."""
        return {"local_branches": len(self._branches), "fences": len(self._fence)}

    # ------------------------------------------------------------ a branch begins

    def _dispatch(self, router: ev.RouterId, dispatch: pb.Dispatch, now: float) -> None:
        """Start its branches, but for those that have ended, or gone on, before it came."""
        seeds = {
            AttemptKey(dispatch.request_id, each.choice, dispatch.attempt): each.seed for each in dispatch.branches
        }
        fresh = [key for key in seeds if self._is_fresh(key)]
        if len(fresh) < len(seeds):
            self._out.append(ev.Count("stale_refused"))
        generated = tuple(dispatch.branches[0].generated_token_ids)  # one that has any comes alone
        if (lack := self._lack(fresh)) is not None:
            self._out += refusal(pb.BUSY, lack, fresh, router, self._identity.name, generated)
            return
        token_ids = (*dispatch.prompt_token_ids, *generated)
        of_blocks = tuple(block_keys(self._key_seed, token_ids, self._block_size))
        deadline = now + dispatch.ms_left / 1000
        for key in fresh:
            self._fence.begin(key, deadline)
            self._end_older(key, now)
            self._branches[key.branch] = LocalBranch(key, router, deadline, [*generated])
            self._timers.set(key.branch, deadline)
            spec = SequenceSpec(
                sequence_id=key,
                token_ids=token_ids,
                num_generated=len(generated),
                sampling=to_sampling_params(dispatch.sampling, seeds[key]),
                max_new_tokens=dispatch.sampling.max_tokens - len(generated),
                stop_token_ids=frozenset(dispatch.sampling.stop_token_ids),
                block_keys=of_blocks,
            )
            self._scheduler.submit(spec)

    def _is_fresh(self, key: AttemptKey) -> bool:
        branch = self._branches.get(key.branch)
        is_here = self._scheduler.knows(key) or (branch is not None and branch.key == key)
        return self._fence.admits(key) and not is_here

    def _lack(self, keys: list[AttemptKey]) -> str | None:
        """Why there is no room for more attempts, in words. As many as there are slots run, and some may wait."""
        most = self._scheduler.num_slots + self._limits.max_attempts
        has_fences = self._fence.has_room(*(key.branch for key in keys))
        if len(self._branches) + len(keys) <= most and has_fences:
            return None
        return f"{len(self._branches)} branches of {most}, and {len(self._fence)} fences, are here"

    # ------------------------------------------------------------ what it says

    def _say(self, branch: LocalBranch, token_id: int, item: Progress, batches: TokenBatches) -> None:
        index = len(branch.token_ids)
        tokens = batches.add(branch.router, branch.key, index, [token_id], item.finish, item.logprobs)
        tokens.prompt_logprobs.extend(branch.prompt_logprobs)
        branch.prompt_logprobs.clear()
        branch.token_ids.append(token_id)

    def _give_up(self, branch: LocalBranch, code: pb.ErrorCode.ValueType, reason: str, now: float) -> None:
        """End a branch with a PD Error behind its last batch."""
        error = pd_error(code, reason, branch.key, self._identity.name, completion_token_ids=branch.token_ids)
        self._out.append(ev.ToRouter(branch.router, pb.NodeMessage(error=error)))
        self._stop(branch, pb.ErrorCode.Name(code), now)

    # ------------------------------------------------------------ a branch ends

    def _end_older(self, key: AttemptKey, now: float) -> None:
        branch = self._branches.get(key.branch)
        if branch is not None and branch.key.attempt < key.attempt:
            self._stop(branch, "cancelled", now)

    def _stop(self, branch: LocalBranch, outcome: str, now: float) -> None:
        """Take it out of the engine; its blocks follow when no launched step uses them."""
        self._scheduler.abort(branch.key)
        self._forget(branch, outcome, now)

    def _forget(self, branch: LocalBranch, outcome: str, now: float) -> None:
        self._fence.end(branch.key, branch.deadline, now)
        del self._branches[branch.key.branch]
        self._timers.set(branch.key.branch, None)
        self._out.append(ev.Ended(branch.key, outcome))
