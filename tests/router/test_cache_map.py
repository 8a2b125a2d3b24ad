"""A router follows nodes' caches: whatever becomes of sessions, processes and messages, it comes to know what they hold."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from engine.block_pool import BlockPool
from engine.key_log import KeyLog
from node.cache_feed import CacheFeed
from node.events import PoolSaid, RouterId
from node.pool_book import PoolBook
from proto import baton_pb2 as pb
from proto.block_key import block_keys, fingerprint_bytes, seed_key
from router.cache_index import CacheIndex
from router.cache_map import CacheMap, Pace
from router.entrance import RouterCoreConfig
from router.events import GenerationRequest, NodeRef, Sampling
from router.node_state import Node, Session
from router.requests import LiveBranch
from router.retry import Tries

ROUTER = RouterId("router", 1)
FINGERPRINT = pb.Fingerprint(architecture="a", num_layers=1, block_size=4, weights="w", kernels="k")
SEED = seed_key(
    fingerprint_bytes({each.name: getattr(FINGERPRINT, each.name) for each in FINGERPRINT.DESCRIPTOR.fields})
)


def shorts(pool: BlockPool) -> set[int]:
    """What the pool holds, as the index names it."""
    keys, _ = pool.keys_from(0, pool.num_blocks)
    return {int.from_bytes(key[:8], "little") for key in keys}


@dataclass(eq=False)
class FollowedNode:
    """A node's pool and feed, and what is on its way from it."""

    node: Node
    pool: BlockPool
    feed: CacheFeed
    used: list[int] = field(default_factory=list)
    on_way: list[pb.CacheNews] = field(default_factory=list)  # with the session they are lost
    book: PoolBook = field(default_factory=PoolBook)
    book_feed: CacheFeed = field(init=False)

    def __post_init__(self) -> None:
        self.book_feed = CacheFeed(self.book, of_pool=True)

    def tell(self) -> list[pb.CacheNews]:
        """What it says now."""
        return [action.message.cache for feed in (self.feed, self.book_feed) for action in feed.tell()]


