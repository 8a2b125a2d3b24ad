"""What a node decides about a Dispatch whose target is itself: nothing is handed over, it computes and generates in one go. Pure.

    Dispatch -> a sequence per branch, to its full length -> told as any running branch (decode_node/running.py)

The router hears everything as from the receiver of a handoff, which owns the attempt from its first batch on
(router/ownership.py); there is no other node that could contradict. Branches share their prompt by the prefix cache. Each branch
is here in one attempt at most, the newest. Blocks and slots are the scheduler's business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from connector.fence import FenceFloor
from decode_node.running import RunningBranches
from decode_node.running_branch import RunningBranch
from engine.block_pool import BlockPool
from engine.scheduler import Scheduler
from engine.sequence import SequenceSpec
from node import events as ev
from node.identity import NodeIdentity, NodeLimits
from node.pd_error import refusal
from node.sampling import to_sampling_params
from node.timing import Computed
from proto import baton_pb2 as pb
from proto.attempt_key import AttemptKey
from proto.block_key import block_keys
from proto.own_copy import own_copy


class LocalPrompts:
    """Owned by the decode core, as are `fence` and `running`, which it shares."""

    def __init__(
        self,
        identity: NodeIdentity,
        limits: NodeLimits,
        scheduler: Scheduler,
        pool: BlockPool,
        key_seed: bytes,
        fence: FenceFloor,
        running: RunningBranches,
    ) -> None:
        self._identity = identity
        self._limits = limits
        self._scheduler = scheduler
        self._block_size = pool.block_size
        self._key_seed = key_seed
        self._fence = fence
        self._running = running
        self._is_draining = False
        self._not_begun: deque[tuple[AttemptKey, Computed]] = deque()  # in the order in which the scheduler has them
        self.out: list[ev.Action] = []  # the core takes them at the end of its turn

    def drain(self, now: float) -> None:
        """Take nothing new, and give back what was not begun."""
        self._is_draining = True
        for branch in [each for each in self._running if self._scheduler.is_waiting(each.key)]:
            self._running.give_up(branch, pb.DRAINING, "the node is to end, and has not begun with it", now)

    def start(
        self, router: ev.RouterId, dispatch: pb.Dispatch, is_leased: Callable[[AttemptKey], bool], now: float
    ) -> tuple[AttemptKey, ...]:
        """Start its branches, but for those that have ended, or gone on, before it came, or that came another way.

        Those that it has started: the core ends what is older of them.
        """
        seeds = {
            AttemptKey(dispatch.request_id, each.choice, dispatch.attempt): each.seed for each in dispatch.branches
        }
        fresh = [key for key in seeds if self._is_fresh(key) and not is_leased(key)]
        if len(fresh) < len(seeds):
            self.out.append(ev.Count("stale_refused"))
        generated = tuple(dispatch.branches[0].generated_token_ids)  # one that has any comes alone
        if self._is_draining:
            self.out += refusal(pb.DRAINING, "the node is to end", fresh, router, self._identity.name, generated)
            return ()
        if (lack := self._lack(fresh)) is not None:
            self.out += refusal(pb.BUSY, lack, fresh, router, self._identity.name, generated)
            return ()
        prompt, sampling = tuple(dispatch.prompt_token_ids), own_copy(dispatch.sampling)  # one for all branches
        token_ids = (*prompt, *generated)
        of_blocks = tuple(block_keys(self._key_seed, token_ids, self._block_size))
        deadline = now + dispatch.ms_left / 1000
        for key in fresh:
            self._fence.begin(key, deadline)
            times = Computed(now)
            self._not_begun.append((key, times))
            branch = RunningBranch(
                key=key,
                router=router,
                deadline=deadline,
                prompt_token_ids=prompt,
                sampling=sampling,
                seed=seeds[key],
                token_ids=[*generated],
                first_index=len(generated),
                times=times,
                is_local=True,
            )
            self._running.begin(branch)
            spec = SequenceSpec(
                sequence_id=key,
                token_ids=token_ids,
                num_generated=len(generated),
                sampling=to_sampling_params(sampling, seeds[key]),
                max_new_tokens=sampling.max_tokens - len(generated),
                stop_token_ids=frozenset(sampling.stop_token_ids),
                block_keys=of_blocks,
            )
            self._scheduler.submit(spec)
            self.out.append(ev.Count("local_prefills"))
        return tuple(fresh)

    def settle(self, now: float) -> None:
        """At the end of a turn: note whose first chunk is planned by now, or who ended before."""
        while self._not_begun and not self._scheduler.is_waiting(self._not_begun[0][0]):
            self._not_begun.popleft()[1].begun_at = now

    def _is_fresh(self, key: AttemptKey) -> bool:
        return self._fence.admits(key) and not self._scheduler.knows(key)

    def _lack(self, keys: list[AttemptKey]) -> str | None:
        """Why there is no room for more attempts, in words. As many as there are slots run, and some may wait."""
        most = self._scheduler.num_slots + self._limits.max_attempts
        has_fences = self._fence.has_room(*(key.branch for key in keys))
        if len(self._running) + len(keys) <= most and has_fences:
            return None
        return f"{len(self._running)} branches of {most}, and {len(self._fence)} fences, are here"
