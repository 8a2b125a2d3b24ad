"""What a router's parent process and a worker say to each other: messages of proto/baton.proto, each behind its length.

Both ends are processes of ours, so what does not parse is a bug, and raises.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from proto import baton_pb2 as pb

_LENGTH_BYTES: Final = 4
_LIMIT: Final = 1 << 20  # of what is read ahead

In = TypeVar("In", bound=pb.ToWorker | pb.FromWorker)
Out = TypeVar("Out", bound=pb.ToWorker | pb.FromWorker)


class WorkerLink(Generic[In, Out]):
    """One end, on the running loop; made by `opened`."""

    def __init__(
        self, parse: Callable[[bytes], In], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._parse: Callable[[bytes], In] = parse
        self._reader = reader
        self._writer = writer

    @classmethod
    async def opened(cls, parse: Callable[[bytes], In], end: socket.socket) -> WorkerLink[In, Out]:
        """`parse`: what comes."""
        reader, writer = await asyncio.open_connection(sock=end, limit=_LIMIT)
        return cls(parse, reader, writer)

    def send(self, message: Out) -> None:
        """Say something; without effect once the other process has gone."""
        if not self._writer.is_closing():
            self._writer.write(framed(message))

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