class Following:
    """One router and some nodes, message by message."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.map = CacheMap(CacheIndex(1 << 20), Pace(rest_s=0.02))
        self.now = 0.0
        self.nodes: dict[NodeRef, FollowedNode] = {}
        self.seen: dict[NodeRef, None] = {}
        self.num_incarnations = 0
        self.chains = [[self.rng.randbytes(32) for _ in range(8)] for _ in range(12)]
        self.started = 0
        self.gaps = 0

    def share_pool(self, ref: NodeRef, pool: bytes) -> PoolBook:
        """A node begins to use a KV pool."""
        followed = self.nodes[ref]
        followed.book = PoolBook(self.rng.choice((8, 1000)))
        followed.book_feed = CacheFeed(followed.book, piece=self.rng.choice((1, 5, 64)), of_pool=True)
        followed.node.hear(pb.LoadReport(kv_pool=pool))
        self.look()
        return followed.book

    def start(self, name: str, role: pb.Role.ValueType = pb.ROLE_PREFILL) -> None:
        """A node process, in the place of another of that name."""
        self.num_incarnations += 1
        ref = NodeRef(name, self.num_incarnations)
        for old in [old for old in self.nodes if old.name == name]:
            del self.nodes[old]
        entry = pb.NodeEntry(node=pb.PeerId(name=name, incarnation=ref.incarnation), role=role, fingerprint=FINGERPRINT)
        pool = BlockPool(self.rng.choice((6, 40)), 4)
        pool.key_log = KeyLog(self.rng.choice((2, 16, 1000)))
        feed = CacheFeed(pool, piece=self.rng.choice((1, 5, 64)))
        node = Node(ref, entry, FINGERPRINT.SerializeToString(deterministic=True), Session.UP)
        self.nodes[ref] = FollowedNode(node, pool, feed)
        self.look()

    def look(self) -> None:
        """The map hears of every node, those that are gone included."""
        for ref in {**self.seen, **dict.fromkeys(self.nodes)}:
            self.map.look(ref, self.nodes[ref].node if ref in self.nodes else None, self.now)
        self.seen = dict.fromkeys(self.nodes)

    def work(self, followed: FollowedNode) -> None:
        """A sequence's blocks are computed and published, or one's are freed; blocks are evicted where there are none else."""
        pool = followed.pool
        if followed.used and (self.rng.random() < 0.5 or not pool.can_allocate(3)):
            pool.free(followed.used)
            followed.used = []
        elif pool.can_allocate(3):
            blocks = pool.allocate(self.rng.randint(1, 3))
            followed.used += blocks
            for block_id, key in zip(blocks, self.rng.choice(self.chains), strict=False):
                pool.publish({block_id: key})

    def lose_session(self, followed: FollowedNode) -> None:
        followed.on_way.clear()
        followed.feed.forget(ROUTER)
        followed.book_feed.forget(ROUTER)
        followed.node.session = Session.LOST
        self.look()
        if self.rng.random() < 0.5:
            self.work(followed)
        followed.node.session = Session.UP
        self.look()

    def turn(self) -> None:
        """Questions go out, answers come in."""
        for ref, ask in self.map.questions(self.now):
            followed = self.nodes[ref]
            (followed.book_feed if ask.of_pool else followed.feed).ask(ROUTER, ask)
        for ref, followed in self.nodes.items():
            followed.on_way += followed.tell()
            if followed.on_way and self.rng.random() < 0.7:
                news = followed.on_way.pop(0)
                self.started += not news.HasField("after")
                self.map.take(ref, news, self.now)
        self.now += self.rng.choice((0.0, 0.001, 0.02, 0.1))

    def settle(self) -> None:
        """Nothing changes any more; at most so many turns, and it is all known."""
        for _ in range(3000):
            self.turn()
            self.now += 0.05
        for ref, followed in self.nodes.items():
            if followed.node.prefills:
                assert self.map.is_whole(ref)
                assert self.map.keys_of(ref) == shorts(followed.pool)
        held = [shorts(each.pool) for each in self.nodes.values() if each.node.prefills]
        assert self.map.snapshot()["keys"] == len(set().union(*held)), "nothing else is kept"


@pytest.mark.covers("R02")
@pytest.mark.parametrize("seed", range(12))
def test_after_any_history_the_index_is_what_the_nodes_hold(seed: int) -> None:
    world = Following(seed)
    names = ["prefill-0", "prefill-1", "mixed-0"]
    for name in names:
        world.start(name, pb.ROLE_MIXED if name == "mixed-0" else pb.ROLE_PREFILL)
    for _ in range(400):
        followed = world.rng.choice(list(world.nodes.values()))
        match world.rng.randrange(20):
            case 0:
                world.lose_session(followed)
            case 1:
                world.start(followed.node.ref.name, followed.node.entry.role)
            case 2 if followed.on_way and followed.on_way[0].HasField("after"):  # a fault of ours, or the node's
                followed.on_way[0].after += 1
            case _:
                for _ in range(world.rng.randint(1, 6)):
                    world.work(followed)
        world.turn()
    world.settle()
    assert world.started > len(names), "some nodes had to begin anew"


@pytest.mark.covers("R02")
def test_news_that_does_not_follow_is_forgotten_with_all_before_it_and_asked_for_anew() -> None:
    world = Following(1)
    world.start("prefill-0")
    (ref, followed), *_ = world.nodes.items()
    world.work(followed)
    world.settle()
    assert world.map.keys_of(ref)
    world.work(followed)
    world.now += 1.0
    ((_, ask),) = world.map.questions(world.now) or [(ref, pb.CacheAsk(taken=followed.pool.key_log.last))]
    assert not world.map.take(ref, pb.CacheNews(after=ask.taken + 3, taken=ask.taken + 4), world.now)
    assert world.map.keys_of(ref) == set() and not world.map.is_whole(ref)
    assert not world.map.take(ref, pb.CacheNews(taken=1), world.now), "nobody has asked for it"
    world.settle()


@pytest.mark.covers("R02")
@pytest.mark.parametrize("news", [pb.CacheNews(taken=1, stored=b"123"), pb.CacheNews(taken=1, evicted=b"123456789")])
def test_half_a_key_is_no_news(news: pb.CacheNews) -> None:
    world = Following(1)
    world.start("prefill-0")
    ((ref, _),) = world.map.questions(world.now)
    assert not world.map.take(ref, news, world.now)
    assert world.map.next_deadline() is not None, "it is asked again"


@pytest.mark.covers("R02")
def test_a_router_asks_nodes_that_prefill_one_at_a_time_and_not_before_they_have_answered() -> None:
    world = Following(2)
    for number in range(5):
        world.start(f"prefill-{number}")
    world.start("decode-0", pb.ROLE_DECODE)
    asked = []
    for _ in range(100):
        batch = world.map.questions(world.now)
        assert len(batch) <= 1
        asked += [ref.name for ref, _ in batch]
        world.now += 0.001
    assert sorted(asked) == [f"prefill-{number}" for number in range(5)]
    assert world.map.next_deadline() is None, "all of them know that they are asked"


@pytest.mark.covers("R02")
def test_the_pace_is_the_routers_and_follows_from_how_much_came() -> None:
    world = Following(2)
    world.map = CacheMap(CacheIndex(1 << 20), Pace(rest_s=0.02, gap_s=0.001, key_s=0.0001))
    world.start("prefill-0")
    world.start("prefill-1")
    first, second = list(world.nodes)
    assert [ref for ref, _ in world.map.questions(0.0)] == [first]
    world.map.take(first, pb.CacheNews(taken=5, stored=random.Random(1).randbytes(800)), 0.0005)  # a hundred keys
    assert world.map.questions(0.0105) == [], "they take their time"
    assert [ref for ref, _ in world.map.questions(0.0111)] == [second]
    assert world.map.questions(0.0204) == [], "a node rests between two questions"
    assert [(ref, ask.taken) for ref, ask in world.map.questions(0.0206)] == [(first, 5)]


def short_keys(book: PoolBook) -> set[int]:
    keys, _ = book.keys_from(0, 1 << 20)
    return {int.from_bytes(key, "little") for key in keys}


@pytest.mark.covers("R02")
@pytest.mark.parametrize("seed", range(6))
def test_what_nodes_say_of_kv_pools_is_followed_as_their_caches_are_and_goes_with_them(seed: int) -> None:
    world = Following(seed)
    refs = []
    for name, role in (("prefill-0", pb.ROLE_PREFILL), ("prefill-1", pb.ROLE_PREFILL), ("decode-0", pb.ROLE_DECODE)):
        world.start(name, role)
        refs.append(next(ref for ref in world.nodes if ref.name == name))
    pools = [b"one" if number < 2 else b"two" for number in range(3)]
    books = [world.share_pool(ref, pool) for ref, pool in zip(refs, pools, strict=True)]
    for _ in range(300):
        number = world.rng.randrange(3)
        if world.rng.randrange(25) == 0:
            world.lose_session(world.nodes[refs[number]])
        keys = tuple(world.rng.choice(world.chains)[: world.rng.randint(1, 8)])
        stored, found = (keys, ()) if world.rng.random() < 0.5 else ((), keys)
        books[number].take(PoolSaid(pools[number], stored, found))
        world.turn()
    for _ in range(2000):
        world.turn()
        world.now += 0.05
    for ref, pool, book in zip(refs, pools, books, strict=True):
        assert world.map.is_whole(ref, pool)
        assert world.map.keys_of(ref, pool) == short_keys(book)
    assert world.map.snapshot()["pools"] == 2 and world.map.snapshot()["nodes"] == 2
    del world.nodes[refs[2]]
    world.look()
    assert world.map.snapshot()["pools"] == 1
    with pytest.raises(KeyError):
        world.map.keys_of(refs[2], b"two")


@pytest.mark.covers("R02")
def test_of_one_pool_every_word_counts_for_all_who_use_it_and_of_another_for_none_of_them() -> None:
    world = Following(3)
    prompt = tuple(range(100, 133))
    keys = block_keys(SEED, prompt, 4)
    for name in ("prefill-0", "prefill-1", "prefill-2"):
        world.start(name)
    refs = list(world.nodes)
    first, second, other = (
        world.share_pool(ref, pool) for ref, pool in zip(refs, (b"one", b"one", b"two"), strict=True)
    )
    fingerprint = FINGERPRINT.SerializeToString(deterministic=True)

    def pooled() -> dict[bytes, int]:
        for _ in range(60):
            world.turn()
            world.now += 0.05
        request = GenerationRequest("r", prompt, 1, Sampling(0.0, 8, ()), 1e9)
        found = world.map.prompt(LiveBranch(request, 0, 0, Tries(RouterCoreConfig()), 0.0))
        assert found.cached == {}
        assert all(of_model == fingerprint for _, of_model in found.pooled)
        return {pool: num_tokens for (pool, _), num_tokens in found.pooled.items()}

    first.take(PoolSaid(b"one", stored=tuple(keys[:3])))
    second.take(PoolSaid(b"one", stored=tuple(keys[3:5])))
    other.take(PoolSaid(b"two", stored=tuple(keys[:2])))
    assert pooled() == {b"one": 20, b"two": 8}, "what one has begun another one has gone on with"
    second.take(PoolSaid(b"one", lacking=(keys[2],)))
    assert pooled() == {b"one": 8, b"two": 8}, "who looks in vain says so, whoever had stored it"
    first.take(PoolSaid(b"one", stored=(keys[2],)))
    assert pooled() == {b"one": 20, b"two": 8}
    second.take(PoolSaid(b"one", found=tuple(keys[:3])))
    world.nodes[refs[1]].node.hear(pb.LoadReport(kv_pool=b"three"))
    world.look()
    assert pooled() == {b"one": 12, b"two": 8, b"three": 20}, "another pool, of which all is told anew"


@pytest.mark.covers("R02")
@pytest.mark.parametrize("meanwhile", ["", "comes back", "goes"])
def test_a_node_for_which_the_index_had_no_number_is_asked_once_another_one_has_gone(
    monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    monkeypatch.setattr("router.cache_index.MAX_HOLDERS", 3)  # numbers for two
    world = Following(1)
    for name in ("prefill-0", "prefill-1", "prefill-2"):
        world.start(name)
    first, second, third = world.nodes
    for _ in range(9):
        world.turn()
    assert world.map.is_whole(first) and world.map.is_whole(second) and not world.map.is_whole(third)
    assert world.map.snapshot()["nodes"] == 2
    if meanwhile == "comes back":
        world.lose_session(world.nodes[third])
    if meanwhile == "goes":
        del world.nodes[third]
        world.look()
    del world.nodes[first]
    world.look()
    while world.map.next_deadline() is not None:  # its number is free when the index has been swept
        world.turn()
        world.now += 0.05
    world.map.look(second, world.nodes[second].node, world.now)
    for _ in range(9):
        world.turn()
        world.now += 0.05
    assert world.map.is_whole(third) == (meanwhile != "goes"), "another one's news reminds of it"
    assert world.map.snapshot()["nodes"] == len(world.nodes)


@pytest.mark.covers("R02")
def test_news_of_a_pool_from_who_uses_none_is_none() -> None:
    world = Following(1)
    world.start("prefill-0")
    ((ref, ask),) = world.map.questions(world.now)
    assert not ask.of_pool
    assert not world.map.take(ref, pb.CacheNews(taken=1, of_pool=True), world.now)
    assert world.map.take(ref, pb.CacheNews(taken=1), world.now), "the question stood"
    world.share_pool(ref, b"one")
    world.now += 1.0
    asked = {ask.of_pool for _ in range(3) for _, ask in world.map.questions(world.now + 1.0)}
    assert True in asked
    assert not world.map.take(ref, pb.CacheNews(taken=1, of_pool=True, lacking=b"half"), world.now)


@pytest.mark.covers("R02", "W02")
def test_the_routers_keys_are_the_nodes_and_the_last_token_is_never_counted() -> None:
    world = Following(3)
    world.start("prefill-0")
    world.start("prefill-1")
    refs = list(world.nodes)
    prompt = tuple(range(100, 116))
    for ref, num_blocks in zip(refs, (4, 2), strict=True):
        pool = world.nodes[ref].pool = BlockPool(40, 4)
        world.nodes[ref].feed = CacheFeed(pool)
        for block_id, key in zip(pool.allocate(num_blocks), block_keys(SEED, prompt, 4), strict=False):
            pool.publish({block_id: key})
    world.settle()

    def cached(token_ids: tuple[int, ...], wants_prompt_logprobs: bool = False) -> dict[NodeRef, int]:
        sampling = Sampling(0.0, 8, (), wants_prompt_logprobs=wants_prompt_logprobs)
        request = GenerationRequest("r", token_ids, 1, sampling, 1e9)
        branch = LiveBranch(request, 0, 0, Tries(RouterCoreConfig()), 0.0)
        return dict(world.map.prompt(branch).cached)

    assert cached((*prompt, 7)) == {refs[0]: 16, refs[1]: 8}
    assert cached(prompt) == {refs[0]: 12, refs[1]: 8}, "one token at least is computed"
    assert cached((*prompt[:8], 1, 2, 3, 4, 5)) == dict.fromkeys(refs, 8)
    assert cached((1, *prompt)) == {}
    assert cached((*prompt, 7), wants_prompt_logprobs=True) == {}, "the prefix cache is not asked then"


@pytest.mark.covers("R02")
def test_of_many_holders_those_of_the_longest_runs_are_named_and_the_most_that_any_other_has() -> None:
    world = Following(3)
    prompt = tuple(range(100, 133))
    num_blocks = [5, 5, 3, 3, 3, *[1] * 20]
    for number in range(len(num_blocks)):
        world.start(f"prefill-{number}")
    refs = list(world.nodes)
    for ref, number in zip(refs, num_blocks, strict=True):
        pool = world.nodes[ref].pool = BlockPool(40, 4)
        world.nodes[ref].feed = CacheFeed(pool)
        for block_id, key in zip(pool.allocate(number), block_keys(SEED, prompt, 4), strict=False):
            pool.publish({block_id: key})
    world.settle()
    request = GenerationRequest("r", prompt, 1, Sampling(0.0, 8, ()), 1e9)
    found = world.map.prompt(LiveBranch(request, 0, 0, Tries(RouterCoreConfig()), 0.0))
    assert found.holders is not None and set(found.holders) == set(refs[:5]) and found.most_of_others == 4
    assert found.cached == {ref: 4 * number for ref, number in zip(refs, num_blocks, strict=True)}
    assert found.cached.get(NodeRef("nobody", 1), 0) == 0 and len(found.cached) == 25
