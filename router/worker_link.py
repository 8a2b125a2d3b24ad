"""What a router's parent process and a worker say to each other: messages of proto/baton.proto, each behind its length.

Both ends are processes of ours, so what does not parse is a bug, and raises. Saying something never waits, so what the other one
does not read lies in our memory: `on_hung` is called before that is more than there is.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from proto import baton_pb2 as pb

_LENGTH_BYTES: Final = 4
_LIMIT: Final = 1 << 20  # of what is read ahead
# Both together say that the other one hangs: who starts reads nothing for seconds, and a page of many workers is megabytes.
_MOST_UNREAD_BYTES: Final = 8 << 20  # all nodes that may be listed, at their usual 300 bytes, six times
_MOST_SLOW_BYTES: Final = 64 << 20  # of one that reads something all the while: it is slow, and memory is not for all
_HUNG_S: Final = 5.0  # with more than that: by then its sessions with nodes are lost, and its work with them

In = TypeVar("In", bound=pb.ToWorker | pb.FromWorker)
Out = TypeVar("Out", bound=pb.ToWorker | pb.FromWorker)


class WorkerLink(Generic[In, Out]):
    """One end, on the running loop; made by `opened`."""

    def __init__(
        self,
        parse: Callable[[bytes], In],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_hung: Callable[[int], None] | None,
    ) -> None:
        self._parse: Callable[[bytes], In] = parse
        self._reader = reader
        self._writer = writer
        self._on_hung = on_hung
        self._full_since: float | None = (
            None  # more than _MOST_UNREAD_BYTES at each `send` since then, and nothing was read
        )
        self._num_written = self._num_read = 0  # bytes; the second as of the last `send`

    @classmethod
    async def opened(
        cls, parse: Callable[[bytes], In], end: socket.socket, on_hung: Callable[[int], None] | None = None
    ) -> WorkerLink[In, Out]:
        """`parse`: what comes. `on_hung`: the other one hangs, so many bytes are unread, the link is closed; None: wait."""
        reader, writer = await asyncio.open_connection(sock=end, limit=_LIMIT)
        return cls(parse, reader, writer, on_hung)

    @property
    def num_unread(self) -> int:
        """Bytes that lie in our memory."""
        return self._writer.transport.get_write_buffer_size()

    def send(self, message: Out) -> None:
        """Say something; without effect once the other process has gone, or hangs."""
        self.write(framed(message))

    def write(self, content: bytes) -> None:
        """The same of a message as it travels, for who tells several."""
        if self._writer.is_closing():
            return
        unread = self.num_unread
        num_read, before = self._num_written - unread, self._num_read
        self._num_read = num_read
        if unread <= _MOST_UNREAD_BYTES or self._on_hung is None:
            self._full_since = None
        elif self._full_since is None or (num_read > before and unread <= _MOST_SLOW_BYTES):
            self._full_since = _now()
        elif _now() - self._full_since > _HUNG_S:
            self._writer.transport.abort()
            self._on_hung(unread)
            return
        self._num_written += len(content)
        self._writer.write(content)

    async def read(self) -> In | None:
        """The next message; None once the other end is closed."""
        try:
            length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "big")
            return self._parse(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def close(self) -> None:
        """Hang up."""
        self._writer.close()


def framed(message: pb.ToWorker | pb.FromWorker) -> bytes:
    """As it travels."""
    content = message.SerializeToString()
    return len(content).to_bytes(_LENGTH_BYTES, "big") + content


def read_blocking(end: socket.socket) -> pb.ToWorker:
    """A worker's first message, before it has a loop."""

    def exactly(number: int) -> bytes:
        data = b""
        while len(data) < number:
            part = end.recv(number - len(data))
            if not part:
                raise ConnectionError("the parent has gone")
            data += part
        return data

    return pb.ToWorker.FromString(exactly(int.from_bytes(exactly(_LENGTH_BYTES), "big")))


def _now() -> float:
    return asyncio.get_running_loop().time()
