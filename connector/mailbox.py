"""How the loop thread tells a transport thread what to do: a queue that wakes a poll.

A thread that polls sockets sleeps in the poll, so the queue has a file descriptor that becomes readable when something was put.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Mailbox(Generic[_T]):
    """Commands in order. `put` waits for nobody; one thread drains. Unbounded: the cores bound what they have under way."""

    def __init__(self) -> None:
        self._items: deque[_T] = deque()
        self._is_closed = False
        self._is_woken = False  # a wake-up is on its way: what is put meanwhile needs none
        # Held for no longer than a send that cannot block: nobody writes to a closed descriptor.
        self._lock = threading.Lock()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)

    def fileno(self) -> int:
        """The descriptor to poll for reading."""
        return self._wake_reader.fileno()

    def put(self, item: _T, *, wakes: bool = True) -> None:
        """Queue an item and wake the thread, or leave it for the next time that it wakes; does nothing after close."""
        with self._lock:
            if self._is_closed:
                return
            self._items.append(item)
            if wakes and not self._is_woken:
                self._is_woken = True
                self._wake_writer.send(b"\0")  # the only one: there is room

    def drain(self) -> list[_T]:
        """Take all that is queued."""
        if self._is_woken:
            with contextlib.suppress(BlockingIOError):  # about to be sent: it wakes the poll once more
                self._wake_reader.recv(1)
                self._is_woken = False  # who puts from here on sends one; what was put before is taken below
        return [self._items.popleft() for _ in range(len(self._items))]

    def close(self) -> None:
        """Release the descriptors; called by the thread that drains, as its last act, whenever that is."""
        with self._lock:
            self._is_closed = True
            self._items.clear()
            self._wake_reader.close()
            self._wake_writer.close()
