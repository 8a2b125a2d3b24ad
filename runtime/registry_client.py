"""A node's side of the registry: says again and again that it is there, to each registry, until it goes.

A registry that is down costs nothing but tries: 50 ms apart at first, then rarer. Not here: what an entry must be (listing.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from proto import baton_pb2 as pb
from proto.baton_pb2_grpc import RegistryStub
from runtime.credentials import NO_CREDENTIALS, Credentials
from runtime.grpc_reply import parsed
from runtime.listing import older_sentence
from runtime.logs import log_event
from runtime.session import Peer
from runtime.session_driver import surface

if TYPE_CHECKING:
    from proto.baton_pb2_grpc import RegistryAsyncStub

LOG = logging.getLogger(__name__)

PERIOD_S: Final = 0.5  # a third of the registry's ttl
BACKOFF_MIN_S: Final = 0.05
BACKOFF_MAX_S: Final = 1.0
# A clock that was set back makes who follows a dead process older than it, until that is missed: after TTL_S, and a call's time.
OLDER_PATIENCE_S: Final = 3.0
_CALL_TIMEOUT_S: Final = 0.5


class RegistryUnreachable(Exception):
    """The call had no effect that is known of; the message is one word for the log, and holds no secret."""


class Registry(Protocol):
    """Where a node can be registered. A call that failed leaves nothing behind that the next one could take for its own."""

    name: str  # for the log
    backoff_max_s: float  # between two tries

    async def register(self, entry: pb.NodeEntry) -> str:
        """Take an entry or its repetition: empty, or the sentence that refuses it. Raises RegistryUnreachable."""

    async def deregister(self, peer: Peer) -> None:
        """Forget a node process at its own wish. Raises RegistryUnreachable."""

    async def hang_up(self) -> None:
        """Drop the connection; the next call makes a new one."""


class EmbeddedRegistry:
    """The one in a router (registry_server.py), over gRPC. For one client: a call that fails hangs up, and ends all others."""

    backoff_max_s = BACKOFF_MAX_S

    def __init__(self, router: str, credentials: Credentials = NO_CREDENTIALS) -> None:
        """`router`: host:port of its registry."""
        self.name = router
        self._credentials = credentials
        self._channel: grpc.aio.Channel | None = None

    async def register(self, entry: pb.NodeEntry) -> str:
        """See Registry."""
        try:
            return parsed(await self._stub().Register(entry, timeout=_CALL_TIMEOUT_S)).refused
        except grpc.aio.AioRpcError as error:
            raise await self._unreachable(error) from None
        except DecodeError as error:
            raise RegistryUnreachable(str(error)) from None

    async def deregister(self, peer: Peer) -> None:
        """See Registry."""
        try:
            await self._stub().Deregister(peer.to_proto(), timeout=_CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise await self._unreachable(error) from None

    async def hang_up(self) -> None:
        """See Registry."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    def _stub(self) -> RegistryAsyncStub:
        if self._channel is None:
            options = (("grpc.use_local_subchannel_pool", 1),)
            self._channel = self._credentials.channel(self.name, options)
        return RegistryStub(self._channel)

    async def _unreachable(self, error: grpc.aio.AioRpcError) -> RegistryUnreachable:
        await self.hang_up()  # what a partition swallowed stays dead
        return RegistryUnreachable(error.code().name)


class RegistryClient:
    """Keeps one node process registered everywhere. Make and use it on the running loop."""

    def __init__(
        self,
        registries: Sequence[Registry],
        entry: Callable[[], pb.NodeEntry],
        on_refused: Callable[[str], None],
        on_registered: Callable[[], None] = lambda: None,
    ) -> None:
        """`entry` is asked before each registration; `on_registered` hears of each that was taken.

        `on_refused` hears, once, the sentence of a registry that does not take this node: the user must mend something, so the
        process should end with it. That registry is asked no more.
        """
        self._registries = tuple(registries)
        self._entry = entry
        self._on_refused = on_refused
        self._on_registered = on_registered
        self._tasks: list[asyncio.Task[None]] = []
        self._has_refused = False

    def start(self) -> None:
        """Begin to register."""
        for registry in self._registries:
            task = asyncio.create_task(self._keep_registered(registry), name=f"registration at {registry.name}")
            task.add_done_callback(surface)
            self._tasks.append(task)

    async def announce(self) -> None:
        """Tell everybody of a changed entry now, and wait for their word; bounded by a first call's timeout, whoever is down."""
        await self._stop()
        await asyncio.gather(*(self._repeat(registry) for registry in self._registries))
        self.start()

    async def deregister(self) -> None:
        """Register no more and say goodbye everywhere; bounded by a first call's timeout, whoever is down."""
        await self._stop()
        await asyncio.gather(*(self._say_goodbye(registry) for registry in self._registries))

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._tasks.clear()

    async def _keep_registered(self, registry: Registry) -> None:
        backoff_s = BACKOFF_MIN_S
        is_registered = False
        told: set[str] = set()  # why it could not be reached, of this outage
        waits_until: float | None = None  # for the one that is listed to be missed
        while True:
            entry = self._entry()
            try:
                refusal = await registry.register(entry)
            except RegistryUnreachable as error:
                if str(error) not in told:
                    log_event(LOG, logging.WARNING, "registry_unreachable", registry=registry.name, reason=error)
                told.add(str(error))
                is_registered = False
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, registry.backoff_max_s)
                continue
            if refusal:
                now = asyncio.get_running_loop().time()
                waits_until = waits_until or now + OLDER_PATIENCE_S
                is_older = refusal == older_sentence(Peer(entry.node.name, entry.node.incarnation))
                if is_older and not is_registered and now < waits_until:
                    await asyncio.sleep(PERIOD_S)
                    continue
                self._refused(registry, refusal)
                return
            if not is_registered:
                log_event(LOG, logging.INFO, "registered", registry=registry.name)
            is_registered = True
            told.clear()
            self._on_registered()
            backoff_s = BACKOFF_MIN_S
            await asyncio.sleep(PERIOD_S)

    def _refused(self, registry: Registry, sentence: str) -> None:
        log_event(LOG, logging.ERROR, "registration_refused", registry=registry.name, reason=sentence)
        if not self._has_refused:
            self._has_refused = True
            self._on_refused(sentence)

    async def _repeat(self, registry: Registry) -> None:
        await registry.hang_up()  # a registration that was cut short may still be on its way there
        try:
            await registry.register(self._entry())
        except RegistryUnreachable as error:  # it hears of it by the next repetition, if it comes back
            log_event(LOG, logging.INFO, "announcement_failed", registry=registry.name, reason=error)

    async def _say_goodbye(self, registry: Registry) -> None:
        await registry.hang_up()  # a registration that was cut short may still be on its way there
        node = self._entry().node
        try:
            await registry.deregister(Peer(node.name, node.incarnation))
        except RegistryUnreachable as error:
            log_event(LOG, logging.INFO, "deregistration_failed", registry=registry.name, reason=error)
        await registry.hang_up()
