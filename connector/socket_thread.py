"""A thread that owns sockets and sleeps in its poll, and the mailbox through which the loop thread tells it what to do.

Not here: which sockets, and what is said on them (zmq_*.py, shm_*.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future
from threading import Thread
from typing import Generic, TypeVar

from connector.mailbox import Mailbox

_C = TypeVar("_C")


class Stop:
    """The last command: ends the thread."""


class SocketThread(ABC, Generic[_C]):
    """`start` it once; an exception in it is a bug, resolves `ended` and goes on to threading.excepthook."""

    def __init__(self, name: str) -> None:
        self._mailbox: Mailbox[_C | Stop] = Mailbox()
        self._is_running = True
        self.ended: Future[None] = Future()  # resolved when the thread has ended, whyever
        self._thread = Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Close the sockets and end the thread; False if it did not end in time: it closes them when it does."""
        self._mailbox.put(Stop())
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self._close_all()
            self._mailbox.close()
            self.ended.set_result(None)

    def _perform_commands(self) -> None:
        """Do what the mailbox holds."""
        for command in self._mailbox.drain():
            if isinstance(command, Stop):
                self._is_running = False
            else:
                self._perform(command)

    @abstractmethod
    def _serve(self) -> None:
        """Poll and act until a Stop was performed."""

    @abstractmethod
    def _perform(self, command: _C) -> None:
        """Do what one command says."""

    @abstractmethod
    def _close_all(self) -> None:
        """Close every socket, at the thread's end."""
