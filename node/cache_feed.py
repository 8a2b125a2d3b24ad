"""What this node's prefix cache holds, and what it knows to be in the KV pool, told to the routers that ask for it. Pure.

    router   CacheAsk{taken, next_block} ---->   stands until there is news                    (of_pool: of the other one)
             <---- CacheNews{after, taken, next_block, stored, evicted}   changes behind `taken`, then a piece of the snapshot
             CacheAsk{taken, next_block} ---->   when the router wants to hear more

Nothing is sent unasked, and one message at most is on its way per router, with two pieces of keys at most: neither a
session's bound nor what waits behind the message is at stake, however many blocks there are. Between two answers
changes add up in the pool's log (engine/key_log.py); of a key that came and went the last word counts.

A snapshot needs no copy of the pool. A piece says what some blocks hold now, and comes behind every change up to now;
so what the router has is, at each `taken`, true, and whole as far as the snapshot has come. Changes of blocks that it
has not reached yet are told like all others.

A router that asks too late, or after nobody had listened, is told to begin anew. Not here: which routers want it (their
placement policy).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol

from engine.block_pool import BlockPool
from engine.key_log import KeyLog
from node import events as ev
from node.pool_book import PoolBook
from proto import baton_pb2 as pb

SHORT_KEY_BYTES: Final = 8  # of a key's 32: a router that takes one block for another only places a request less well
PIECE: Final = 4096  # changes, and blocks of the snapshot, in one message: 64 KiB, and well below a millisecond to make


class KeySource(Protocol):
    """What is told of: the block pool, or the KV pool's book."""

    @property
    def key_log(self) -> KeyLog:
        """Its changes."""

    def keys_from(self, first: int, number: int, /) -> tuple[list[bytes], int | None]:
        """Keys of so many of its places, and where the next piece begins; None: there is none."""


class CacheFeed:
    """Every router that has asked, and its standing question."""

    def __init__(self, pool: KeySource, piece: int = PIECE, *, of_pool: bool = False) -> None:
        """`of_pool`: it is the KV pool's."""
        self._pool = pool
        self._piece = piece
        self._of_pool = of_pool
        self._asks: dict[ev.RouterId, pb.CacheAsk | None] = {}  # None: it has been answered
        self._told_to: int | None = None  # the change up to which no standing question has news; None: one is new

    @property
    def num_listeners(self) -> int:
        """Routers that want to know."""
        return len(self._asks)

    def ask(self, router: ev.RouterId, ask: pb.CacheAsk) -> None:
        """A router wants to know what follows; a question that stands is replaced."""
        self._asks[router] = ask
        self._told_to = None
        self._pool.key_log.switch(True)

    def forget(self, router: ev.RouterId) -> None:
        """Its session is lost."""
        if self._asks.pop(router, self) is not self and not self._asks:
            self._pool.key_log.switch(False)

    def forget_all(self) -> None:
        """All sessions are lost."""
        for router in tuple(self._asks):
            self.forget(router)

    def tell(self) -> list[ev.ToRouter]:
        """Answer every question to which there is news."""
        last = self._pool.key_log.last
        if last == self._told_to:
            return []
        self._told_to = last
        out: list[ev.ToRouter] = []
        for router, ask in self._asks.items():
            if ask is not None and (news := self._news(ask)) is not None:
                news.of_pool = self._of_pool
                self._asks[router] = None
                out.append(ev.ToRouter(router, pb.NodeMessage(cache=news)))
        return out

    def _news(self, ask: pb.CacheAsk) -> pb.CacheNews | None:
        log = self._pool.key_log
        changes = log.since(ask.taken, self._piece) if ask.HasField("taken") else None
        if changes is None:
            return self._with_piece(pb.CacheNews(taken=log.last), {}, 0)
        if not changes and not ask.HasField("next_block"):
            return None
        news = pb.CacheNews(after=ask.taken, taken=ask.taken + len(changes))
        next_block = ask.next_block if ask.HasField("next_block") else None
        last_words = dict(changes)
        if next_block is not None and news.taken == log.last:
            return self._with_piece(news, last_words, next_block)
        if next_block is not None:
            news.next_block = next_block
        return _with_keys(news, last_words)

    def _with_piece(self, news: pb.CacheNews, last_words: Mapping[bytes, bool | None], next_block: int) -> pb.CacheNews:
        keys, behind = self._pool.keys_from(next_block, self._piece)
        if behind is not None:
            news.next_block = behind
        return _with_keys(news, {**last_words, **dict.fromkeys(keys, True)})


def _with_keys(news: pb.CacheNews, last_words: Mapping[bytes, bool | None]) -> pb.CacheNews:
    news.stored = _short(key for key, is_held in last_words.items() if is_held)
    news.evicted = _short(key for key, is_held in last_words.items() if is_held is False)
    news.lacking = _short(key for key, is_held in last_words.items() if is_held is None)
    return news


def _short(keys: Iterable[bytes]) -> bytes:
    return b"".join([key[:SHORT_KEY_BYTES] for key in keys])


class TellingCore:
    """A role's core, and what its pool's cache and the KV pool hold told beside what the core says."""

    def __init__(self, core: ev.NodeCore, pool: BlockPool, piece: int = PIECE, book: PoolBook | None = None) -> None:
        self._core = core
        self._book = PoolBook() if book is None else book
        self._feeds = (CacheFeed(pool, piece), CacheFeed(self._book, piece, of_pool=True))

    def receive(self, event: ev.Event, now: float) -> Sequence[ev.Action]:
        """See NodeCore."""
        match event:
            case ev.FromRouter(router, message) if message.WhichOneof("kind") == "cache":
                self._feeds[message.cache.of_pool].ask(router, message.cache)
                return self._tell()
            case ev.PoolSaid():
                self._book.take(event)
                return self._tell()
            case ev.RouterLost(router):
                for feed in self._feeds:
                    feed.forget(router)
        return [*self._core.receive(event, now), *self._tell()]

    def forget_listeners(self) -> None:
        """Its sessions are closed, without a word to the core: the pool need keep no changes for them."""
        for feed in self._feeds:
            feed.forget_all()

    def tick(self, now: float) -> Sequence[ev.Action]:
        """See NodeCore."""
        return [*self._core.tick(now), *self._tell()]

    def next_deadline(self) -> float | None:
        """See NodeCore."""
        return self._core.next_deadline()

    def snapshot(self) -> Mapping[str, object]:
        """See NodeCore."""
        told = {"cache_listeners": self._feeds[0].num_listeners, "kv_pool_blocks_known": len(self._book)}
        return {**self._core.snapshot(), **told}

    def load(self) -> pb.LoadReport:
        """See NodeCore. With the KV pool's identity, by which routers know whom else what is there serves."""
        report = self._core.load()
        report.kv_pool = self._book.pool
        return report

    def _tell(self) -> list[ev.ToRouter]:
        return [action for feed in self._feeds for action in feed.tell()]
