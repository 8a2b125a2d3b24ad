"""Who is dispatched next, and where. Pure.

Waiting branches form one queue ordered by arrival; one that was refused keeps its place. Who finds no room has a claim to every
decode node that is large enough for it, and nobody behind is dispatched to those: capacity is not given to the small at the cost
of the large, and refused work is not prefilled in vain. Who fits on a node that nobody before has a claim to overtakes. A branch
longer than every node that is left, and one that has failed and rests, is put aside until a node comes or its time is over: it
holds up nobody. So is one that no node that is left may go on with (heirs.py). After a grace that one is handed up, and one that is
too long, and whose client has got nothing, is turned away.

With a head go the other choices of its request that have no tokens yet, as many as its decode node has slots and, were it empty,
blocks for: their KV is the same, and one attempt computes and hands it over for all. Who was refused once goes alone, and needs
less at once.

How it gets there, by which dispatches are counted:

    handoff         a prefill node computes the prompt, a decode node takes over
    mixed           one node of role mixed does both
    local_short     a decode node computes a prompt of a few tokens in a step that it makes anyway: sooner than any handoff
    local_absent    a decode node computes any prompt, because there is no prefill node
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from itertools import product
from typing import Final, NamedTuple, Protocol

from proto.attempt_key import BranchKey
from router.breaker import Breakers
from router.entrance import RouterCoreConfig
from router.events import NodeRef
from router.heirs import heirs
from router.keyed_heap import KeyedHeap
from router.nodes import Claims, NodeTable
from router.pace import QueuePace
from router.placement import Pair, Placement, Prompt, estimate
from router.ranking import Among
from router.requests import LiveBranch

KINDS: Final = ("handoff", "mixed", "local_short", "local_absent")


_LOOK_AHEAD: Final = 16  # claims that are looked behind: a bound on the cost of a turn
_LOOK_PAST: Final = (
    128  # the same of those who cannot be placed, since somebody before has a claim to all that they could use
)


class Placed(NamedTuple):
    """Branches of one request that are dispatched together."""

    group: Sequence[LiveBranch]
    pair: Pair
    kind: str  # of KINDS
    num_cached: int = 0  # tokens that the pair's first node holds already, as far as is known
    num_pooled: int = 0  # those that it is expected to fetch from the KV pool


class Caches(Protocol):
    """What nodes and KV pools hold of a prompt (cache_map.py)."""

    def prompt(self, branch: LiveBranch) -> Prompt:
        """A branch's."""


