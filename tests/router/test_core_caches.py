"""The core follows the caches of nodes that prefill, and places by what they hold: question, answer, dispatch, load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from proto import baton_pb2 as pb
from proto.block_key import block_keys, fingerprint_bytes, seed_key
from router import cache_map
from router.cache_index import CacheIndex
from router.cache_map import CacheMap
from router.core import RouterCore
from router.entrance import RouterCoreConfig
from router.events import FromNode, LoadReported, NodeListed, SessionLost, SessionUp
from router.placement import CACHE_AWARE, Placement
from tests.router.core_world import CoreWorld, node_entry, ref

PROMPT = tuple(range(100, 150))  # three blocks of 16, and two tokens


def following(*names: str, **config: Any) -> CoreWorld:
    """Nodes as in `with_nodes`, of a router that places by cache."""
    world = CoreWorld()
    world.core = RouterCore(RouterCoreConfig(**config), Placement(CACHE_AWARE), CacheMap(CacheIndex(1 << 20)))
    world.join_all(*names)
    return world


def asked(world: CoreWorld) -> list[tuple[str, pb.CacheAsk]]:
    """Every question so far, once all that are due have been asked."""
    for _ in range(20):
        world.now += 0.05
        world.feed(SessionUp(ref("nobody")))
    return [(node.name, message.cache) for node, message in world.sent if message.WhichOneof("kind") == "cache"]


def shorts(num_blocks: int) -> bytes:
    """The prompt's first keys, as nodes tell them."""
    fingerprint = node_entry("p1", pb.ROLE_PREFILL).fingerprint
    seed = seed_key(
        fingerprint_bytes({each.name: getattr(fingerprint, each.name) for each in fingerprint.DESCRIPTOR.fields})
    )
    return b"".join(key[:8] for key in block_keys(seed, PROMPT, 16)[:num_blocks])


def holds(world: CoreWorld, name: str, num_blocks: int) -> None:
    """A node says that it holds the prompt's first blocks."""
    news = pb.CacheNews(taken=num_blocks, stored=shorts(num_blocks))
    world.feed(FromNode(ref(name), pb.NodeMessage(cache=news)))


def state_of(world: CoreWorld, name: str) -> dict[str, Any]:
    nodes: Any = world.core.snapshot()["nodes"]
    state: dict[str, Any] = nodes[f"{name}@1"]
    return state


@pytest.mark.covers("R02")
def test_nodes_that_prefill_are_asked_and_a_prompt_goes_where_most_of_it_is() -> None:
    world = following("p1", "p2", "p3", "d1", "m1")
    assert sorted(name for name, _ in asked(world)) == ["m1", "p1", "p2", "p3"]
    holds(world, "p2", 2)
    holds(world, "p3", 3)
    for request_id, home, num_tokens in (("a", "p3", 2), ("b", "p3", 4), ("c", "p3", 6)):
        world.submit(request_id, prompt=PROMPT)
        (dispatched,) = [
            node.name
            for node, message in world.sent
            if message.WhichOneof("kind") == "dispatch" and message.dispatch.request_id == request_id
        ]
        assert dispatched == home
        assert state_of(world, home)["prefill_tokens"] == num_tokens, "what is cached is no work"
    assert world.counts.count(("cached_tokens", "")) == 3


def says(world: CoreWorld, name: str, **load: Any) -> None:
    world.feed(LoadReported(ref(name), pb.LoadReport(**load)))


def pool_has(world: CoreWorld, name: str, num_blocks: int) -> None:
    """A node says that the KV pool has the prompt's first blocks."""
    news = pb.CacheNews(taken=num_blocks, stored=shorts(num_blocks), of_pool=True)
    world.feed(FromNode(ref(name), pb.NodeMessage(cache=news)))


FAST: dict[str, Any] = {"prefill_tokens_per_s": 1000.0, "prefill_tokens": 1 << 20}
FETCH = pb.FetchSpeed(latency_s=0.001, block_s=0.001, share=1.0)


def home_of(world: CoreWorld, request_id: str) -> str:
    (node,) = [
        node.name
        for node, message in world.sent
        if message.WhichOneof("kind") == "dispatch" and message.dispatch.request_id == request_id
    ]
    return node


