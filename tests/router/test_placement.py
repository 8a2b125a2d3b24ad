"""Placement: choose() is total, pairs only what may exchange KV, and each policy does what its name says."""

from __future__ import annotations

from collections import Counter
from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config import RouterConfig
from router.events import NodeRef
from router.placement import CACHE_AWARE, POLICIES, Candidate, Draw, Imbalance, Pair, Placement, Prompt

nodes = st.builds(NodeRef, st.sampled_from("abcde"), st.integers(1, 2))
candidates = st.lists(
    st.builds(Candidate, nodes, st.sampled_from([b"x", b"y"]), st.tuples(st.integers(0, 2), st.integers(0, 2))),
    max_size=5,
    unique_by=lambda candidate: candidate.node,
)
few_nodes = st.lists(nodes, max_size=3)
seeds = st.integers(0, 2**64 - 1)
policies = st.sampled_from([*sorted(POLICIES), CACHE_AWARE])


def candidate(name: str, load: float = 0.0) -> Candidate:
    return Candidate(NodeRef(name, 1), b"x", (load, 0.0))


@pytest.mark.covers("R01")
@given(candidates, candidates, few_nodes, few_nodes, st.one_of(st.none(), nodes), policies)
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
    pair = Placement(policy, "random").choose(prefills, decodes, kept=kept, excluded=excluded, avoided=avoided)
    assert (pair is None) == (not allowed)
    if pair is None:
        return
    assert pair in [Pair(prefill.node, decode.node) for prefill, decode in allowed]
    preferred = [(prefill, decode) for prefill, decode in allowed if decode.node not in avoided] or allowed
    if (pair.prefill, pair.prefill) in [(prefill.node, decode.node) for prefill, decode in preferred]:
        assert pair.decode == pair.prefill
    assert pair in [Pair(prefill.node, decode.node) for prefill, decode in preferred]
    if kept in [prefill.node for prefill, _ in preferred]:
        assert pair.prefill == kept


@pytest.mark.covers("R01", "R22")
@given(candidates, few_nodes, few_nodes, st.sampled_from(sorted(POLICIES)))
def test_a_pair_of_one_keeps_to_the_same_rules(
    decodes: list[Candidate], excluded: list[NodeRef], avoided: list[NodeRef], policy: str
) -> None:
    allowed = [candidate.node for candidate in decodes if candidate.node not in excluded]
    pair = Placement(policy, policy).choose_alone(decodes, excluded=excluded, avoided=avoided)
    assert (pair is None) == (not allowed)
    if pair is not None:
        assert pair.prefill == pair.decode
        assert pair.decode in ([node for node in allowed if node not in avoided] or allowed)


@pytest.mark.covers("R01")
def test_a_node_that_does_both_decodes_what_it_prefills_as_long_as_it_may() -> None:
    mixed, other = candidate("m", 2.0), candidate("d")
    placement = Placement()
    kept_here = placement.choose([mixed], [other, mixed])
    assert kept_here == Pair(mixed.node, mixed.node) and kept_here.nodes == (mixed.node,)
    assert placement.choose([mixed], [other, mixed], avoided=[mixed.node]) == Pair(mixed.node, other.node)
    assert placement.choose([mixed], [mixed], avoided=[mixed.node]) == kept_here, "the only one that is left"
    assert placement.choose([candidate("p")], [mixed]) == Pair(NodeRef("p", 1), mixed.node)


@pytest.mark.covers("R01")
def test_round_robin_takes_each_in_turn_whoever_joins_or_leaves() -> None:
    placement = Placement("round_robin", "round_robin")
    names = []
    for present in ("abc", "abc", "abc", "abcd", "acd", "acd"):
        pair = placement.choose([candidate(name) for name in present], [candidate("z")])
        assert pair is not None
        names.append(pair.prefill.name)
    assert "".join(names) == "abcdac"


@pytest.mark.covers("R01")
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


@pytest.mark.covers("R01")
def test_random_takes_each_node_equally_often_and_repeats_itself_for_a_seed(fresh_seed: int) -> None:
    present = [candidate(name, load) for load, name in enumerate("abcd")]
    first, second = (Placement("random", "random", fresh_seed) for _ in range(2))
    names = [pair.prefill.name for _ in range(4000) if (pair := first.choose(present, [candidate("z")]))]
    again = [pair.prefill.name for _ in range(4000) if (pair := second.choose(present, [candidate("z")]))]
    assert names == again
    assert all(850 < count < 1150 for count in Counter(names).values()), Counter(names)  # 1000 expected, 27 a deviation


