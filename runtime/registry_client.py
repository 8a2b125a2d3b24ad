"""A node's side of the registry: says again and again that it is there, to each router, until it goes.

A router that is down costs nothing but tries: 50 ms apart at first, 1 s at most. Not here: what an entry must be (listing.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

import grpc
import grpc.aio

from proto import baton_pb2 as pb
from proto.baton_pb2_grpc import RegistryStub
from runtime.logs import log_event
from runtime.session_driver import surface

LOG = logging.getLogger(__name__)

PERIOD_S: Final = 0.5  # a third of the registry's ttl
BACKOFF_MIN_S: Final = 0.05
BACKOFF_MAX_S: Final = 1.0
_CALL_TIMEOUT_S: Final = 0.5


class RegistryClient:
    """Keeps one node process registered at every router. Make and use it on the running loop."""

    def __init__(
        self,
        routers: Sequence[str],
        entry: Callable[[], pb.NodeEntry],
        on_refused: Callable[[str], None],
    ) -> None:
        """`routers`: host:port of each registry. `entry` is asked before each registration.

        `on_refused` hears, once, the sentence of a registry that does not take this node: the user must mend something, so the
        process should end with it. That router is asked no more.
        """
        self._routers = tuple(routers)
        self._entry = entry
        self._on_refused = on_refused
        self._tasks: list[asyncio.Task[None]] = []
        self._has_refused = False

    def start(self) -> None:
        """Begin to register."""
        for router in self._routers:
            task = asyncio.create_task(self._keep_registered(router), name=f"registration at {router}")
            task.add_done_callback(surface)
            self._tasks.append(task)

    async def deregister(self) -> None:
        """Register no more and say goodbye to every router; bounded by one call's timeout, whoever is down."""
        await self._stop()
        await asyncio.gather(*(self._say_goodbye(router) for router in self._routers))

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._tasks.clear()

    async def _keep_registered(self, router: str) -> None:
        backoff_s = BACKOFF_MIN_S
        is_registered: bool | None = None  # None: not tried yet
        while True:
            async with _channel(
                router
            ) as channel:  # a new one after each failure: what a partition swallowed stays dead
                stub = RegistryStub(channel)
                try:
                    while True:
                        reply = await stub.Register(self._entry(), timeout=_CALL_TIMEOUT_S)
                        if reply.refused:
                            self._refused(router, reply.refused)
                            return
                        if not is_registered:
                            log_event(LOG, logging.INFO, "registered", router=router)
                        is_registered = True
                        backoff_s = BACKOFF_MIN_S
                        await asyncio.sleep(PERIOD_S)
                except grpc.aio.AioRpcError as error:
                    if is_registered is not False:
                        log_event(LOG, logging.WARNING, "router_unreachable", router=router, reason=error.code().name)
                    is_registered = False
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)

    def _refused(self, router: str, sentence: str) -> None:
        log_event(LOG, logging.ERROR, "registration_refused", router=router, reason=sentence)
        if not self._has_refused:
            self._has_refused = True
            self._on_refused(sentence)

    async def _say_goodbye(self, router: str) -> None:
        async with _channel(router) as channel:
            try:
                await RegistryStub(channel).Deregister(self._entry().node, timeout=_CALL_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                log_event(LOG, logging.INFO, "deregistration_failed", router=router, reason=error.code().name)


def _channel(router: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(router, options=(("grpc.use_local_subchannel_pool", 1),))