class WaitingBranches:
    """The queue. It decides with what the node table says, and changes nothing there."""

    def __init__(
        self,
        nodes: NodeTable,
        breakers: Breakers,
        placement: Placement,
        config: RouterCoreConfig,
        caches: Caches | None = None,
    ) -> None:
        """`caches`: where placement is to know of them."""
        self._caches = caches
        self._nodes = nodes
        self._breakers = breakers
        self._placement = placement
        self._config = config
        self._branches: dict[BranchKey, LiveBranch] = {}
        self._by_arrival = KeyedHeap[BranchKey]()
        self._aside: dict[BranchKey, None] = {}
        self._is_all_claimed = False  # nobody found room, and no decode node was free for anybody else
        self._pace = QueuePace()
        self.orphans: list[LiveBranch] = []  # who has been put aside for a grace, and has a timer to be set

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
        """Nodes have changed: who was put aside takes its place again."""
        while self._aside:
            self.put(self._branches[self._aside.popitem()[0]])

    def recall_one(self, key: BranchKey) -> None:
        """A branch has rested: if it was put aside, it takes its place again."""
        if key in self._aside:
            del self._aside[key]
            self.put(self._branches[key])

    def take(self, now: float) -> Placed | None:
        """Take out the first that finds room and who goes with it, and say where; None if there is none."""
        claimants: list[LiveBranch] = []
        passed: list[LiveBranch] = []
        claimed: dict[bytes, int] = {}
        placed: Placed | None = None
        while placed is None and (first := self._by_arrival.first()) is not None:
            branch = self._branches[first[0]]
            self._by_arrival.discard(branch.key)
            able = self._able(branch, now)
            if branch.rests_until > now or able is None:
                self._aside[branch.key] = None
            elif able and len(passed) < _LOOK_PAST and _is_claimed(branch, able, claimed):
                passed.append(branch)  # somebody before it waits for all that are large enough
            elif (found := self._find_pair(branch, able, claimed, now)) is not None:
                placed = self._placed(branch, *found)
            else:
                claimants.append(branch)
                for each in able if branch.request.pinned is None else ():  # a canary has a claim to nothing
                    claimed[each] = min(claimed.get(each, branch.total_tokens), branch.total_tokens)
                if len(claimants) > _LOOK_AHEAD or not self._nodes.has_unclaimed(claimed):
                    break
        for branch in (*claimants, *passed):
            self._by_arrival.put(branch.key, branch.arrival)
        if placed is None:
            self._is_all_claimed = bool(claimants) and not self._nodes.has_unclaimed(claimed)
        if claimants:
            self._pace.waits(now)
        elif placed is None:
            self._pace.is_empty()
        if placed is not None:
            self._pace.dispatched(len(placed.group), now)
        return placed

    def _placed(self, branch: LiveBranch, pair: Pair, kind: str, num_cached: int, num_pooled: int) -> Placed:
        num_fitting = self._nodes.num_fitting(pair.decode, branch.num_tokens, branch.total_tokens)
        group = [branch, *self._mates(branch)][:num_fitting]
        for each in group:
            self.discard(each.key)
        return Placed(group, pair, kind, num_cached, num_pooled)

    def wait_s(self, now: float) -> float:
        """How long a newcomer would wait for its dispatch, by how fast the queue has moved; 0 where nothing is known.

        Nor where those who wait do so for certain nodes, and others are free for it.
        """
        return self._pace.wait_s(len(self._by_arrival), now) if self._is_all_claimed else 0.0

    def _mates(self, head: LiveBranch) -> list[LiveBranch]:
        if not head.can_share:
            return []
        keys = [head.key._replace(choice=choice) for choice in range(head.request.num_choices)]
        waiting = [self._branches[key] for key in keys if key in self._branches and key != head.key]
        return [branch for branch in waiting if branch.can_share]

    def _able(self, branch: LiveBranch, now: float) -> Set[bytes] | None:
        """Fingerprints of the nodes that may serve the branch; None: those that are left cannot."""
        able, longest = self._nodes.fingerprints, self._nodes.max_total_tokens
        if longest is None:  # whoever comes will be asked
            branch.gives_up_at = None
            return able
        if branch.author is not None:
            same, able = heirs(branch.author, able)
            longest = self._nodes.longest_of(able)
            if branch.total_tokens <= (self._nodes.longest_of(same) or 0):
                able = same
        is_large_enough = branch.total_tokens <= (longest or 0)
        waits_on = branch.author is not None and longest is not None  # who has begun, to its deadline
        if is_large_enough or waits_on:
            branch.gives_up_at = None
        elif branch.gives_up_at is None:
            branch.gives_up_at = now + self._config.no_nodes_grace_s
            self.orphans.append(branch)
        return able if is_large_enough else None

    def _find_pair(
        self, branch: LiveBranch, able: Set[bytes], claimed: Claims, now: float
    ) -> tuple[Pair, str, int, int] | None:
        broken, last = self._broken(branch, able, now), branch.last_pair
        total_tokens, avoided = branch.total_tokens, branch.held_off
        without = broken | {node for node, until in avoided.items() if until > now} if avoided else broken
        if (pinned := branch.request.pinned) is not None:
            pair = self._pinned_pair(pinned, branch, claimed, now)
            return None if pair is None else (pair, "handoff", 0, 0)
        num_tokens, most = branch.num_tokens * (1 + len(self._mates(branch))), self._config.local_prefill_max_tokens
        spare = self._nodes.spare_candidates(total_tokens, without, claimed, num_tokens, most)
        if pair := self._placement.choose_alone(spare.of(able).but(avoided)):  # a shortcut, and no last resort
            return pair, "local_short", 0, 0
        prompt = Prompt(branch.num_tokens, {}) if self._caches is None else self._caches.prompt(branch)
        prefills = self._nodes.prefill_candidates(total_tokens, without, claimed).of(able)
        pair = self._placement.choose(
            prefills,
            self._nodes.decode_candidates(total_tokens, without, claimed),
            prompt=prompt,
            kept=last.prefill if last is not None and last.prefill not in avoided else None,
            avoided=avoided,
        )
        if pair is not None:
            kind = "mixed" if pair.prefill == pair.decode else "handoff"
            return pair, kind, prompt.cached.get(pair.prefill, 0), _num_pooled(prefills, pair.prefill, prompt)
        pair = self._placement.choose_alone(
            self._nodes.stranded_candidates(total_tokens, without, claimed, broken).of(able), avoided
        )
        return None if pair is None else (pair, "local_absent", 0, 0)

    def _pinned_pair(self, names: tuple[str, str], branch: LiveBranch, claimed: Claims, now: float) -> Pair | None:
        """These two nodes, if both have room and may exchange KV, be they left alone for their failures."""
        excluded = {node for node, until in branch.held_off.items() if until > now}
        prefills = self._nodes.prefill_candidates(branch.total_tokens, excluded, claimed)
        decodes = self._nodes.decode_candidates(branch.total_tokens, excluded, claimed)
        for prefill, decode in product(self._nodes.named(names[:1]), self._nodes.named(names[1:])):
            if prefill in prefills and decode in decodes.of((prefills.look(prefill).fingerprint,)):
                return Pair(prefill, decode)
        return None

    def _broken(self, branch: LiveBranch, able: Set[bytes], now: float) -> set[NodeRef]:
        """Nodes that are left alone, but for the least bad ones that it takes to serve the branch at all."""

        def is_served_without(names: Sequence[str]) -> bool:
            return self._nodes.can_serve(branch.total_tokens, self._nodes.named(names), able)

        names = self._breakers.avoided(now)
        if not names or is_served_without(names):
            return self._nodes.named(names)
        alone: list[str] = []
        for name in reversed(names):  # the worst first; one of a role that has others, say, makes no difference
            if is_served_without([name, *alone]):
                alone.append(name)
        return self._nodes.named(alone)


def _is_claimed(branch: LiveBranch, able: Set[bytes], claimed: Claims) -> bool:
    """Whether all nodes that are large enough for it are claimed."""
    return all(each in claimed and claimed[each] <= branch.total_tokens for each in able)


def _num_pooled(candidates: Among, chosen: NodeRef, prompt: Prompt) -> int:
    """Tokens that the node chosen of these is expected to fetch."""
    return estimate(candidates.look(chosen), prompt).num_fetched if prompt.pooled else 0
