"""Candidates in order, kept as they change: what a policy looks at instead of at every node. Pure.

A Ranking has the nodes of one kind that have room, by name and by load. A node that comes or goes costs O(log n) comparisons; one
whose load has changed is only noted, and takes its new place when the order by load is asked for. (Sorted lists: what is behind a
place moves by one memmove, 8 bytes a node.) Among is what there is to choose from: several rankings, but for some nodes. Who is
left out and would be next is passed over, one by one; they are few.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from itertools import chain
from typing import Final, NamedTuple

from proto.prefill_speed import PrefillSpeed
from router.events import NodeRef

Load = tuple[float, float]  # compared in order; the second breaks ties of the first

SAME_SPEED: Final = PrefillSpeed(1e-4, 1)  # of nodes that have not measured any
NOBODY: Final = NodeRef("", -1)  # before every name
_TRIES: Final = 16  # at drawing a node that meets a condition, before all that do are listed


class Candidate(NamedTuple):
    """A node with room for one more attempt."""

    node: NodeRef
    fingerprint: bytes  # equal bytes: may exchange KV
    load: Load
    speed: PrefillSpeed = SAME_SPEED
    pool: bytes = b""  # identity of the KV pool that it reads, or empty


class Ranking:
    """Nodes that are alike but for their load."""

    __slots__ = ("_by_load", "_here", "_names", "_placed", "_stale", "fingerprint", "look")

    def __init__(self, fingerprint: bytes, look: Callable[[NodeRef], Candidate]) -> None:
        """`look`: the candidate that a node of here is now."""
        self.fingerprint = fingerprint
        self.look = look
        self._here: set[NodeRef] = set()
        self._names: list[NodeRef] = []  # sorted
        self._by_load: list[tuple[Load, NodeRef]] = []  # sorted, as it was before `_stale`
        self._placed: dict[NodeRef, Load] = {}  # what is in `_by_load`
        self._stale: dict[NodeRef, None] = {}  # whose place there is not what it should be, or that should have none

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, ref: NodeRef) -> bool:
        return ref in self._here

    def put(self, ref: NodeRef, has_room: bool) -> None:
        """The node's load or room has changed."""
        if has_room:
            if ref not in self._here:
                self._here.add(ref)
                insort(self._names, ref)
            self._stale[ref] = None
        elif ref in self._here:
            self._here.discard(ref)
            del self._names[bisect_left(self._names, ref)]
            if ref in self._placed:
                self._stale[ref] = None
            else:
                self._stale.pop(ref, None)  # nothing is kept of who has gone, though nobody ask for the order

    @property
    def names(self) -> Sequence[NodeRef]:
        """By name."""
        return self._names

    def by_load(self) -> Sequence[tuple[Load, NodeRef]]:
        """By load, equal ones by name."""
        if len(self._stale) > 4 + len(self._names) // 8:
            self._placed = {ref: self.look(ref).load for ref in self._names}
            self._by_load = sorted((load, ref) for ref, load in self._placed.items())
            self._stale.clear()
        elif self._stale:
            for ref in self._stale:
                self._move(ref)
            self._stale.clear()
        return self._by_load

    def _move(self, ref: NodeRef) -> None:
        if (before := self._placed.pop(ref, None)) is not None:
            del self._by_load[bisect_left(self._by_load, (before, ref))]
        if ref in self._here:
            self._placed[ref] = load = self.look(ref).load
            insort(self._by_load, (load, ref))