@pytest.mark.covers("R01")
def test_power_of_two_takes_the_less_loaded_of_two_different_nodes(fresh_seed: int) -> None:
    """Of four nodes the least loaded is in half of all pairs, the next in a third, the next in a sixth, the last never wins."""
    present = [candidate(name, load) for load, name in reversed([*enumerate("abcd")])]
    placement = Placement("power_of_two", "power_of_two", fresh_seed)
    counts = Counter(pair.prefill.name for _ in range(6000) if (pair := placement.choose(present, [candidate("z")])))
    assert set(counts) == {"a", "b", "c"}
    assert all(abs(counts[name] - expected) < 250 for name, expected in (("a", 3000), ("b", 2000), ("c", 1000))), counts


def chosen(placement: Placement, loads: dict[str, float], num_tokens: int, cached: dict[str, int]) -> str:
    """The prefill node for a prompt."""
    prompt = Prompt(num_tokens, {NodeRef(name, 1): tokens for name, tokens in cached.items()})
    pair = placement.choose([candidate(name, load) for name, load in loads.items()], [candidate("z")], prompt=prompt)
    assert pair is not None
    return pair.prefill.name


@pytest.mark.covers("R01", "R02")
def test_cache_aware_takes_the_node_with_the_least_to_compute_before_the_first_token() -> None:
    placement = Placement(CACHE_AWARE)
    assert chosen(placement, {"a": 0, "b": 500}, 1000, {"b": 600}) == "b", "400 + 500 are less than 1000"
    assert chosen(placement, {"a": 0, "b": 700}, 1000, {"b": 600}) == "a", "and 400 + 700 are more"
    assert chosen(placement, {"a": 0, "b": 0, "c": 0}, 1000, {"b": 16, "c": 32}) == "c"
    turns = Counter(chosen(placement, {"a": 7, "b": 7, "c": 8}, 1000, {}) for _ in range(6))
    assert turns == {"a": 3, "b": 3}, "nothing is cached: by load, and equals in turn"


@pytest.mark.covers("R02")
def test_under_imbalance_what_a_node_holds_counts_no_more() -> None:
    by_tokens = Placement(CACHE_AWARE, imbalance=Imbalance(num_tokens=300, ratio=1.0))
    assert chosen(by_tokens, {"a": 0, "b": 300}, 1000, {"b": 900}) == "b"
    assert chosen(by_tokens, {"a": 0, "b": 301}, 1000, {"b": 900}) == "a", "by 600 the sooner, and left out"
    by_ratio = Placement(CACHE_AWARE, imbalance=Imbalance(num_tokens=300, ratio=2.0))
    assert chosen(by_ratio, {"a": 1000, "b": 2000}, 5000, {"b": 4000}) == "b", "a long queue may be twice as long"
    assert chosen(by_ratio, {"a": 1000, "b": 2001}, 5000, {"b": 4000}) == "a"


@given(
    st.dictionaries(st.sampled_from("abcde"), st.integers(0, 2000), min_size=1),
    st.integers(1, 2000),
    st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 2000)),
    st.integers(0, 1000),
    st.floats(1, 4),
)
@pytest.mark.covers("R02")
def test_cache_aware_is_total_and_chooses_the_best_of_those_that_are_not_overloaded(
    loads: dict[str, float], num_tokens: int, cached: dict[str, int], tokens: int, ratio: float
) -> None:
    name = chosen(Placement(CACHE_AWARE, imbalance=Imbalance(tokens, ratio)), loads, num_tokens, cached)
    shortest = min(loads.values())
    allowed = {each: load for each, load in loads.items() if load <= max(shortest + tokens, shortest * ratio)}
    assert name in allowed
    assert all(load - cached.get(each, 0) >= loads[name] - cached.get(name, 0) for each, load in allowed.items())


@given(seeds, st.integers(1, 2**32))
def test_what_is_drawn_is_below_its_bound(seed: int, bound: int) -> None:
    draw = Draw(seed)
    assert all(0 <= draw.below(bound) < bound for _ in range(8))


@pytest.mark.covers("R01")
def test_every_policy_can_be_chosen_for_each_role() -> None:
    hints = get_type_hints(RouterConfig)
    for role in ("prefill", "decode"):
        by_cache = {CACHE_AWARE} if role == "prefill" else set[str]()
        assert set(get_args(hints[f"placement_{role}"])) == set(POLICIES) | by_cache
