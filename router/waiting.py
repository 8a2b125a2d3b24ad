"""Who is dispatched next, and where. Pure.

Waiting branches form one queue ordered by arrival; one that was refused keeps its place, and while the head finds no room
nothing behind it is dispatched: capacity is not given to the small at the cost of the large, and refused work is not prefilled
in vain. A branch longer than every node that is left is put aside until a node comes: it holds up nobody.
"""

from __future__ import annotations

from proto.attempt_key import BranchKey
from router.entrance import RouterCoreConfig
from router.keyed_heap import KeyedHeap
from router.nodes import NodeTable
from router.placement import Pair, Placement
from router.requests import LiveBranch


class WaitingBranches:
    """The queue. It decides with what the node table says, and changes nothing there."""

    def __init__(self, nodes: NodeTable, placement: Placement, config: RouterCoreConfig) -> None:
        self._nodes = nodes
        self._placement = placement
        self._config = config
        self._branches: dict[BranchKey, LiveBranch] = {}
        self._by_arrival = KeyedHeap[BranchKey]()
        self._aside: dict[BranchKey, None] = {}

    def __len__(self) -> int:
        return len(self._branches)

    def put(self, branch: LiveBranch) -> None:
        """Queue a branch at the place of its arrival."""
        self._branches[branch.key] = branch
        self._by_arrival.put(branch.key, branch.arrival)

    def discard(self, key: BranchKey) -> None:
        """Take a branch out, if it is here."""
        if self._branches.pop(key, None) is not None:
            self._by_arrival.discard(key)
            self._aside.pop(key, None)

    def recall(self) -> None:
        """Nodes have changed: who was put aside takes its place again."""
        while self._aside:
            self.put(self._branches[self._aside.popitem()[0]])

    def take(self, now: float) -> tuple[LiveBranch, Pair] | None:
        """Take out the head and say where it goes; None if there is none or it finds no room."""
        longest = self._nodes.max_total_tokens
        while (first := self._by_arrival.first()) is not None:
            branch = self._branches[first[0]]
            if longest is None or branch.total_tokens <= longest:
                pair = self._find_pair(branch, now)
                if pair is not None:
                    self.discard(branch.key)
                return None if pair is None else (branch, pair)
            self._by_arrival.discard(branch.key)
            self._aside[branch.key] = None
        return None

    def _find_pair(self, branch: LiveBranch, now: float) -> Pair | None:
        return self._placement.choose(
            self._nodes.prefill_candidates(branch.total_tokens, self._config.max_inflight_prefills),
            self._nodes.decode_candidates(branch.total_tokens),
            kept=branch.last_pair.prefill if branch.last_pair is not None else None,
            excluded=[node for node, until in branch.held_off.items() if until > now],
            avoided=branch.held_off,
        )
