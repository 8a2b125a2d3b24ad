"""Which prefill node and which decode node an attempt runs on. Pure: candidates in, pair out.

A policy chooses among the nodes of one role; Placement pairs the roles: only nodes with equal fingerprints exchange KV, so a
prefill node is a candidate only together with a decode node that can take its blocks. Candidates arrive filtered
(listed, session up, room left) and in order (ranking.py), so that nobody looks at all of them; who may not be used, or only as a
last resort, is said by identity. `choose` is total: it returns a pair whenever one is allowed.

`least_loaded`, the default for decode nodes: on a prefill node load is the number of prompt tokens still to be computed,
because prompts differ a hundredfold and a count of requests says little; on a decode node it is the share of its sequences
in use. A mixed node is a candidate for both, and decodes what it prefills where it can; of equal prompts it has the less
the less it decodes. Nodes with equal load take turns, so an idle cluster spreads its work instead of warming one pair.
`power_of_two` takes the less loaded of two nodes drawn at random: with several routers, which see each other's work
late, it keeps them from all choosing the same node. `round_robin` and `random` ignore load. What is drawn follows from
the seed given, so equal events place equally.

`cache_aware`, of prefill nodes only and their default, takes the node on which the first token would be there first: the
tokens queued there and those of the prompt that it does not hold are computed before, at its own rate (rates.py), or
fetched from its KV pool where the node itself would do that (proto/prefill_speed.py). A node whose queue is too long for
that estimate to be trusted (`Imbalance`) is left out, whatever it holds; so the work of a prefix that everybody shares
spreads. It looks at the nodes that hold most of the prompt and, of each ranking, at those with the shortest queues, until no other
can be sooner: at the first one where all others hold as much, or nothing. At all of them it looks where a KV pool has something of
the prompt, since with a fetch the time does not grow with the queue alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import log
from typing import Final, Protocol

from proto.prefill_speed import Expected, expected
from router.events import NodeRef
from router.ranking import NOBODY, Among, Candidate, Load

_MASK: Final = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Pair:
    """Where an attempt runs."""

    prefill: NodeRef
    decode: NodeRef

    @property
    def nodes(self) -> tuple[NodeRef, ...]:
        """Each once: one node may be both."""
        return tuple(dict.fromkeys((self.prefill, self.decode)))


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is to be placed."""

    num_tokens: int
    cached: Mapping[NodeRef, int]  # tokens of it that a node holds already, where it holds any
    pooled: Mapping[tuple[bytes, bytes], int] = field(default_factory=dict)  # the same of KV pools, by fingerprint
    holders: Collection[NodeRef] | None = None  # few that hold more of it than all others; None: all of `cached`
    most_of_others: int = 0  # tokens that any other holds, at most


ANY_PROMPT: Final = Prompt(0, {})


@dataclass(frozen=True, slots=True)
class Imbalance:
    """How much longer than the shortest a node's queue may be before what it holds counts no more: the larger of both."""

    num_tokens: int = 8192
    ratio: float = 2.0


class Policy(Protocol):
    """Chooses among the nodes of one role."""

    def choose(self, among: Among, prompt: Prompt = ANY_PROMPT) -> NodeRef | None:
        """One of them; None where there is none. Of nodes of one ranking only load, and what is known of the prompt, may decide."""


class RoundRobin:
    """Each node in turn, in the order of names; a node that joins or leaves shifts nobody else's turn."""

    def __init__(self) -> None:
        self.last = NOBODY

    def choose(self, among: Among, prompt: Prompt = ANY_PROMPT) -> NodeRef | None:
        """The next candidate behind the one chosen last."""
        return self.turn(among.next_by_name(self.last))

    def turn(self, refs: Collection[NodeRef]) -> NodeRef | None:
        """The next of these; now it is the last."""
        chosen = min(refs, key=lambda ref: (ref <= self.last, ref), default=None)
        if chosen is not None:
            self.last = chosen
        return chosen


class LeastLoaded:
    """The node with the lowest load; among equals, each in turn."""

    def __init__(self) -> None:
        self._among_equals = RoundRobin()

    def choose(self, among: Among, prompt: Prompt = ANY_PROMPT) -> NodeRef | None:
        """A candidate that no other undercuts."""
        found = among.next_by_load(self._among_equals.last)
        lowest = min(found, default=None)
        return None if lowest is None else self._among_equals.turn([ref for load, ref in found if load == lowest[0]])


class Draw:
    """Numbers that follow from a seed (SplitMix64): the standard library's generator is no part of what decides."""

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def below(self, bound: int) -> int:
        """The next number from 0 to bound - 1; uneven by less than bound / 2**64."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((mixed ^ (mixed >> 31)) * bound) >> 64


class Random:
    """Any node, each equally likely."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw

    def choose(self, among: Among, prompt: Prompt = ANY_PROMPT) -> NodeRef | None:
        """A candidate drawn."""
        return among.draw(self._draw.below)


