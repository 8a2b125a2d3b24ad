"""What the KV pool's threads learn of it beside their calls, posted to the loop. Not here: who is told (cache_feed.py)."""

from __future__ import annotations

from collections.abc import Callable

from connector.kv_store import KvStore, KvStoreError
from node.events import Event, PoolSaid


class PoolWord:
    """Called by any thread of the pool's, behind a call that the store has answered."""

    def __init__(
        self, store: KvStore, post: Callable[[Event], None], forget: Callable[[tuple[bytes, ...]], None]
    ) -> None:
        """`forget` hears of keys that the pool lacks."""
        self._store = store
        self._post = post
        self._forget = forget

    def say(
        self,
        *,
        stored: tuple[bytes, ...] = (),
        found: tuple[bytes, ...] = (),
        lacking: tuple[bytes, ...] = (),
    ) -> None:
        """Post it; nothing without the pool's identity, which is asked for until it is known."""
        if lacking:
            self._forget(lacking)
        try:
            pool = self._store.identity()
        except KvStoreError:  # what it is like to the calls that matter, they say themselves
            return
        self._post(PoolSaid(pool, stored, found, lacking))
