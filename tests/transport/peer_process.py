"""A peer of a transport's tests that can be killed, stopped, and heard."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from proto import baton_pb2 as pb


class Peer:
    """tests/transport/peer.py in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.endpoint = pb.Endpoint.FromString(bytes.fromhex(self._line()))

    def begin(self, target: pb.Endpoint | None) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write((target.SerializeToString().hex() if target else "") + "\n")
        self.process.stdin.flush()

    def let_go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def wait_for(self, event: str) -> None:
        while self._line() != event:
            pass

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(20)

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, "the peer has ended"
        return line


@contextmanager
def peer(kind: str = "shm", *more: str) -> Iterator[Peer]:
    """One that speaks what tests/transport/peer.py is told to, killed behind the context."""
    command = [sys.executable, "-m", "tests.transport.peer", kind, *more]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Peer(process)
        finally:
            process.kill()