class Among:
    """The nodes of some rankings, but for those `without`, that meet a condition."""

    __slots__ = ("_fits", "_rankings", "_without")

    def __init__(
        self,
        rankings: Sequence[Ranking],
        without: Set[NodeRef] = frozenset(),
        fits: Callable[[NodeRef], bool] | None = None,
    ) -> None:
        """`fits`: whether one of them that could be next may be; None: each may."""
        self._rankings = rankings
        self._without = without
        self._fits = fits

    def __contains__(self, ref: NodeRef) -> bool:
        return any(ref in ranking for ranking in self._rankings) and self._may(ref)

    def __iter__(self) -> Iterator[NodeRef]:
        return (ref for ranking in self._rankings for ref in ranking.names if self._may(ref))

    def but(self, nodes: Collection[NodeRef]) -> Among:
        """Without these."""
        return Among(self._rankings, self._without | set(nodes), self._fits) if nodes else self

    def where(self, fits: Callable[[NodeRef], bool]) -> Among:
        """Those of them that meet this condition, and no other."""
        return Among(self._rankings, self._without, fits)

    def of(self, fingerprints: Collection[bytes]) -> Among:
        """Those with one of these."""
        return Among([each for each in self._rankings if each.fingerprint in fingerprints], self._without, self._fits)

    def fingerprints(self) -> set[bytes]:
        """Of all that are here."""
        return {ranking.fingerprint for ranking in self._rankings if self._next(ranking, NOBODY) is not None}

    def look(self, ref: NodeRef) -> Candidate:
        """One that is here. KeyError: it is not."""
        for ranking in self._rankings:
            if ref in ranking:
                return ranking.look(ref)
        raise KeyError(ref)

    # ---------------------------------------------------------------- in turn

    def next_by_name(self, last: NodeRef) -> list[NodeRef]:
        """Of each ranking the next one behind that name, or else its first."""
        found = [self._next(ranking, last) or self._next(ranking, NOBODY) for ranking in self._rankings]
        return [ref for ref in found if ref is not None]

    def next_by_load(self, last: NodeRef) -> list[tuple[Load, NodeRef]]:
        """Of each ranking the lowest load, and of those that have it the next one behind that name, or else the first."""
        found: list[tuple[Load, NodeRef]] = []
        for ranking in self._rankings:
            order = ranking.by_load()
            first = next((index for index in range(len(order)) if self._may(order[index][1])), None)
            if first is None:
                continue
            load, chosen = order[first]
            for index in range(max(bisect_right(order, (load, last)), first), len(order)):
                if order[index][0] != load:
                    break
                if self._may(order[index][1]):
                    chosen = order[index][1]
                    break
            found.append((load, chosen))
        return found

    def walks(self, last: NodeRef) -> Iterator[Iterator[Candidate]]:
        """Of each ranking all, by load, those that have the same in turn behind that name."""
        return (self._walk(ranking, last) for ranking in self._rankings)

    def _walk(self, ranking: Ranking, last: NodeRef) -> Iterator[Candidate]:
        order, start = ranking.by_load(), 0
        while start < len(order):
            load = order[start][0]
            end = bisect_right(order, load, start, key=lambda entry: entry[0])
            middle = bisect_right(order, (load, last), start, end)
            for index in chain(range(middle, end), range(start, middle)):
                if self._may(order[index][1]):
                    yield ranking.look(order[index][1])
            start = end

    def _next(self, ranking: Ranking, last: NodeRef) -> NodeRef | None:
        names = ranking.names
        for index in range(bisect_right(names, last), len(names)):
            if self._may(names[index]):
                return names[index]
        return None

    def _may(self, ref: NodeRef) -> bool:
        return ref not in self._without and (self._fits is None or self._fits(ref))

    # ---------------------------------------------------------------- at random

    def draw(self, below: Callable[[int], int]) -> NodeRef | None:
        """Any of them, each equally likely; `below` draws a number from 0 to its argument - 1. None: there is none."""
        left_out = [
            sorted(bisect_left(each.names, ref) for ref in self._without if ref in each) for each in self._rankings
        ]
        number = sum(map(len, self._rankings)) - sum(map(len, left_out))
        for _ in range(_TRIES if number else 0):
            ref = self._at(below(number), left_out)
            if self._fits is None or self._fits(ref):
                return ref
        fitting = list(self) if number else []
        return fitting[below(len(fitting))] if fitting else None

    def _at(self, index: int, left_out: Sequence[Sequence[int]]) -> NodeRef:
        """The one with this index of those that are not left out; `left_out`: indices, ascending, by ranking."""
        for ranking, skipped in zip(self._rankings, left_out, strict=True):
            number = len(ranking) - len(skipped)
            if index < number:
                for each in skipped:
                    if each > index:
                        break
                    index += 1
                return ranking.names[index]
            index -= number
        raise IndexError(index)
