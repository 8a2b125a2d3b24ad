"""Which prefill node and which decode node an attempt runs on. Pure: candidates in, pair out.

A policy orders the nodes of one role; Placement pairs the roles: only nodes with equal fingerprints exchange KV, so a
prefill node is a candidate only together with a decode node that can take its blocks. Candidates arrive filtered (listed,
session up, room left); who may not be used, or only as a last resort, is said by identity. `choose` is total: it returns a
pair whenever one is allowed.

Defaults, both `least_loaded`: on a prefill node load is the number of prompt tokens still to be computed, because prompts
differ a hundredfold and a count of requests says little; on a decode node it is the share of its sequences in use. Nodes
with equal load take turns, so an idle cluster spreads its work instead of warming one pair. `round_robin` ignores load.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from router.events import NodeRef

Load = tuple[float, float]  # compared in order; the second breaks ties of the first


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node with room for one more attempt."""

    node: NodeRef
    fingerprint: bytes  # equal bytes: may exchange KV
    load: Load


@dataclass(frozen=True, slots=True)
class Pair:
    """Where an attempt runs."""

    prefill: NodeRef
    decode: NodeRef


class Policy(Protocol):
    """Orders the nodes of one role."""

    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        """Return one of `candidates`, of which there is at least one."""


class RoundRobin:
    """Each node in turn, in the order of names; a node that joins or leaves shifts nobody else's turn."""

    def __init__(self) -> None:
        self._last: tuple[str, int] = ("", -1)

    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
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

    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        """A candidate that no other undercuts."""
        lowest = min(candidate.load for candidate in candidates)
        return self._among_equals.choose([candidate for candidate in candidates if candidate.load == lowest])


POLICIES: Final[dict[str, type[RoundRobin] | type[LeastLoaded]]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
}


class Placement:
    """One policy per role."""

    def __init__(self, prefill: str = "least_loaded", decode: str = "least_loaded") -> None:
        self._prefill: Policy = POLICIES[prefill]()
        self._decode: Policy = POLICIES[decode]()

    def choose(
        self,
        prefills: Sequence[Candidate],
        decodes: Sequence[Candidate],
        *,
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
        return self._pair(prefills, preferred, kept) or self._pair(prefills, decodes, kept)

    def _pair(self, prefills: Sequence[Candidate], decodes: Sequence[Candidate], kept: NodeRef | None) -> Pair | None:
        reachable = {candidate.fingerprint for candidate in decodes}
        usable = [candidate for candidate in prefills if candidate.fingerprint in reachable]
        if not usable:
            return None
        staying = [candidate for candidate in usable if candidate.node == kept]
        prefill = staying[0] if staying else self._prefill.choose(usable)
        decode = self._decode.choose([each for each in decodes if each.fingerprint == prefill.fingerprint])
        return Pair(prefill.node, decode.node)
