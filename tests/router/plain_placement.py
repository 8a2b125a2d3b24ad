"""Placement as it is defined, by looking at every node: what router/ must agree with, which looks at few."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from math import log
from typing import Protocol

from router.events import NodeRef
from router.node_state import Node
from router.placement import Imbalance, Prompt, estimate
from router.ranking import Among, Candidate, Load, Ranking


def among(candidates: Iterable[Candidate]) -> Among:
    """These, in a ranking for all that are alike but for their load."""
    by_ref = {candidate.node: candidate for candidate in candidates}
    rankings: dict[tuple[bytes, float], Ranking] = {}
    for candidate in by_ref.values():
        ranking = Ranking(candidate.fingerprint, by_ref.__getitem__)
        rankings.setdefault((candidate.fingerprint, candidate.speed.token_s), ranking).put(candidate.node, True)
    return Among(list(rankings.values()))


class PlainPolicy(Protocol):
    """Chooses one of several nodes of one role."""

    def choose(self, candidates: Sequence[Candidate], prompt: Prompt) -> NodeRef:
        """One of these, of which there is at least one."""


class PlainTurns:
    """Each in turn, by name."""

    def __init__(self) -> None:
        self._last = NodeRef("", -1)

    def choose(self, candidates: Sequence[Candidate], prompt: Prompt) -> NodeRef:
        """The next behind the last."""
        self._last = min((each.node for each in candidates), key=lambda ref: (ref <= self._last, ref))
        return self._last


class PlainLeastLoaded:
    """The lowest load, equals in turn."""

    def __init__(self) -> None:
        self._turns = PlainTurns()

    def choose(self, candidates: Sequence[Candidate], prompt: Prompt) -> NodeRef:
        """One of those that no other undercuts."""
        lowest = min(candidate.load for candidate in candidates)
        return self._turns.choose([candidate for candidate in candidates if candidate.load == lowest], prompt)


class PlainCacheAware:
    """The soonest first token of those whose queue is not too long."""

    def __init__(self, imbalance: Imbalance) -> None:
        self._imbalance = imbalance
        self._turns = PlainTurns()

    def choose(self, candidates: Sequence[Candidate], prompt: Prompt) -> NodeRef:
        """One of those that no other such undercuts."""
        shortest = min(candidate.load[0] for candidate in candidates)
        longest = max(shortest + self._imbalance.num_tokens, shortest * self._imbalance.ratio)
        costs = [(_cost(each, prompt), each) for each in candidates if each.load[0] <= longest]
        lowest = min(cost for cost, _ in costs)
        return self._turns.choose([each for cost, each in costs if cost == lowest], prompt)


def _cost(candidate: Candidate, prompt: Prompt) -> Load:
    soon = estimate(candidate, prompt)
    if not soon.num_fetched:
        return soon.seconds, candidate.load[1]
    step = round(log(max(soon.seconds, 1e-9), 1.2))  # what is fetched is known to a tenth or so
    return float(1.2**step), candidate.load[1]


class PlainNodes:
    """All nodes, asked one by one."""

    def __init__(self, nodes: Iterable[Node], max_inflight: int) -> None:
        self._nodes = list(nodes)
        self._max_inflight = max_inflight

    def claimed(self, lengths: Mapping[bytes, int]) -> set[NodeRef]:
        """Whom sequences of these lengths, which wait for nodes of these fingerprints, have a claim to."""
        return {
            node.ref
            for fingerprint, length in lengths.items()
            for node in self._able(length)
            if node.decodes and node.fingerprint == fingerprint
        }

    def prefills(self, total_tokens: int, without: Set[NodeRef]) -> set[NodeRef]:
        """Who prefills and has room."""
        return {
            node.ref
            for node in self._able(total_tokens, without)
            if node.prefills and node.num_prefills < self._max_inflight
        }

    def decodes(self, total_tokens: int, without: Set[NodeRef]) -> set[NodeRef]:
        """Who decodes and has room."""
        return {node.ref for node in self._able(total_tokens, without) if node.decodes and _has_slot(node)}

    def stranded(self, total_tokens: int, without: Set[NodeRef], broken: Set[NodeRef]) -> set[NodeRef]:
        """Who decodes, has room for a prompt, too, and could get none from anybody."""
        return {
            node.ref
            for node in self._able(total_tokens, without)
            if self._is_stranded(node, broken) and _has_slot(node) and node.num_prefills < self._max_inflight
        }

    def spare(self, total_tokens: int, without: Set[NodeRef], num_tokens: int, max_tokens: int) -> set[NodeRef]:
        """Who decodes and has room for a short prompt."""
        return {
            node.ref
            for node in self._able(total_tokens, without)
            if node.prefills_locally
            and _has_slot(node)
            and node.num_prefills < self._max_inflight
            and node.prefill_tokens + num_tokens <= max_tokens
            and not node.load.waiting
        }

    def targets(self, holder: Node, num_tokens: int, total_tokens: int, without: Set[NodeRef]) -> set[NodeRef]:
        """Who can take over."""
        return {
            node.ref
            for node in self._able(total_tokens, without | {holder.ref})
            if node.decodes
            and _has_slot(node)
            and node.fingerprint == holder.fingerprint
            and node.has_blocks_for(num_tokens)
        }

    def can_serve(self, total_tokens: int, without: Set[NodeRef], fingerprints: Set[bytes]) -> bool:
        """Whether anybody with one of these could, had it room."""
        able = [node for node in self._able(total_tokens, without) if node.fingerprint in fingerprints]
        prefilled = {node.fingerprint for node in able if node.prefills}
        return any(
            (node.decodes and node.fingerprint in prefilled) or self._is_stranded(node, without) for node in able
        )

    def has_target(self, holder: Node, total_tokens: int, without: Set[NodeRef]) -> bool:
        """Whether anybody could take over, had it room."""
        able = self._able(total_tokens, without | {holder.ref})
        return any(node.decodes and node.fingerprint == holder.fingerprint for node in able)

    @property
    def longest(self) -> int | None:
        """The longest sequence that could be served."""
        return self.longest_of({node.fingerprint for node in self._nodes})

    def longest_of(self, fingerprints: Set[bytes]) -> int | None:
        """The same of nodes with one of these."""
        expected = [node for node in self._nodes if node.is_expected and node.fingerprint in fingerprints]
        pairs = [
            min(each.max_total_tokens, other.max_total_tokens)
            for each in expected
            for other in expected
            if each.prefills and other.decodes and each.fingerprint == other.fingerprint
        ]
        alone = [node.max_total_tokens for node in expected if self._is_stranded(node, set())]
        return max([*pairs, *alone], default=None)

    @property
    def is_served(self) -> bool:
        """Whether a request can be served now."""
        return self.can_serve(0, set(), {node.fingerprint for node in self._nodes})

    def _able(self, total_tokens: int, without: Collection[NodeRef] = ()) -> list[Node]:
        return [
            node
            for node in self._nodes
            if node.can_take_work and total_tokens <= node.max_total_tokens and node.ref not in without
        ]

    def _is_stranded(self, node: Node, without: Set[NodeRef]) -> bool:
        return node.prefills_locally and not any(
            other.prefills and other.is_expected and other.fingerprint == node.fingerprint and other.ref not in without
            for other in self._nodes
        )


def _has_slot(node: Node) -> bool:
    return len(node.branches) < node.entry.max_num_seqs
