"""A router's side of a registry in Redis: looks there four times a second, and tells the router whom to dial.

A Redis that is down costs nothing but tries; nobody is unlisted for it (polled_listing.py). Not here: what a node writes there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

from runtime.logs import log_event
from runtime.polled_listing import PolledListing
from runtime.redis_store import Content, RedisStore
from runtime.registry_client import BACKOFF_MIN_S, RegistryUnreachable
from runtime.registry_server import RegistryHandler, report
from runtime.session import Peer
from runtime.session_driver import surface

LOG = logging.getLogger(__name__)

PERIOD_S: Final = 0.25  # with the ttl, a dead node is gone within 2 s


class RedisReader:
    """Keeps a router told. Make and use it on the running loop."""

    def __init__(
        self, handler: RegistryHandler, store: RedisStore, ttl_s: float, count: Callable[[str, int], None]
    ) -> None:
        """`count` hears of "failed_reads" and "skipped_values" (what no node has written), and how many more."""
        self._handler = handler
        self._store = store
        self._listing = PolledListing(ttl_s)
        self._count = count
        self._loop = asyncio.get_running_loop()
        self._refused: frozenset[Peer] = frozenset()  # of those that are there; each is logged once
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look."""
        self._task = asyncio.create_task(self._keep_reading(), name=f"reading {self._store.name}")
        self._task.add_done_callback(surface)

    async def close(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._store.hang_up()

    def snapshot(self) -> Mapping[str, object]:
        """What is listed: address by node; JSON-able."""
        return {"nodes": {entry.node.name: entry.grpc_address for entry in self._listing.entries()}}

    async def _keep_reading(self) -> None:
        backoff_s = BACKOFF_MIN_S
        is_readable = False
        told: set[str] = (
            set()
        )  # why it is not, of this outage: who starts a dead Redis may have one next that asks for a password
        while True:
            try:
                content = await self._store.read()
            except RegistryUnreachable as error:
                self._count("failed_reads", 1)
                if str(error) not in told:
                    log_event(LOG, logging.WARNING, "registry_unreachable", registry=self._store.name, reason=error)
                told.add(str(error))
                is_readable = False
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, self._store.backoff_max_s)
                continue
            if not is_readable:
                log_event(LOG, logging.INFO, "registry_read", registry=self._store.name, nodes=len(content.rows))
            is_readable = True
            told.clear()
            backoff_s = BACKOFF_MIN_S
            self._take(content)
            await asyncio.sleep(PERIOD_S)

    def _take(self, content: Content) -> None:
        if content.num_skipped:
            self._count("skipped_values", content.num_skipped)
        reading = self._listing.read(content.rows, content.gone, self._loop.time())
        report(self._handler, reading.changes)
        for peer, sentence in reading.refused:
            if peer not in self._refused:
                log_event(LOG, logging.WARNING, "registration_refused", node=peer.name[:64], reason=sentence)
        there = {Peer(row.entry.node.name, row.entry.node.incarnation) for row in content.rows}
        self._refused = (self._refused | {peer for peer, _ in reading.refused}) & there
