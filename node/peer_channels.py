"""gRPC's channels to other nodes, by address: one each, for as long as it is of use.

Where nobody listens gRPC connects four times a second for half an hour, whether or not anybody calls, and nodes that have gone add
up: so a channel without a connection is closed with the last call on it. One that had a connection and lost it while nobody
called tries nothing, and stays.

Who waits for a connection and gives up does not cancel the wait, which gRPC would keep for ever: it ends with the channel. Not
here: calls (handoff_client.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import grpc.aio

_TRIES: Final = (grpc.ChannelConnectivity.CONNECTING, grpc.ChannelConnectivity.TRANSIENT_FAILURE)


@dataclass(slots=True, eq=False)
class _Line:
    channel: grpc.aio.Channel
    num_users: int = 0


class PeerChannels:
    """Make and use it on the running loop."""

    def __init__(self, make: Callable[[str], grpc.aio.Channel], most: int) -> None:
        """`make`: a channel to an address; `most`: that are kept, be they used or not."""
        self._make = make
        self._most = most
        self._lines: dict[str, _Line] = {}  # least recently used first

    @asynccontextmanager
    async def use(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        """A channel that stays open until it is left, whatever becomes of it for others."""
        line = self._lines.pop(address, None) or _Line(self._make(address))
        self._lines[address] = line
        line.num_users += 1
        try:
            if len(self._lines) > self._most:
                oldest = self._lines.pop(next(iter(self._lines)))
                if not oldest.num_users:
                    await oldest.channel.close()
            yield line.channel
        finally:
            line.num_users -= 1
            if not line.num_users:
                if line.channel.get_state() in _TRIES:
                    self.forget(address, line.channel)
                if self._lines.get(address) is not line:
                    await line.channel.close()

    def forget(self, address: str, channel: grpc.aio.Channel) -> None:
        """Give this one to nobody any more."""
        if (line := self._lines.get(address)) is not None and line.channel is channel:
            del self._lines[address]

    async def close(self) -> None:
        """Close what is here; nobody uses any of them."""
        for line in self._lines.values():
            await line.channel.close()
        self._lines.clear()


async def connects(channel: grpc.aio.Channel, timeout_s: float) -> bool:
    """Whether there is a connection, or one comes about in time; of a channel that is in use."""
    if channel.get_state() is grpc.ChannelConnectivity.READY:
        return True
    ready = asyncio.create_task(channel.channel_ready())
    ready.add_done_callback(_ended)
    await asyncio.wait({ready}, timeout=timeout_s)
    return ready.done() and not ready.cancelled() and ready.exception() is None


def _ended(ready: asyncio.Task[None]) -> None:
    """Nobody waits for it any more, and its channel was closed."""
    if not ready.cancelled():
        ready.exception()
