"""Who is dispatched next, and where. Pure.

Waiting branches form one queue ordered by arrival; one that was refused keeps its place, and while the head finds no room
nothing behind it is dispatched: capacity is not given to the small at the cost of the large, and refused work is not prefilled
in vain. A branch longer than every node that is left, and one that has failed and rests, is put aside until a node comes or its
time is over: it holds up nobody.

With a head go the other choices of its request that have no tokens yet, as many as its decode node has slots and, were it empty,
blocks for: their KV is the same, and one attempt computes and hands it over for all. Who was refused once goes alone, and needs
less at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from proto.attempt_key import BranchKey
from router.breaker import Breakers
from router.entrance import RouterCoreConfig
from router.keyed_heap import KeyedHeap
from router.nodes import NodeTable
from router.pace import QueuePace
from router.placement import Pair, Placement
from router.requests import LiveBranch


class WaitingBranches:
    """The queue. It decides with what the node table says, and changes nothing there."""

    def __init__(self, nodes: NodeTable, breakers: Breakers, placement: Placement, config: RouterCoreConfig) -> None:
        self._nodes = nodes
        self._breakers = breakers
        self._placement = placement
        self._config = config
        self._branches: dict[BranchKey, LiveBranch] = {}
        self._by_arrival = KeyedHeap[BranchKey]()
        self._aside: dict[BranchKey, None] = {}
        self._pace = QueuePace()

    def __len__(self) -> int:
        return len(self._branches)

    def __iter__(self) -> Iterator[LiveBranch]:
        return iter(self._branches.values())

    def put(self, branch: LiveBranch) -> None:
        """Queue a branch at the place of its arrival."""
        if branch.attempt >= 0 and branch.key not in self._branches:
            self._pace.came_back()
        self._branches[branch.key] = branch
        self._by_arrival.put(branch.key, branch.arrival)

    def discard(self, key: BranchKey) -> None:
        """Take a branch out, if it is here."""
        if self._branches.pop(key, None) is not None:
            self._by_arrival.discard(key)
            self._aside.pop(key, None)

    def recall(self) -> None:
        """Nodes have changed, or somebody has rested: who was put aside takes its place again."""
        while self._aside:
            self.put(self._branches[self._aside.popitem()[0]])

    def take(self, now: float) -> tuple[list[LiveBranch], Pair] | None:
        """Take out the head and who goes with it, and say where; None if there is none or it finds no room."""
        longest = self._nodes.max_total_tokens
        while (first := self._by_arrival.first()) is not None:
            branch = self._branches[first[0]]
            if branch.rests_until <= now and (longest is None or branch.total_tokens <= longest):
                pair = self._find_pair(branch, now)
                if pair is None:
                    self._pace.waits(now)
                    return None
                num_fitting = self._nodes.num_fitting(pair.decode, branch.num_tokens, branch.total_tokens)
                group = [branch, *self._mates(branch)][:num_fitting]
                self._pace.dispatched(len(group), now)
                for each in group:
                    self.discard(each.key)
                return group, pair
            self._by_arrival.discard(branch.key)
            self._aside[branch.key] = None
        self._pace.is_empty()
        return None

    def wait_s(self, now: float) -> float:
        """How long a newcomer would wait for its dispatch, by how fast the queue has moved; 0 where nothing is known."""
        return self._pace.wait_s(len(self._by_arrival), now)

    def _mates(self, head: LiveBranch) -> list[LiveBranch]:
        if not head.can_share:
            return []
        keys = [head.key._replace(choice=choice) for choice in range(head.request.num_choices)]
        waiting = [self._branches[key] for key in keys if key in self._branches and key != head.key]
        return [branch for branch in waiting if branch.can_share]

    def _find_pair(self, branch: LiveBranch, now: float) -> Pair | None:
        broken = self._broken(branch, now)
        last = branch.last_pair
        prefills = self._nodes.prefill_candidates(branch.total_tokens, self._config.max_inflight_prefills)
        return self._placement.choose(
            [each for each in prefills if each.node.name not in broken],
            [each for each in self._nodes.decode_candidates(branch.total_tokens) if each.node.name not in broken],
            kept=last.prefill if last is not None and last.prefill not in branch.held_off else None,
            excluded=[node for node, until in branch.held_off.items() if until > now],
            avoided=branch.held_off,
        )

    def _broken(self, branch: LiveBranch, now: float) -> Collection[str]:
        """The names of nodes that are left alone: without the least bad of them, if nobody else could serve the branch."""
        broken = self._breakers.avoided(now)
        while broken and not self._nodes.can_serve(branch.total_tokens, broken):
            broken = broken[1:]
        return broken
