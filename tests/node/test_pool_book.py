"""What a node knows of the KV pool: bounded, whole in its snapshot, and every change told; and the routers that hear it."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from engine.block_pool import BlockPool
from engine.key_log import KeyLog
from node.cache_feed import CacheFeed, TellingCore
from node.events import FromRouter, PoolSaid, RouterId, ToRouter
from node.pool_book import PoolBook
from proto import baton_pb2 as pb
from tests.node.scripted_core import ScriptedCore

ROUTER = RouterId("router-0", 1)
POOL = b"p" * 16


def keys(*numbers: int) -> tuple[bytes, ...]:
    return tuple(bytes([number]) * 32 for number in numbers)


def shorts(*numbers: int) -> bytes:
    return b"".join(key[:8] for key in keys(*numbers))


def said(stored: Iterable[int] = (), found: Iterable[int] = (), lacking: Iterable[int] = ()) -> PoolSaid:
    return PoolSaid(POOL, keys(*stored), keys(*found), keys(*lacking))


def told(feed: CacheFeed, ask: pb.CacheAsk) -> pb.CacheNews | None:
    feed.ask(ROUTER, ask)
    actions = feed.tell()
    return actions[0].message.cache if actions else None


def snapshot_of(book: PoolBook, piece: int) -> list[bytes]:
    held: list[bytes] = []
    first: int | None = 0
    while first is not None:
        some, first = book.keys_from(first, piece)
        held += some
    return held


@pytest.mark.covers("R02")
@pytest.mark.parametrize("seed", range(4))
def test_it_holds_what_was_used_last_and_its_changes_and_its_snapshot_say_the_same(seed: int) -> None:
    rng = random.Random(seed)
    book = PoolBook(capacity=20)
    book.key_log.switch(True)
    model: dict[bytes, None] = {}  # the longest unused first
    heard: set[bytes] = set()
    taken = 0
    for _ in range(600):
        number = rng.randrange(60)
        key = keys(number)[0][:8]
        match rng.randrange(3):
            case 0:
                book.take(said(lacking=[number]))
                model.pop(key, None)
            case 1:
                book.take(said(found=[number]))
                model.pop(key, None)
                model[key] = None
            case _:
                book.take(said(stored=[number]))
                model.pop(key, None)
                model[key] = None
        if len(model) > 20:
            del model[next(iter(model))]
        assert len(book) == len(model) <= 20
        assert set(snapshot_of(book, rng.choice((1, 7, 100)))) == set(model)
        for changed, is_held in book.key_log.since(taken, 1000) or ():
            heard = heard | {changed} if is_held else heard - {changed}
            taken += 1
        assert heard == set(model), "who has heard all changes knows as much"


@pytest.mark.covers("R02")
def test_what_is_stored_anew_and_what_is_lacking_is_told_though_it_changes_nothing_here() -> None:
    book = PoolBook(capacity=2)
    book.key_log = KeyLog()
    feed = CacheFeed(book, of_pool=True)
    assert told(feed, pb.CacheAsk()) == pb.CacheNews(taken=0, of_pool=True)
    book.take(said(found=[1, 1]))
    assert told(feed, pb.CacheAsk(taken=0)) == pb.CacheNews(after=0, taken=1, stored=shorts(1), of_pool=True)
    book.take(said(found=[1]))
    assert told(feed, pb.CacheAsk(taken=1)) is None
    book.take(said(stored=[1]))
    assert told(feed, pb.CacheAsk(taken=1)) == pb.CacheNews(after=1, taken=2, stored=shorts(1), of_pool=True)
    book.take(said(lacking=[7]))
    assert told(feed, pb.CacheAsk(taken=2)) == pb.CacheNews(after=2, taken=3, lacking=shorts(7), of_pool=True)
    book.take(said(found=[2, 3]))
    news = told(feed, pb.CacheAsk(taken=3))
    assert news == pb.CacheNews(after=3, taken=6, stored=shorts(2, 3), evicted=shorts(1), of_pool=True)
    book.take(said(stored=[4], lacking=[4]))
    news = told(feed, pb.CacheAsk(taken=6))
    assert news is not None and (news.stored, news.lacking) == (b"", shorts(4)), "the last word counts"


@pytest.mark.covers("R02")
def test_a_core_tells_of_its_cache_and_of_the_pool_apart_and_whose_pool_it_is() -> None:
    pool = BlockPool(4, 4)
    pool.publish({pool.allocate(1)[0]: keys(1)[0]})
    core = TellingCore(ScriptedCore(), pool)
    assert core.load().kv_pool == b""
    assert core.receive(said(stored=[2]), 0.0) == [], "nobody asks"
    assert core.load().kv_pool == POOL
    for of_pool, stored in ((False, shorts(1)), (True, shorts(2))):
        ask = pb.RouterMessage(cache=pb.CacheAsk(of_pool=of_pool))
        (action,) = core.receive(FromRouter(ROUTER, ask), 0.0)
        assert isinstance(action, ToRouter)
        assert (action.message.cache.of_pool, action.message.cache.stored) == (of_pool, stored)
    ask = pb.RouterMessage(cache=pb.CacheAsk(of_pool=True, taken=0))
    assert core.receive(FromRouter(ROUTER, ask), 0.0) == []
    (action,) = core.receive(said(found=[3]), 0.0)
    assert isinstance(action, ToRouter) and action.message.cache.stored == shorts(3)
    assert core.snapshot()["kv_pool_blocks_known"] == 2
