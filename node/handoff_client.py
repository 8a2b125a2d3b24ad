"""The handoff's control calls to other nodes: Reserve, Renew, Release.

Every call is a task of its own with a time limit of its own, so that a slow or dead peer delays nobody else's call. What
became of it goes to the core as an event; no answer (unreachable, timed out, refused by gRPC) is an answer too: None.
Not here: what follows from it. The bytes of the KV take another way (connector).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Final, TypeVar

import grpc

from node.events import RenewAnswered, ReserveAnswered, SendRelease, SendRenew, SendReserve
from node.peer_channels import PeerChannels, connects
from proto import baton_pb2 as pb
from proto import baton_pb2_grpc as pb_grpc
from runtime.credentials import NO_CREDENTIALS, Credentials
from runtime.logs import log_event

LOG = logging.getLogger(__name__)

Reply = TypeVar("Reply")

RELEASE_TRIES: Final = 5
RELEASE_TIMEOUT_S: Final = 1.0  # of one try
RELEASE_BACKOFF_S: Final = 0.05  # doubles with every try
MAX_CHANNELS: Final = 256  # addresses of nodes that came and went must not add up for ever

# gRPC's own reconnect backoff begins at 1 s and grows to 2 minutes: far beyond a lease's life.
_CHANNEL_OPTIONS: Final = (
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1_000),  # which is also how long one connect may take
    ("grpc.max_reconnect_backoff_ms", 250),
    ("grpc.enable_retries", 0),  # the core decides what is tried again
    # A Reserve may wait for seconds at a full node. That a partition has swallowed it is found as soon as a session would find it.
    ("grpc.keepalive_time_ms", 400),
    ("grpc.http2.ping_timeout_ms", 1_500),  # keepalive_timeout_ms alone is not heeded: it would take a minute
    ("grpc.http2.max_pings_without_data", 0),
)
# What a node's server must allow, or it closes connections for too many pings.
SERVER_OPTIONS: Final = (("grpc.http2.min_ping_interval_without_data_ms", 100),)
CONNECT_TIMEOUT_S: Final = 2.0


class HandoffClient:
    """Performs the core's SendReserve, SendRenew and SendRelease."""

    def __init__(
        self,
        post: Callable[[ReserveAnswered | RenewAnswered], None],
        spawn: Callable[[Coroutine[None, None, None]], asyncio.Task[None]],
        credentials: Credentials = NO_CREDENTIALS,
    ) -> None:
        """`post` takes the outcome; `spawn` starts a task whose exceptions end the process (TaskGroup.create_task)."""
        self._post = post
        self._spawn = spawn
        self._credentials = credentials
        self._channels = PeerChannels(self._channel, MAX_CHANNELS)
        self._tasks: set[asyncio.Task[None]] = set()

    def reserve(self, action: SendReserve) -> None:
        """Ask for blocks; ReserveAnswered follows."""
        self._track(self._reserve(action))

    def renew(self, action: SendRenew) -> None:
        """Keep a lease alive; RenewAnswered follows."""
        self._track(self._renew(action))

    def release(self, action: SendRelease) -> None:
        """Give an attempt's lease back, best effort; nothing follows."""
        self._track(self._release(action))

    @property
    def num_under_way(self) -> int:
        """Calls that have not ended."""
        return len(self._tasks)

    async def close(self) -> None:
        """Cancel what is under way and close the channels."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channels.close()

    def _track(self, call: Coroutine[None, None, None]) -> None:
        task = self._spawn(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reserve(self, action: SendReserve) -> None:
        reply: pb.ReserveReply | None = None
        async with self._channels.use(action.address) as channel:
            # A port that refuses may be a node that restarts.
            if await connects(channel, min(CONNECT_TIMEOUT_S, action.timeout_s)):
                call = _stub(channel).Reserve(action.request, timeout=action.timeout_s)
                reply = await _answer("reserve", action.address, call)
            else:
                log_event(LOG, logging.INFO, "no_answer", call="connect", peer=action.address)
                self._channels.forget(action.address, channel)  # the next one shows the certificates of its day
            self._post(ReserveAnswered(action.key, reply))

    async def _renew(self, action: SendRenew) -> None:
        async with self._channels.use(action.address) as channel:
            call = _stub(channel).Renew(action.request, timeout=action.timeout_s, wait_for_ready=True)
            self._post(RenewAnswered(action.key, await _answer("renew", action.address, call)))

    async def _release(self, action: SendRelease) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + action.request.ms_left / 1000
        request = pb.ReleaseRequest()
        request.CopyFrom(action.request)
        for attempt in range(RELEASE_TRIES):
            # Time passes between tries; the fence that the peer raises stands no longer than the request's deadline.
            request.ms_left = max(0, int((deadline - loop.time()) * 1000))
            async with self._channels.use(action.address) as channel:
                call = _stub(channel).Release(request, timeout=RELEASE_TIMEOUT_S)
                if await _answer("release", action.address, call) is not None:
                    return
            pause_s = RELEASE_BACKOFF_S * 2**attempt
            if loop.time() + pause_s >= deadline:
                return
            await asyncio.sleep(pause_s)

    def _channel(self, address: str) -> grpc.aio.Channel:
        # Of `ipv4:1`, a host and a port, gRPC would make an address of its own that it cannot read: waiting for a connection
        # there never gives the loop back, whatever time was set.
        return self._credentials.channel(f"dns:///{address}", _CHANNEL_OPTIONS)


def _stub(channel: grpc.aio.Channel) -> pb_grpc.NodeAsyncStub:
    return pb_grpc.NodeStub(channel)


async def _answer(what: str, address: str, call: Awaitable[Reply]) -> Reply | None:
    """The reply, or None if the peer gave none."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        told = {"code": error.code().name, "detail": error.details()}
        log_event(LOG, logging.INFO, "no_answer", call=what, peer=address, **told)
        return None
