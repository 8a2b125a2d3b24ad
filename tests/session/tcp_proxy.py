"""A TCP proxy between a router and a node that does what networks do to a connection: cut it, or swallow what is sent."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self


class TcpProxy:
    """Listens on a port of its own and forwards to `target_port`, both on 127.0.0.1.

    `cut_after_bytes` counts what the node sent, so that a stream can be cut with frames under way.
    """

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.port = 0
        self.num_connections = 0
        self.num_cuts = 0

    @property
    def address(self) -> str:
        """host:port for the dialer."""
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        await asyncio.sleep(0)  # who has just been taken is in _tasks then
        self._flowing.set()
        self.cut()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._server.wait_closed()

    def cut(self) -> None:
        """Reset every connection; what is under way is gone. New ones are taken."""
        self.num_cuts += bool(self._writers)
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def black_hole(self) -> None:
        """Forward nothing any more, in either direction, while all connections stay open and new ones are taken."""
        self._flowing.clear()

    def heal(self) -> None:
        """Forward again, beginning with what was held up."""
        self._flowing.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            node_reader, node_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        except (OSError, asyncio.CancelledError):  # nobody is there, or the proxy closes
            writer.transport.abort()
            return
        pair = {writer, node_writer}
        self._writers |= pair
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, node_writer))
                group.create_task(self._pump(node_reader, writer))
        finally:
            self._writers -= pair
            for each in pair:
                each.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
            writer.write_eof()
        except OSError:
            writer.transport.abort()
