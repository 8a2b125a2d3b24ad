"""The core follows the caches of nodes that prefill, and places by what they hold: question, answer, dispatch, load."""

from __future__ import annotations

from typing import Any

import pytest

from proto import baton_pb2 as pb
from proto.block_key import block_keys, fingerprint_bytes, seed_key
from router.cache_index import CacheIndex
from router.cache_map import CacheMap
from router.core import RouterCore
from router.entrance import RouterCoreConfig
from router.events import FromNode, SessionLost, SessionUp
from router.placement import CACHE_AWARE, Placement
from tests.router.core_world import CoreWorld, node_entry, ref

PROMPT = tuple(range(100, 150))  # three blocks of 16, and two tokens


def following(*names: str) -> CoreWorld:
    """Nodes as in `with_nodes`, of a router that places by cache."""
    world = CoreWorld()
    world.core = RouterCore(RouterCoreConfig(), Placement(CACHE_AWARE), CacheMap(CacheIndex(1 << 20)))
    world.join_all(*names)
    return world


def asked(world: CoreWorld) -> list[tuple[str, pb.CacheAsk]]:
    """Every question so far, once all that are due have been asked."""
    for _ in range(20):
        world.now += 0.05
        world.feed(SessionUp(ref("nobody")))
    return [(node.name, message.cache) for node, message in world.sent if message.WhichOneof("kind") == "cache"]


def holds(world: CoreWorld, name: str, num_blocks: int) -> None:
    """A node says that it holds the prompt's first blocks."""
    fingerprint = node_entry(name, pb.ROLE_PREFILL).fingerprint
    seed = seed_key(
        fingerprint_bytes({each.name: getattr(fingerprint, each.name) for each in fingerprint.DESCRIPTOR.fields})
    )
    stored = b"".join(key[:8] for key in block_keys(seed, PROMPT, 16)[:num_blocks])
    world.feed(FromNode(ref(name), pb.NodeMessage(cache=pb.CacheNews(taken=num_blocks, stored=stored))))


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
