"""The process that has loaded torch and is forked for each node, as the launcher has it: started, asked for nodes, ended.

A pid alone might be another process's by the time that a signal is sent to it: each node has a descriptor besides, which the forker
opened before it could wait for the node's end. Not here: what is forked (node_forker.py), a node's log and ready file
(child_process.py).
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

_MAX_ANSWER_BYTES: Final = 4096
# `ps` looks for a process's arguments where its first ones were, and behind them, where its environment was: a node's need room.
_ROOM: Final = {"ROOM_FOR_ARGUMENTS": " " * 4096}


class ForkedProcess:
    """A node's process; asyncio's own Process has the same methods."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid = pid
        self._descriptor = descriptor
        self._exit_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def returncode(self) -> int | None:
        """Minus the signal's number if one ended it; None while it runs."""
        return self._exit_code.result() if self._exit_code.done() else None

    async def wait(self) -> int:
        """Its exit code, once it has ended."""
        return await asyncio.shield(self._exit_code)

    def send_signal(self, number: int) -> None:
        """Nothing, if it has ended."""
        if not self._exit_code.done():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    def kill(self) -> None:
        """SIGKILL, if it still runs."""
        self.send_signal(signal.SIGKILL)

    def end(self, exit_code: int) -> None:
        """The forker has told how it ended."""
        os.close(self._descriptor)
        self._exit_code.set_result(exit_code)


class Forker:
    """One at a time, and another one when it is needed and the last has ended."""

    def __init__(self, log_path: Path, environment: Mapping[str, str], on_end: Callable[[int], None]) -> None:
        """`environment`: of it and of its nodes. `on_end`: told its pid if it ends by itself, once its nodes have."""
        self.pid = 0
        self._log_path = log_path
        # Threads of numpy's would not be there in a copy; its products are not what a node computes with.
        self._environment = {**environment, **_ROOM, "OPENBLAS_NUM_THREADS": "1"}
        self._on_end = on_end
        self._opening = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None  # None: nobody is at its other end
        self._asked: deque[asyncio.Future[ForkedProcess]] = deque()  # answered in this order
        self._nodes: dict[int, ForkedProcess] = {}

    async def open(self) -> None:
        """Have a process load torch, which takes it seconds, if there is none. Raises OSError."""
        async with self._opening:
            if self._control is None:
                await self._start()

    async def fork(self, arguments: Sequence[str], log_fd: int) -> ForkedProcess:
        """A node that runs with these arguments and writes to this log, as soon as torch is loaded. Raises OSError."""
        await self.open()
        if self._control is None:
            raise _ended()
        answer: asyncio.Future[ForkedProcess] = asyncio.get_running_loop().create_future()
        socket.send_fds(self._control, [json.dumps({"arguments": list(arguments)}).encode()], [log_fd])
        self._asked.append(answer)
        return await answer

    async def close(self) -> None:
        """End it, and with it each node that still runs; it may be loading yet, and has nothing to undo."""
        self._end()
        if self._process is not None:
            if self._process.returncode is None:
                self._process.kill()
            await self._process.wait()

    async def _start(self) -> None:
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own.setblocking(False)
        with ExitStack() as undo:
            undo.callback(own.close)
            with theirs, self._log_path.open("wb") as log:
                command = ["deploy.node_forker", str(theirs.fileno()), str(os.getpid())]
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", *command),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self._environment,
                    pass_fds=(theirs.fileno(),),
                    process_group=0,
                )
            undo.pop_all()
        self.pid, self._control = self._process.pid, own
        asyncio.get_running_loop().add_reader(own, self._read)

    def _read(self) -> None:
        assert self._control is not None
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, _MAX_ANSWER_BYTES, 1)
        except BlockingIOError:
            return
        except OSError:  # it has died with a request unread
            data, descriptors = b"", []
        if data:
            self._take(json.loads(data), descriptors)
        else:
            self._end()
            self._on_end(self.pid)

    def _take(self, told: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        if "ended" in told:
            self._nodes.pop(told["ended"]).end(told["exit_code"])
            return
        answer = self._asked.popleft()
        if "errno" in told:
            if not answer.done():
                answer.set_exception(OSError(told["errno"], os.strerror(told["errno"])))
            return
        node = ForkedProcess(told["forked"], descriptors[0])
        self._nodes[node.pid] = node
        if answer.done():  # who asked has been cancelled
            node.kill()
        else:
            answer.set_result(node)

    def _end(self) -> None:
        """Nobody tells of the nodes any more: the kernel kills them."""
        if self._control is None:
            return
        asyncio.get_running_loop().remove_reader(self._control)
        self._control.close()
        self._control = None
        while self._asked:
            if not (answer := self._asked.popleft()).done():
                answer.set_exception(_ended())
        while self._nodes:
            _, node = self._nodes.popitem()
            node.kill()
            node.end(-signal.SIGKILL)


def _ended() -> OSError:
    return OSError(errno.ESRCH, "the process that loads torch for all nodes has ended")
