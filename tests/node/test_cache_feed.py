"""What a node tells of its cache: one answer per question, nothing unasked, and nothing kept while nobody listens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.block_pool import BlockPool
from engine.key_log import KeyLog
from node.cache_feed import CacheFeed, TellingCore
from node.events import Action, FromRouter, RouterId, RouterLost, ToRouter
from proto import baton_pb2 as pb
from tests.node.scripted_core import ScriptedCore

ONE, OTHER = RouterId("router-0", 1), RouterId("router-1", 2)


def key(number: int) -> bytes:
    return bytes([number]) * 32


def pool_with(*numbers: int) -> BlockPool:
    pool = BlockPool(8, 4)
    pool.publish(dict(zip(pool.allocate(len(numbers)), map(key, numbers), strict=True)))
    return pool


def told(feed: CacheFeed, router: RouterId = ONE) -> list[pb.CacheNews]:
    return [action.message.cache for action in feed.tell() if action.router == router]


def shorts(*numbers: int) -> bytes:
    return b"".join(key(number)[:8] for number in numbers)


@pytest.mark.covers("R02")
def test_a_question_is_answered_once_and_a_standing_one_as_soon_as_there_is_news() -> None:
    pool = pool_with(1, 2)
    feed = CacheFeed(pool)
    assert told(feed) == []
    feed.ask(ONE, pb.CacheAsk())
    assert told(feed) == [pb.CacheNews(taken=0, stored=shorts(1, 2))]
    assert told(feed) == []
    (block_id,) = pool.allocate(1)
    pool.publish({block_id: key(3)})
    assert told(feed) == [], "nobody asks"
    feed.ask(ONE, pb.CacheAsk(taken=0))
    assert told(feed) == [pb.CacheNews(after=0, taken=1, stored=shorts(3))]
    feed.ask(ONE, pb.CacheAsk(taken=1))
    assert told(feed) == [], "there is no news"
    pool.free([block_id])
    pool.allocate(6)  # evicts it
    assert told(feed) == [pb.CacheNews(after=1, taken=2, evicted=shorts(3))]


@pytest.mark.covers("R02")
def test_a_snapshot_comes_in_pieces_with_the_changes_that_happen_meanwhile() -> None:
    pool = pool_with(1, 2, 3, 4, 5)
    feed = CacheFeed(pool, piece=2)
    feed.ask(ONE, pb.CacheAsk())
    assert told(feed) == [pb.CacheNews(taken=0, next_block=2, stored=shorts(1, 2))]
    pool.free([0])
    pool.allocate(4)  # block 0 is evicted
    feed.ask(ONE, pb.CacheAsk(taken=0, next_block=2))
    assert told(feed) == [pb.CacheNews(after=0, taken=1, next_block=4, stored=shorts(3, 4), evicted=shorts(1))]
    feed.ask(ONE, pb.CacheAsk(taken=1, next_block=4))
    assert told(feed) == [pb.CacheNews(after=1, taken=1, next_block=6, stored=shorts(5))]


@pytest.mark.covers("R02")
def test_who_asks_too_late_or_for_what_never_was_begins_anew() -> None:
    pool = pool_with(1)
    pool.key_log = KeyLog(2)
    feed = CacheFeed(pool)
    feed.ask(ONE, pb.CacheAsk())
    feed.tell()
    for number in range(2, 7):
        pool.publish({pool.allocate(1)[0]: key(number)})
    for ask in (pb.CacheAsk(taken=0), pb.CacheAsk(taken=99)):
        feed.ask(ONE, ask)
        assert told(feed) == [pb.CacheNews(taken=5, stored=shorts(*range(1, 7)))]
    feed.ask(ONE, pb.CacheAsk(taken=4))
    assert told(feed) == [pb.CacheNews(after=4, taken=5, stored=shorts(6))]


@pytest.mark.covers("R02")
def test_nothing_is_kept_while_nobody_listens_and_each_router_has_its_own_place() -> None:
    pool = pool_with()
    core = TellingCore(ScriptedCore(), pool)
    pool.publish({pool.allocate(1)[0]: key(1)})
    assert not is_on(pool) and pool.key_log.last == 0
    for router in (ONE, OTHER):
        assert said(core.receive(FromRouter(router, asks(pb.CacheAsk())), 0.0)) == [router]
    assert core.snapshot()["cache_listeners"] == 2
    core.receive(FromRouter(OTHER, asks(pb.CacheAsk(taken=0))), 0.0)
    pool.publish({pool.allocate(1)[0]: key(2)})
    assert said(core.tick(0.0)) == [OTHER]
    core.receive(RouterLost(OTHER), 0.0)
    assert is_on(pool)
    core.receive(RouterLost(ONE), 0.0)
    assert not is_on(pool) and core.snapshot()["cache_listeners"] == 0
    (action,) = core.receive(FromRouter(ONE, asks(pb.CacheAsk(taken=1))), 0.0)
    assert isinstance(action, ToRouter)
    assert not action.message.cache.HasField("after"), "what happened while nobody listened is not known"


def asks(ask: pb.CacheAsk) -> pb.RouterMessage:
    return pb.RouterMessage(cache=ask)


def said(actions: Sequence[Action]) -> list[RouterId]:
    """Whom a core tells something."""
    return [action.router for action in actions if isinstance(action, ToRouter)]


def is_on(pool: BlockPool) -> bool:
    return pool.key_log.is_on
