"""The requests that live, and every way in which one ends. Pure.

A branch ends by itself, with a Finished; a request's error ends all its branches that are left, with one Failed. Either way its
newest attempt is fenced where it may still run, its load is taken off its nodes, and nothing here knows it any more.

Every branch has one timer, the nearest of its deadline and what its phase waits for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from proto import baton_pb2 as pb
from proto.attempt_key import BranchKey
from proto.own_copy import own_copy
from router import events as ev
from router.breaker import Breakers
from router.entrance import RouterCoreConfig
from router.keyed_heap import KeyedHeap
from router.node_state import Session
from router.nodes import NodeTable
from router.phases import AwaitingPrompt, Decoding, MoveUnknown, Moving, Phase, Prefilling, nodes_of
from router.requests import KnownEnd, LiveBranch
from router.retry import STATUS
from router.token_log import Appended
from router.waiting import WaitingBranches


class LiveRequests:
    """Owns every request between Submitted and its end, and what has been decided and not been done yet."""

    def __init__(
        self, nodes: NodeTable, breakers: Breakers, waiting: WaitingBranches, config: RouterCoreConfig
    ) -> None:
        self._nodes = nodes
        self._breakers = breakers
        self._waiting = waiting
        self._config = config
        self._requests: dict[str, dict[int, LiveBranch]] = {}  # request id -> choice -> branch, while it has not ended
        self._timers = KeyedHeap[BranchKey]()  # one instant per branch
        self.actions: list[ev.Action] = []
        self.may_place = False  # room may have appeared since the queue was looked at

    # ---------------------------------------------------------------- who is there

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(self, branches: Sequence[LiveBranch], now: float) -> None:
        """A new request: all its branches wait."""
        for branch in branches:
            branch.short_keys = branches[0].short_keys  # one prompt's
            self._requests.setdefault(branch.key.request_id, {})[branch.key.choice] = branch
            self.enqueue(branch, now)

    def find(self, key: BranchKey) -> LiveBranch | None:
        """The branch, if it has not ended."""
        return self._requests.get(key.request_id, {}).get(key.choice)

    def unscored_at(self, prefill: ev.NodeRef) -> list[LiveBranch]:
        """Branches with a receiver whose prompt's logprobs only this sender has."""
        return [
            branch
            for branches in self._requests.values()
            for branch in branches.values()
            if branch.awaits_prompt_logprobs
            and isinstance(branch.phase, Decoding | AwaitingPrompt)
            and branch.phase.pair.prefill == prefill
        ]

    def has_told(self, request_id: str) -> bool:
        """Whether the request's client has got anything, of any choice."""
        branches = self._requests[request_id].values()
        first = next(iter(branches))
        return len(branches) < first.request.num_choices or any(branch.has_told for branch in branches)

    def snapshot(self) -> Mapping[str, object]:
        """JSON-able state."""
        return {
            "timers": len(self._timers),
            "requests": {
                request_id: [branch.snapshot() for branch in branches.values()]
                for request_id, branches in self._requests.items()
            },
        }

    # ---------------------------------------------------------------- timers

    def set_timer(self, branch: LiveBranch, now: float) -> None:
        """The branch's phase, or what it waits for, has changed."""
        self._timers.put(branch.key, branch.wake_at(now))

    def next_deadline(self) -> float | None:
        """The first timer's instant."""
        first = self._timers.first()
        return None if first is None else first[1]

    def due(self, now: float) -> Iterator[LiveBranch]:
        """Branches whose timer is due, until each has another."""
        while (first := self._timers.first()) is not None and first[1] <= now:
            key = first[0]
            yield self._requests[key.request_id][key.choice]

    # ---------------------------------------------------------------- phases

    def enqueue(self, branch: LiveBranch, now: float) -> None:
        """Put a branch that waits to its place in the queue."""
        self._waiting.put(branch)
        self.set_timer(branch, now)
        self.may_place = True

    def enter(self, branch: LiveBranch, phase: Phase, now: float) -> None:
        """Begin a phase."""
        branch.phase = phase
        self.set_timer(branch, now)

    def leave_prefill(self, branch: LiveBranch, now: float) -> None:
        """The prefill node's part is over: its load is released now, not when the request ends."""
        if branch.pair is not None:
            self._nodes.vacate_prefill(branch.key, branch.pair)
            self._breakers.left(branch.pair.prefill.name, branch.key, now)
        self.may_place = True

    def leave_nodes(self, branch: LiveBranch, now: float) -> None:
        """Nothing of the branch runs any more, or it is fenced."""
        if branch.pair is not None:
            self._nodes.vacate(branch.key, branch.pair)
        if isinstance(branch.phase, Moving | MoveUnknown):
            self._nodes.vacate_decode(branch.key, branch.phase.target.node)
        for ref in nodes_of(branch.phase):
            self._breakers.left(ref.name, branch.key, now)
        self.may_place = True

    # ---------------------------------------------------------------- tokens

    def take_tokens(
        self,
        branch: LiveBranch,
        first_index: int,
        token_ids: Sequence[int],
        logprobs: Sequence[pb.TokenLogprobs],
        now: float,
    ) -> bool:
        """Take tokens into the log and emit the new ones; False if they ended the request instead."""
        result = branch.log.append(first_index, token_ids)
        if not isinstance(result, Appended):
            self.fail(branch, pb.INTERNAL, f"PD Error: {result}", now)
            return False
        fresh = result.token_ids
        if len(fresh) < len(token_ids):
            self.count("repeated_batches")
        if fresh:
            has_logprobs = branch.request.sampling.num_logprobs is not None
            scored = tuple(map(own_copy, logprobs[-len(fresh) :])) if has_logprobs else ()
            request_id, choice = branch.key
            self.actions.append(ev.Emitted(request_id, result.first_index, fresh, choice, scored))
        return True

    # ---------------------------------------------------------------- ends

    def finish_when_scored(self, branch: LiveBranch, reason: str, now: float, num_tokens: int | None = None) -> None:
        """Finish a branch that no node works on any more, now or when its prompt's logprobs are there; one that waits has another
        attempt before it, which brings them."""
        end = branch.known_end = branch.known_end or KnownEnd(reason, num_tokens)
        if not branch.awaits_prompt_logprobs:
            self.finish(branch, end, now)
        elif branch.pair is not None:
            self.leave_nodes(branch, now)
            self.enter(branch, AwaitingPrompt(branch.pair, now + self._config.prompt_logprobs_grace_s), now)

    def stop(self, branch: LiveBranch, num_tokens: int, now: float) -> None:
        """Its text has a stop string there: nobody goes on with it, but who is about to tell its prompt's logprobs."""
        if branch.awaits_prompt_logprobs and isinstance(branch.phase, Prefilling):
            branch.known_end = branch.known_end or KnownEnd("stop", num_tokens)
        else:
            self.cancel(branch, now)
            self.finish_when_scored(branch, "stop", now, num_tokens)

    def finish(self, branch: LiveBranch, end: KnownEnd, now: float) -> None:
        """A branch's one result."""
        request_id, choice = branch.key
        token_ids = branch.log.token_ids[: end.num_tokens]
        self.actions.append(ev.Finished(request_id, end.finish_reason, token_ids, choice))
        self._forget(branch, now)

    def fail(
        self, branch: LiveBranch, code: pb.ErrorCode.ValueType, message: str, now: float, status: int | None = None
    ) -> None:
        """End the branch's request, its other branches included, with one error, everywhere."""
        status = status or STATUS.get(code, 500)
        wait_s = self._config.retry_after_s if status == 503 else None
        self.end(ev.Failed(branch.key.request_id, status, pb.ErrorCode.Name(code), message, wait_s), now)

    def end(self, failed: ev.Failed, now: float) -> None:
        """End a request with this error."""
        self.drop(failed.request_id, now)
        self.actions.append(failed)

    def drop(self, request_id: str, now: float) -> None:
        """Cancel and forget what there is of a request."""
        for branch in list(self._requests.get(request_id, {}).values()):
            self.cancel(branch, now)
            self._forget(branch, now)

    def _forget(self, branch: LiveBranch, now: float) -> None:
        key = branch.key
        self.leave_nodes(branch, now)
        branches = self._requests[key.request_id]
        del branches[key.choice]
        if not branches:
            del self._requests[key.request_id]
        self._waiting.discard(key)
        self._timers.discard(key)

    # ---------------------------------------------------------------- what is sent

    def cancel(self, branch: LiveBranch, now: float) -> None:
        """Fence the newest attempt and all older ones wherever they are; of a branch that waits that has been done."""
        for ref in nodes_of(branch.phase):
            self.cancel_at(ref, branch, now)

    def cancel_at(self, ref: ev.NodeRef, branch: LiveBranch, now: float) -> None:
        """Fence the newest attempt and all older ones at this node."""
        cancel = pb.Cancel(key=branch.fence.to_proto(), ms_left=branch.ms_left(now))
        self.send(ref, pb.RouterMessage(cancel=cancel))

    def send(self, ref: ev.NodeRef, message: pb.RouterMessage) -> None:
        """Send to a node, unless it is lost."""
        node = self._nodes.find(ref)
        if node is not None and node.session is not Session.LOST:
            self.actions.append(ev.ToNode(ref, message))

    def note(
        self,
        branch: LiveBranch,
        what: str,
        attempt: int,
        nodes: Iterable[ev.NodeRef] = (),
        code: str = "",
        why: str = "",
    ) -> None:
        """Tell the branch's timeline, and with `why` the log."""
        names = tuple(node.name for node in nodes)
        self.actions.append(ev.Noted(*branch.key, what, attempt, names, code, why))

    def count(self, name: str, label: str = "") -> None:
        """Raise a counter."""
        self.actions.append(ev.Count(name, label))
