"""Placement: choose() is total, pairs only what may exchange KV, and each policy does what its name says."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.events import NodeRef
from router.placement import POLICIES, Candidate, Pair, Placement

nodes = st.builds(NodeRef, st.sampled_from("abcde"), st.integers(1, 2))
candidates = st.lists(
    st.builds(Candidate, nodes, st.sampled_from([b"x", b"y"]), st.tuples(st.integers(0, 2), st.integers(0, 2))),
    max_size=5,
    unique_by=lambda candidate: candidate.node,
)
few_nodes = st.lists(nodes, max_size=3)


def candidate(name: str, load: float = 0.0) -> Candidate:
    return Candidate(NodeRef(name, 1), b"x", (load, 0.0))


@given(candidates, candidates, few_nodes, few_nodes, st.one_of(st.none(), nodes), st.sampled_from(sorted(POLICIES)))
def test_choose_is_total_and_keeps_to_its_rules(
    prefills: list[Candidate],
    decodes: list[Candidate],
    excluded: list[NodeRef],
    avoided: list[NodeRef],
    kept: NodeRef | None,
    policy: str,
) -> None:
    allowed = [
        (prefill, decode)
        for prefill in prefills
        for decode in decodes
        if prefill.fingerprint == decode.fingerprint and not {prefill.node, decode.node} & set(excluded)
    ]
    pair = Placement(policy, policy).choose(prefills, decodes, kept=kept, excluded=excluded, avoided=avoided)
    assert (pair is None) == (not allowed)
    if pair is None:
        return
    assert pair in [Pair(prefill.node, decode.node) for prefill, decode in allowed]
    preferred = [(prefill, decode) for prefill, decode in allowed if decode.node not in avoided] or allowed
    assert pair in [Pair(prefill.node, decode.node) for prefill, decode in preferred]
    if kept in [prefill.node for prefill, _ in preferred]:
        assert pair.prefill == kept


def test_round_robin_takes_each_in_turn_whoever_joins_or_leaves() -> None:
    placement = Placement("round_robin", "round_robin")
    names = []
    for present in ("abc", "abc", "abc", "abcd", "acd", "acd"):
        pair = placement.choose([candidate(name) for name in present], [candidate("z")])
        assert pair is not None
        names.append(pair.prefill.name)
    assert "".join(names) == "abcdac"


def test_least_loaded_takes_the_lowest_and_equals_in_turn() -> None:
    placement = Placement("least_loaded", "least_loaded")
    pairs = [
        placement.choose([candidate("a", 5), candidate("b", 2), candidate("c", 2)], [candidate("z")]) for _ in range(6)
    ]
    assert Counter(pair.prefill.name for pair in pairs if pair) == {"b": 3, "c": 3}


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_restarted_node_is_not_taken_for_the_excluded_one(policy: str) -> None:
    old, new = NodeRef("d", 1), Candidate(NodeRef("d", 2), b"x", (0.0, 0.0))
    pair = Placement(policy, policy).choose([candidate("p")], [new], excluded=[old])
    assert pair == Pair(NodeRef("p", 1), NodeRef("d", 2))