class PowerOfTwo:
    """The less loaded of two different nodes drawn at random; of equals the one drawn first."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw

    def choose(self, among: Among, prompt: Prompt = ANY_PROMPT) -> NodeRef | None:
        """A candidate drawn, unless the second one drawn undercuts it."""
        first = among.draw(self._draw.below)
        second = None if first is None else among.but([first]).draw(self._draw.below)
        drawn = [ref for ref in (first, second) if ref is not None]
        return min(drawn, key=lambda ref: among.look(ref).load, default=None)


def estimate(candidate: Candidate, prompt: Prompt) -> Expected:
    """When a node would have computed a prompt: behind what is queued there, by what it and its KV pool hold."""
    cached = prompt.cached.get(candidate.node, 0)
    pooled = prompt.pooled.get((candidate.pool, candidate.fingerprint), 0) if candidate.pool else 0
    return expected(candidate.speed, int(candidate.load[0]), prompt.num_tokens - cached, max(pooled - cached, 0))


class CacheAware:
    """The node with the shortest time to the first token; among equals as by load."""

    def __init__(self, imbalance: Imbalance) -> None:
        self._imbalance = imbalance
        self._among_equals = RoundRobin()

    def choose(self, among: Among, prompt: Prompt = ANY_PROMPT) -> NodeRef | None:
        """A candidate whose queue is not too long, and that no other such undercuts."""
        first = among.next_by_load(self._among_equals.last)
        shortest = min((load[0] for load, _ in first), default=0.0)
        longest = max(shortest + self._imbalance.num_tokens, shortest * self._imbalance.ratio)
        holders = prompt.cached if prompt.holders is None else prompt.holders
        looked_at = [among.look(ref) for ref in (among if prompt.pooled else holders) if ref in among]
        costs = [(_cost(each, prompt), each.node) for each in looked_at if each.load[0] <= longest]
        if not prompt.pooled:
            for candidates in among.walks(self._among_equals.last):
                costs += _soonest(candidates, prompt, longest, min(costs, default=None))
        lowest = min(costs, default=None)
        return None if lowest is None else self._among_equals.turn([ref for cost, ref in costs if cost == lowest[0]])


def _soonest(
    candidates: Iterable[Candidate], prompt: Prompt, longest: float, best: tuple[Load, NodeRef] | None
) -> list[tuple[Load, NodeRef]]:
    """Costs of those that may be sooner than the best so far, or as soon; of a ranking, by load, equals in turn."""
    costs: list[tuple[Load, NodeRef]] = []
    num_uncached = prompt.num_tokens - prompt.most_of_others
    for each in candidates:
        bound = each.speed.token_s * (int(each.load[0]) + num_uncached), each.load[1]
        if each.load[0] > longest or (best is not None and bound > best[0]):
            break  # and so are all behind it
        costs.append((_cost(each, prompt), each.node))
        best = min(costs[-1], best or costs[-1])
        if costs[-1][0] == bound:
            break  # those behind it are no sooner, and those as soon are behind it in turn, too
    return costs


def _cost(candidate: Candidate, prompt: Prompt) -> Load:
    soon = estimate(candidate, prompt)
    return _rounded(soon.seconds) if soon.num_fetched else soon.seconds, candidate.load[1]


def _rounded(seconds: float) -> float:
    """To a tenth or so: what nodes measured of one pool differs by more, and who seems a little faster must not get all."""
    return float(1.2 ** round(log(max(seconds, 1e-9), 1.2)))


CACHE_AWARE: Final = "cache_aware"
POLICIES: Final[Mapping[str, Callable[[Draw], Policy]]] = {
    "least_loaded": lambda draw: LeastLoaded(),
    "power_of_two": PowerOfTwo,
    "random": Random,
    "round_robin": lambda draw: RoundRobin(),
}


class Placement:
    """One policy per role."""

    def __init__(
        self,
        prefill: str = "least_loaded",
        decode: str = "least_loaded",
        seed: int = 0,
        imbalance: Imbalance | None = None,
    ) -> None:
        draw = Draw(seed)
        by_cache = CacheAware(imbalance or Imbalance())
        self._prefill: Policy = by_cache if prefill == CACHE_AWARE else POLICIES[prefill](draw)
        self._decode = POLICIES[decode](draw)

    def choose(
        self,
        prefills: Among,
        decodes: Among,
        *,
        prompt: Prompt = ANY_PROMPT,
        kept: NodeRef | None = None,
        avoided: Collection[NodeRef] = (),
    ) -> Pair | None:
        """Pair two nodes with equal fingerprints, or None if no pair exists.

        `kept` is the prefill node to stay with if it can be used (its prefix cache holds the prompt); `avoided` nodes are used
        only if no other can be, decode nodes sooner than prefill nodes.
        """
        if not avoided:
            return self._pair(prefills, decodes, prompt, kept)
        for some_prefills, some_decodes in product((prefills.but(avoided), prefills), (decodes.but(avoided), decodes)):
            if (pair := self._pair(some_prefills, some_decodes, prompt, kept)) is not None:
                return pair
        return None

    def choose_target(self, decodes: Among, avoided: Collection[NodeRef]) -> NodeRef | None:
        """Where a branch moves to, of nodes that can take it over; `avoided` ones only if no other can be."""
        chosen = self._decode.choose(decodes.but(avoided))
        return self._decode.choose(decodes) if chosen is None and avoided else chosen

    def choose_alone(self, decodes: Among, avoided: Collection[NodeRef] = ()) -> Pair | None:
        """A decode node that computes the prompt itself, as a pair of one; else as `choose`."""
        node = self.choose_target(decodes, avoided)
        return None if node is None else Pair(node, node)

    def _pair(self, prefills: Among, decodes: Among, prompt: Prompt, kept: NodeRef | None) -> Pair | None:
        usable = prefills.of(decodes.fingerprints())
        prefill = kept if kept is not None and kept in usable else self._prefill.choose(usable, prompt)
        if prefill is None:
            return None
        fitting = decodes.of((usable.look(prefill).fingerprint,))
        if prefill in fitting:  # a mixed node: nothing is handed over
            return Pair(prefill, prefill)
        decode = self._decode.choose(fitting)
        return None if decode is None else Pair(prefill, decode)
