"""Orders that are kept agree with sorting anew, and who is chosen from them is who looking at everybody would choose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proto.prefill_speed import FetchSpeed, PrefillSpeed
from router.events import NodeRef
from router.placement import (
    ANY_PROMPT,
    CacheAware,
    Draw,
    Imbalance,
    LeastLoaded,
    Policy,
    PowerOfTwo,
    Prompt,
    RoundRobin,
    estimate,
)
from router.ranking import NOBODY, Among, Candidate, Load, Ranking
from tests.router.plain_placement import PlainCacheAware, PlainLeastLoaded, PlainPolicy, PlainTurns

NOBODY_AT_ALL: set[NodeRef | None] = {None}
NAMES = [NodeRef(name, incarnation) for name in "abcdef" for incarnation in (1, 2)]
refs = st.sampled_from(NAMES)
loads = st.tuples(st.integers(0, 3), st.sampled_from((0.0, 0.5, 1.0)))


@given(st.lists(st.tuples(refs, st.none() | loads, st.booleans()), max_size=80))
def test_after_any_history_a_ranking_is_what_sorting_anew_gives(
    history: list[tuple[NodeRef, Load | None, bool]],
) -> None:
    """Each event: a node, its load or that it has no room, whether somebody asks for the order then."""
    here: dict[NodeRef, Load] = {}
    ranking = Ranking(b"x", lambda ref: Candidate(ref, b"x", here[ref]))
    for ref, load, is_asked in history:
        if load is None:
            here.pop(ref, None)
        else:
            here[ref] = load
        ranking.put(ref, load is not None)
        if is_asked:
            assert list(ranking.by_load()) == sorted((load, ref) for ref, load in here.items())
        assert list(ranking.names) == sorted(here) and len(ranking) == len(here)
        assert {each for each in NAMES if each in ranking} == set(here)
    assert list(ranking.by_load()) == sorted((load, ref) for ref, load in here.items())


def test_of_nodes_that_have_gone_nothing_is_kept_though_nobody_asks_for_the_order() -> None:
    ranking = Ranking(b"x", lambda ref: Candidate(ref, b"x", (0.0, 0.0)))
    for incarnation in range(1000):
        ranking.put(NodeRef("a", incarnation), True)
        ranking.put(NodeRef("a", incarnation), False)
    looked: list[NodeRef] = []
    ranking.look = lambda ref: looked.append(ref) or Candidate(ref, b"x", (0.0, 0.0))  # type: ignore[func-returns-value]
    assert not ranking.by_load() and not looked


class World:
    """Nodes of a few kinds, kept in rankings, and the same ones in a list."""

    def __init__(self) -> None:
        self.here: dict[NodeRef, Candidate] = {}
        self._rankings: dict[tuple[bytes, float], Ranking] = {}

    def put(self, candidate: Candidate) -> None:
        self.leave(candidate.node)
        self.here[candidate.node] = candidate
        kind = (candidate.fingerprint, candidate.speed.token_s)
        ranking = self._rankings.setdefault(kind, Ranking(candidate.fingerprint, self.here.__getitem__))
        ranking.put(candidate.node, True)

    def leave(self, ref: NodeRef) -> None:
        self.here.pop(ref, None)
        for ranking in self._rankings.values():
            ranking.put(ref, False)

    def among(self, without: set[NodeRef], fits: Callable[[NodeRef], bool] | None) -> Among:
        found = Among(list(self._rankings.values())).but(without)
        return found if fits is None else found.where(fits)


fetches = st.none() | st.builds(
    FetchSpeed, st.floats(0, 0.1), st.floats(0, 0.01), st.floats(0, 1), st.sampled_from((0.0, 0.05, 10.0))
)
candidates = st.builds(
    Candidate,
    refs,
    st.sampled_from((b"x", b"y")),
    st.tuples(st.sampled_from((0, 0, 0, 100, 2000)), st.sampled_from((0.0, 0.0, 0.5))),
    st.builds(PrefillSpeed, st.sampled_from((1e-4, 4e-4)), st.just(16), fetches),
    st.sampled_from((b"", b"", b"one")),
)


def prompt_with(cached: dict[NodeRef, int], pooled: dict[tuple[bytes, bytes], int], most: int) -> Prompt:
    """A prompt, and who holds more of it than `most`."""
    holders = [ref for ref, tokens in cached.items() if tokens > most]
    most_of_others = max((tokens for tokens in cached.values() if tokens <= most), default=0)
    return Prompt(1000, cached, pooled, holders, most_of_others)


prompts = st.builds(
    prompt_with,
    st.dictionaries(refs, st.sampled_from((16, 96, 100, 400, 999))),
    st.just({})
    | st.dictionaries(st.tuples(st.just(b"one"), st.sampled_from((b"x", b"y"))), st.sampled_from((96, 960))),
    st.sampled_from((0, 16, 100, 1000)),
)
PAIRS: dict[str, Callable[[Imbalance], tuple[Policy, PlainPolicy]]] = {
    "round_robin": lambda _: (RoundRobin(), PlainTurns()),
    "least_loaded": lambda _: (LeastLoaded(), PlainLeastLoaded()),
    "cache_aware": lambda imbalance: (CacheAware(imbalance), PlainCacheAware(imbalance)),
}


@pytest.mark.covers("R01", "R02")
@pytest.mark.parametrize("name", sorted(PAIRS))
@given(
    st.builds(Imbalance, st.sampled_from((100, 8192)), st.sampled_from((1.0, 2.0))),
    st.lists(st.tuples(candidates, st.booleans(), st.sets(refs, max_size=4), st.booleans(), prompts), max_size=30),
)
def test_who_is_chosen_is_who_would_be_by_looking_at_everybody(
    name: str, imbalance: Imbalance, history: list[tuple[Candidate, bool, set[NodeRef], bool, Prompt]]
) -> None:
    """Each event: a node comes, changes or goes; then somebody chooses without some nodes, and where a condition is met."""
    policy, plain = PAIRS[name](imbalance)
    world = World()
    for candidate, stays, without, has_condition, prompt in history:
        world.put(candidate) if stays else world.leave(candidate.node)
        fits = (lambda ref: ref.incarnation == 1) if has_condition else None
        able = [each for ref, each in world.here.items() if ref not in without and (fits is None or fits(ref))]
        chosen = policy.choose(world.among(without, fits), prompt)
        assert chosen == (plain.choose(able, prompt) if able else None)


@pytest.mark.covers("R01")
@given(st.lists(candidates, max_size=12, unique_by=lambda each: each.node), st.sets(refs, max_size=6), st.booleans())
def test_each_number_drawn_is_another_node_and_every_one_that_is_not_left_out_has_its_own(
    present: list[Candidate], without: set[NodeRef], has_condition: bool
) -> None:
    world = World()
    for each in present:
        world.put(each)
    able = {ref for ref in world.here if ref not in without}
    drawn = [world.among(without, None).draw(lambda bound, number=number: number) for number in range(len(able))]  # type: ignore[misc]
    assert Counter(drawn) == Counter(able)
    assert world.among(without, None).draw(lambda bound: 0) in (able or NOBODY_AT_ALL)
    odd = {ref for ref in able if ref.incarnation == 1}
    bounds: list[int] = []

    def below(bound: int) -> int:
        bounds.append(bound)
        return 0 if len(bounds) <= 16 else bound - 1

    found = world.among(without, lambda ref: ref.incarnation == 1).draw(below)
    assert found in (odd or NOBODY_AT_ALL)
    assert all(bound in (len(able), len(odd)) for bound in bounds), (
        "first among all, in the end among those that may be"
    )


@pytest.mark.covers("R01")
@given(
    st.lists(candidates, max_size=6, unique_by=lambda each: each.node),
    st.sets(refs, max_size=3),
    st.integers(0, 2**64 - 1),
)
def test_power_of_two_never_takes_who_is_left_out_nor_the_most_loaded_of_all(
    present: list[Candidate], without: set[NodeRef], seed: int
) -> None:
    world = World()
    for each in present:
        world.put(each)
    able = {ref: each.load for ref, each in world.here.items() if ref not in without}
    chosen = PowerOfTwo(Draw(seed)).choose(world.among(without, None), ANY_PROMPT)
    assert (chosen is None) == (not able)
    if chosen is not None:
        assert chosen in able
        worse = [ref for ref, load in able.items() if load >= able[chosen] and ref != chosen]
        assert worse or len(able) == 1


@pytest.mark.covers("R02")
@given(
    st.lists(st.tuples(st.sampled_from((0, 50, 100, 150)), st.sampled_from((0, 100, 200))), min_size=1, max_size=8),
    st.sampled_from((0, 100, 200)),
    st.integers(1, 4),
)
def test_by_cache_few_are_looked_at_and_the_soonest_is_among_them(
    nodes: list[tuple[int, int]], most: int, num_turns: int
) -> None:
    """Each node: its queue, what it holds of the prompt. Sums are equal often, so the turns matter, too."""
    world = World()
    for ref, (queued, _) in zip(NAMES, nodes, strict=False):
        world.put(Candidate(ref, b"x", (queued, 0.0)))
    prompt = prompt_with({ref: held for ref, (_, held) in zip(NAMES, nodes, strict=False) if held}, {}, most)
    policy, plain = CacheAware(Imbalance(120, 1.0)), PlainCacheAware(Imbalance(120, 1.0))
    for _ in range(num_turns):
        assert policy.choose(world.among(set(), None), prompt) == plain.choose(list(world.here.values()), prompt)


@pytest.mark.covers("R02")
def test_where_a_pool_has_the_prompt_every_node_is_taken_by_what_it_would_do() -> None:
    """Fetching is a little sooner than computing, rounded it is a little later; that it would compute sooner does not count."""
    slow = FetchSpeed(0.0, 0.0155, 1.0, 0.0)
    fetches = Candidate(NodeRef("a", 1), b"x", (0, 0.0), PrefillSpeed(1e-3, 16, slow), b"one")
    computes = Candidate(NodeRef("b", 1), b"x", (20, 0.0), PrefillSpeed(1e-3, 16))
    prompt = Prompt(950, {}, {(b"one", b"x"): 944})
    assert 0.9 < estimate(fetches, prompt).seconds < 0.95 and estimate(fetches, prompt).num_fetched
    assert estimate(computes, prompt).seconds == 0.97
    world = World()
    world.put(fetches)
    world.put(computes)
    assert PlainCacheAware(Imbalance()).choose([fetches, computes], prompt) == computes.node
    assert CacheAware(Imbalance()).choose(world.among(set(), None), prompt) == computes.node


def test_the_first_of_all_is_nobodys_name() -> None:
    assert NOBODY < NodeRef("", 0) < NodeRef("a", 1)
