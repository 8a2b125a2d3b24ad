"""Which prefill node and which decode node an attempt runs on. Pure: candidates in, pair out.

A policy orders the nodes of one role; Placement pairs the roles: only nodes with equal fingerprints exchange KV, so a
prefill node is a candidate only together with a decode node that can take its blocks. Candidates arrive filtered
(listed, session up, room left); who may not be used, or only as a last resort, is said by identity. `choose` is total:
it returns a pair whenever one is allowed.

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
spreads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from typing import Final, Protocol

from proto.prefill_speed import Expected, PrefillSpeed, expected
from router.events import NodeRef

_MASK: Final = 2**64 - 1

Load = tuple[float, float]  # compared in order; the second breaks ties of the first


SAME_SPEED: Final = PrefillSpeed(1e-4, 1)  # of nodes that have not measured any


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node with room for one more attempt."""

    node: NodeRef
    fingerprint: bytes  # equal bytes: may exchange KV
    load: Load
    speed: PrefillSpeed = SAME_SPEED
    pool: bytes = b""  # identity of the KV pool that it reads, or empty


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


ANY_PROMPT: Final = Prompt(0, {})


@dataclass(frozen=True, slots=True)
class Imbalance:
    """How much longer than the shortest a node's queue may be before what it holds counts no more: the larger of both."""

    num_tokens: int = 8192
    ratio: float = 2.0


class Policy(Protocol):
    """Orders the nodes of one role."""

    def choose(self, candidates: Sequence[Candidate], prompt: Prompt = ANY_PROMPT) -> Candidate:
        """Return one of `candidates`, of which there is at least one."""


class RoundRobin:
    """Each node in turn, in the order of names; a node that joins or leaves shifts nobody else's turn."""

    def __init__(self) -> None:
        self._last: tuple[str, int] = ("", -1)

    def choose(self, candidates: Sequence[Candidate], prompt: Prompt = ANY_PROMPT) -> Candidate:
        """The next candidate behind the one chosen last."""

        def turn(candidate: Candidate) -> tuple[bool, str, int]:
            identity = (candidate.node.name, candidate.node.incarnation)
            return (identity <= self._last, *identity)

        chosen = min(candidates, key=turn)
        self._last = (chosen.node.name, chosen.node.incarnation)
        return chosen


class LeastLoaded:
    """The node with the lowest load; among equals, each in turn."""

    def __init__(self) -> None:
        self._among_equals = RoundRobin()

    def choose(self, candidates: Sequence[Candidate], prompt: Prompt = ANY_PROMPT) -> Candidate:
        """A candidate that no other undercuts."""
        lowest = min(candidate.load for candidate in candidates)
        return self._among_equals.choose([candidate for candidate in candidates if candidate.load == lowest])


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

    def choose(self, candidates: Sequence[Candidate], prompt: Prompt = ANY_PROMPT) -> Candidate:
        """A candidate drawn."""
        return candidates[self._draw.below(len(candidates))]


class PowerOfTwo:
    """The less loaded of two different nodes drawn at random; of equals the one drawn first."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw

    def choose(self, candidates: Sequence[Candidate], prompt: Prompt = ANY_PROMPT) -> Candidate:
        """A candidate drawn, unless the second one drawn undercuts it."""
        if len(candidates) == 1:
            return candidates[0]
        first = self._draw.below(len(candidates))
        second = self._draw.below(len(candidates) - 1)
        return min(candidates[first], candidates[second + (second >= first)], key=lambda candidate: candidate.load)


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

    def choose(self, candidates: Sequence[Candidate], prompt: Prompt = ANY_PROMPT) -> Candidate:
        """A candidate whose queue is not too long, and that no other such undercuts."""
        shortest = min(candidate.load[0] for candidate in candidates)
        longest = max(shortest + self._imbalance.num_tokens, shortest * self._imbalance.ratio)

        def cost(candidate: Candidate) -> Load:
            soon = estimate(candidate, prompt)
            return _rounded(soon.seconds) if soon.num_fetched else soon.seconds, candidate.load[1]

        costs = [(cost(each), each) for each in candidates if each.load[0] <= longest]
        lowest = min(each for each, _ in costs)
        return self._among_equals.choose([candidate for each, candidate in costs if each == lowest])


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
        prefills: Sequence[Candidate],
        decodes: Sequence[Candidate],
        *,
        prompt: Prompt = ANY_PROMPT,
        kept: NodeRef | None = None,
        excluded: Collection[NodeRef] = (),
        avoided: Collection[NodeRef] = (),
    ) -> Pair | None:
        """Pair two nodes with equal fingerprints, or None if no allowed pair exists.

        `kept` is the prefill node to stay with if it can be used (its prefix cache holds the prompt); `excluded` nodes are
        not used; `avoided` decode nodes only if no other can be.
        """
        prefills = [candidate for candidate in prefills if candidate.node not in excluded]
        decodes = [candidate for candidate in decodes if candidate.node not in excluded]
        preferred = [candidate for candidate in decodes if candidate.node not in avoided]
        return self._pair(prefills, preferred, prompt, kept) or self._pair(prefills, decodes, prompt, kept)

    def choose_target(self, decodes: Sequence[Candidate], avoided: Collection[NodeRef]) -> NodeRef | None:
        """Where a branch moves to, of nodes that can take it over; `avoided` ones only if no other can be."""
        preferred = [candidate for candidate in decodes if candidate.node not in avoided] or decodes
        return self._decode.choose(preferred).node if preferred else None

    def choose_alone(
        self,
        decodes: Sequence[Candidate],
        *,
        excluded: Collection[NodeRef] = (),
        avoided: Collection[NodeRef] = (),
    ) -> Pair | None:
        """A decode node that computes the prompt itself, as a pair of one; else as `choose`."""
        node = self.choose_target([candidate for candidate in decodes if candidate.node not in excluded], avoided)
        return None if node is None else Pair(node, node)

    def _pair(
        self, prefills: Sequence[Candidate], decodes: Sequence[Candidate], prompt: Prompt, kept: NodeRef | None
    ) -> Pair | None:
        reachable = {candidate.fingerprint for candidate in decodes}
        usable = [candidate for candidate in prefills if candidate.fingerprint in reachable]
        if not usable:
            return None
        staying = [candidate for candidate in usable if candidate.node == kept]
        prefill = staying[0] if staying else self._prefill.choose(usable, prompt)
        fitting = [each for each in decodes if each.fingerprint == prefill.fingerprint]
        here = [each for each in fitting if each.node == prefill.node]  # a mixed node: nothing is handed over
        decode = self._decode.choose(here or fitting)
        return Pair(prefill.node, decode.node)
