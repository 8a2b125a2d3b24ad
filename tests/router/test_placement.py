"""Placement: choose() is total, pairs only what may exchange KV, and each policy does what its name says."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proto.prefill_speed import FetchSpeed, PrefillSpeed
from router.config import RouterConfig
from router.events import NodeRef
from router.placement import CACHE_AWARE, POLICIES, Draw, Imbalance, Pair, Placement, Prompt, estimate
from router.ranking import Candidate
from runtime.config import parse
from tests.router.plain_placement import among

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


@pytest.mark.covers("R01", "R02")
def test_a_router_that_is_told_nothing_goes_by_caches_for_prompts_and_by_load_for_the_rest() -> None:
    config = parse(RouterConfig, "baton router", "", ["--model", "m"], {})
    assert (config.placement_prefill, config.placement_decode) == (CACHE_AWARE, "least_loaded")


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
    placement = Placement(policy, "random")
    usable = among(prefills).but(excluded), among(decodes).but(excluded)
    pair = placement.choose(*usable, kept=kept, avoided=avoided)
    assert (pair is None) == (not allowed)
    if pair is None:
        return
    assert pair in [Pair(prefill.node, decode.node) for prefill, decode in allowed]
    ways = [
        [
            (prefill, decode)
            for prefill, decode in allowed
            if prefill.node not in no_prefill and decode.node not in no_decode
        ]
        for no_prefill, no_decode in product((avoided, ()), (avoided, ()))
    ]
    preferred = next(each for each in ways if each)
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
    pair = Placement(policy, policy).choose_alone(among(decodes).but(excluded), avoided)
    assert (pair is None) == (not allowed)
    if pair is not None:
        assert pair.prefill == pair.decode
        assert pair.decode in ([node for node in allowed if node not in avoided] or allowed)


@pytest.mark.covers("R01")
def test_a_node_that_does_both_decodes_what_it_prefills_as_long_as_it_may() -> None:
    mixed, other = candidate("m", 2.0), candidate("d")
    placement = Placement()
    kept_here = placement.choose(among([mixed]), among([other, mixed]))
    assert kept_here == Pair(mixed.node, mixed.node) and kept_here.nodes == (mixed.node,)
    assert placement.choose(among([mixed]), among([other, mixed]), avoided=[mixed.node]) == Pair(mixed.node, other.node)
    assert placement.choose(among([mixed]), among([mixed]), avoided=[mixed.node]) == kept_here, (
        "the only one that is left"
    )
    assert placement.choose(among([candidate("p")]), among([mixed])) == Pair(NodeRef("p", 1), mixed.node)


@pytest.mark.covers("R01")
def test_round_robin_takes_each_in_turn_whoever_joins_or_leaves() -> None:
    placement = Placement("round_robin", "round_robin")
    names = []
    for present in ("abc", "abc", "abc", "abcd", "acd", "acd"):
        pair = placement.choose(among(map(candidate, present)), among([candidate("z")]))
        assert pair is not None
        names.append(pair.prefill.name)
    assert "".join(names) == "abcdac"


@pytest.mark.covers("R01")
def test_least_loaded_takes_the_lowest_and_equals_in_turn() -> None:
    placement = Placement("least_loaded", "least_loaded")
    pairs = [
        placement.choose(among([candidate("a", 5), candidate("b", 2), candidate("c", 2)]), among([candidate("z")]))
        for _ in range(6)
    ]
    assert Counter(pair.prefill.name for pair in pairs if pair) == {"b": 3, "c": 3}


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_restarted_node_is_not_taken_for_the_excluded_one(policy: str) -> None:
    old, new = NodeRef("d", 1), Candidate(NodeRef("d", 2), b"x", (0.0, 0.0))
    pair = Placement(policy, policy).choose(among([candidate("p")]), among([new]).but([old]))
    assert pair == Pair(NodeRef("p", 1), NodeRef("d", 2))


@pytest.mark.covers("R01")
def test_random_takes_each_node_equally_often_and_repeats_itself_for_a_seed(fresh_seed: int) -> None:
    present = among(candidate(name, load) for load, name in enumerate("abcd"))
    first, second = (Placement("random", "random", fresh_seed) for _ in range(2))
    names = [pair.prefill.name for _ in range(4000) if (pair := first.choose(present, among([candidate("z")])))]
    again = [pair.prefill.name for _ in range(4000) if (pair := second.choose(present, among([candidate("z")])))]
    assert names == again
    assert all(850 < count < 1150 for count in Counter(names).values()), Counter(names)  # 1000 expected, 27 a deviation


@pytest.mark.covers("R01")
def test_power_of_two_takes_the_less_loaded_of_two_different_nodes(fresh_seed: int) -> None:
    """Of four nodes the least loaded is in half of all pairs, the next in a third, the next in a sixth, the last never wins."""
    present = among(candidate(name, load) for load, name in enumerate("abcd"))
    placement = Placement("power_of_two", "power_of_two", fresh_seed)
    counts = Counter(
        pair.prefill.name for _ in range(6000) if (pair := placement.choose(present, among([candidate("z")])))
    )
    assert set(counts) == {"a", "b", "c"}
    assert all(abs(counts[name] - expected) < 250 for name, expected in (("a", 3000), ("b", 2000), ("c", 1000))), counts


def chosen(placement: Placement, loads: dict[str, float], num_tokens: int, cached: dict[str, int]) -> str:
    """The prefill node for a prompt."""
    prompt = Prompt(num_tokens, {NodeRef(name, 1): tokens for name, tokens in cached.items()})
    present = among(candidate(name, load) for name, load in loads.items())
    pair = placement.choose(present, among([candidate("z")]), prompt=prompt)
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


speeds = st.builds(
    PrefillSpeed,
    st.sampled_from((1e-4, 4e-4)),
    st.just(16),
    st.none() | st.builds(FetchSpeed, st.floats(0, 0.1), st.floats(0, 0.01), st.floats(0, 1), st.floats(0, 0.1)),
)


@given(
    st.lists(st.tuples(st.integers(0, 5000), speeds, st.sampled_from((b"", b"one", b"two"))), min_size=1, max_size=5),
    st.integers(1, 5000),
    st.dictionaries(st.integers(0, 4), st.integers(1, 4999)),
    st.dictionaries(st.sampled_from((b"one", b"two")), st.integers(1, 4999)),
)
@pytest.mark.covers("R02")
def test_by_cache_and_pool_the_node_chosen_is_by_its_own_estimate_as_soon_as_any(
    nodes_told: list[tuple[int, PrefillSpeed, bytes]], num_tokens: int, cached: dict[int, int], pooled: dict[bytes, int]
) -> None:
    """As soon as any, to the rounding of what is fetched; who is left out for its queue aside."""
    refs = [NodeRef(f"p{number}", 1) for number in range(5)]
    present = [
        Candidate(refs[number], b"x", (queued, 0.0), speed, pool)
        for number, (queued, speed, pool) in enumerate(nodes_told)
    ]
    prompt = Prompt(
        num_tokens,
        {refs[number]: min(tokens, num_tokens - 1) for number, tokens in cached.items()},
        {(pool, b"x"): min(tokens, num_tokens - 1) for pool, tokens in pooled.items()},
    )
    pair = Placement(CACHE_AWARE, imbalance=Imbalance(1 << 20, 1.0)).choose(
        among(present), among([candidate("z")]), prompt=prompt
    )
    assert pair is not None
    seconds = {each.node: estimate(each, prompt).seconds for each in present}
    assert seconds[pair.prefill] <= 1.2 * min(seconds.values()) + 1e-9
    for each in present:
        to_compute = each.load[0] + num_tokens - prompt.cached.get(each.node, 0)
        assert seconds[each.node] <= each.speed.token_s * to_compute
        if not each.pool or each.speed.fetch is None:
            assert seconds[each.node] == each.speed.token_s * to_compute, "who has no pool has no fetch term"


@pytest.mark.covers("R02")
def test_a_pool_counts_for_who_reads_it_and_for_one_model() -> None:
    speed = PrefillSpeed(1e-3, 16, FetchSpeed(0.001, 0.001, 1.0, 0.0))
    plain, reads = (
        Candidate(NodeRef(name, 1), b"x", (0, 0.0), speed, pool) for name, pool in (("a", b""), ("b", b"one"))
    )
    assert estimate(plain, Prompt(161, {}, {(b"", b"x"): 160})).num_fetched == 0
    assert estimate(reads, Prompt(161, {}, {(b"two", b"x"): 160, (b"one", b"y"): 160})).num_fetched == 0
    assert estimate(reads, Prompt(161, {}, {(b"one", b"x"): 160})).num_fetched == 160
    assert estimate(reads, Prompt(161, {reads.node: 64}, {(b"one", b"x"): 160})).num_fetched == 96
    assert estimate(reads, Prompt(161, {reads.node: 160}, {(b"one", b"x"): 64})).num_fetched == 0
    lagging = [
        Candidate(
            NodeRef(name, 1), b"x", (0, 0.0), PrefillSpeed(1e-3, 16, FetchSpeed(latency, 0.001, 1.0, 0.0)), b"one"
        )
        for name, latency in (("a", 0.0100), ("b", 0.0101), ("c", 0.2))
    ]
    placement = Placement(CACHE_AWARE)
    chosen = [
        pair.prefill.name
        for _ in range(6)
        if (
            pair := placement.choose(
                among(lagging), among([candidate("z")]), prompt=Prompt(161, {}, {(b"one", b"x"): 160})
            )
        )
    ]
    assert Counter(chosen) == {"a": 3, "b": 3}, "a little faster is not faster"


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