@pytest.mark.covers("R02")
def test_a_prompt_goes_where_the_kv_pool_brings_it_soonest_and_what_is_fetched_is_no_work() -> None:
    world = following("p1", "p2", "p3", "d1")
    says(world, "p1", **FAST)
    says(world, "p2", **FAST, kv_pool=b"one", fetch=FETCH)
    says(world, "p3", **FAST, kv_pool=b"two", fetch=FETCH)
    says(world, "d1", kv_pool=b"one")
    asks = {(name, ask.of_pool) for name, ask in asked(world)}
    assert asks == {("p1", False), ("p2", False), ("p3", False), ("p2", True), ("p3", True), ("d1", True)}
    pool_has(world, "d1", 3)
    caches: Any = world.core.snapshot()["caches"]
    assert caches["pools"] == 2
    for number in range(3):  # 2 tokens each, of 50
        world.submit(f"a{number}", prompt=PROMPT)
        assert home_of(world, f"a{number}") == "p2", "a decode node stored it, and another node can read it"
    assert state_of(world, "p2")["prefill_tokens"] == 6
    assert world.counts.count(("pooled_tokens", "")) == 3 and ("cached_tokens", "") not in world.counts
    says(world, "p2", **FAST, kv_pool=b"one", fetch=pb.FetchSpeed(latency_s=9.0, share=1.0))
    world.submit("b", prompt=PROMPT)
    assert home_of(world, "b") != "p2", "it would compute it, and has a queue"
    for name in ("p1", "p2", "p3", "d1"):
        says(world, name)
    assert world.core.snapshot()["caches"]["pools"] == 0  # type: ignore[index]


@pytest.mark.covers("R02")
def test_a_faster_node_gets_more_and_one_that_is_only_said_to_be_a_little_faster_does_not() -> None:
    def homes(*rates: float) -> list[str]:
        world = following("p1", "p2", "d1", max_inflight_prefills=100)
        world.feed(NodeListed(node_entry("d1", pb.ROLE_DECODE, max_num_seqs=100)))
        for name, rate in zip(("p1", "p2"), rates, strict=True):
            says(world, name, prefill_tokens_per_s=rate, prefill_tokens=1 << 20)
        for number in range(10):
            world.submit(f"a{number}", prompt=PROMPT)
        return [home_of(world, f"a{number}") for number in range(10)]

    assert homes(1000, 1400).count("p2") == 5
    assert homes(1000, 4200).count("p2") == 8, "of five prompts the fourfold node has four computed in the time of one"
    assert homes(0, float("nan")).count("p2") == 5


@pytest.mark.covers("R02")
def test_a_session_that_is_lost_is_asked_anew_from_where_it_was_and_one_that_is_resumed_is_not() -> None:
    world = following("p1", "d1")
    assert [name for name, _ in asked(world)] == ["p1"]
    world.feed(SessionUp(ref("p1")))
    assert len(asked(world)) == 1, "the question stands"
    holds(world, "p1", 3)
    (_, second) = asked(world)
    assert second[1].taken == 3
    world.feed(SessionLost(ref("p1")))
    world.feed(SessionUp(ref("p1")))
    assert [ask.taken for _, ask in asked(world)[2:]] == [3], "its log may have what came meanwhile"


@pytest.mark.covers("R02")
def test_an_answer_that_nobody_asked_for_is_counted_and_changes_nothing() -> None:
    plain = CoreWorld.with_nodes("p1", "p2", "d1")
    assert asked(plain) == [], "nobody pays who does not place by cache"
    holds(plain, "p2", 3)
    assert ("stale_messages", "cache") in plain.counts
    world = following("p1", "p2", "d1")
    asked(world)
    holds(world, "p2", 1)
    holds(world, "p2", 3)
    assert ("stale_messages", "cache") in world.counts
    caches: Any = world.core.snapshot()["caches"]
    assert caches["keys"] == 1


@pytest.mark.covers("R02")
def test_a_prompts_keys_are_computed_once_for_all_of_its_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost node leaves each of them to be placed alone."""
    world = following("p1", "d1", "d2")
    asked(world)
    holds(world, "p1", 1)
    computed = list[int]()

    def counted(seed: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
        computed.append(len(token_ids))
        return block_keys(seed, token_ids, block_size)

    monkeypatch.setattr(cache_map, "block_keys", counted)
    world.submit("a", prompt=PROMPT, num_choices=3)
    (_, first), *others = world.dispatches("a")
    assert len(first.branches) == 3 and not others
    decode = first.target.node.name
    for choice in range(3):
        world.tokens_from(decode, "a", 0, [5], choice=choice)
    world.feed(SessionLost(ref(decode)))
    assert len(world.dispatches("a")) == 4 and computed == [len(PROMPT) - 1]
