"""A TCP proxy between two nodes that can harm what passes: flip a byte, stop reading, keep answers back, cut."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from types import TracebackType
from typing import Final, Self

_CHUNK: Final = 1 << 16


class TcpProxy:
    """Forwards host:port to a target port of 127.0.0.1; two threads per connection."""

    def __init__(
        self,
        target_port: int,
        flip_at: int | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        bytes_per_s: float = math.inf,
    ) -> None:
        """`flip_at`: a bit of this byte of the first connection's forward stream. `bytes_per_s`: of each, forward."""
        self._target_port = target_port
        self._flip_at = flip_at
        self._bytes_per_s = bytes_per_s
        self._sockets: list[socket.socket] = []
        self._may_forward = threading.Event()
        self._may_return = threading.Event()
        self._may_forward.set()
        self._may_return.set()
        self._is_closing = False
        self.num_flipped = 0
        self.num_forwarded = 0  # bytes
        self._listener = socket.socket()
        if bytes_per_s < math.inf:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _CHUNK)  # what is under way is little
        self._listener.bind((host, port))
        self._listener.listen()
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, name="proxy")]
        self._threads[0].start()

    @property
    def address(self) -> str:
        """Where senders dial instead."""
        return f"tcp://127.0.0.1:{self.port}"

    def stop_forwarding(self) -> None:
        """Read nothing more from senders; the connections stay up."""
        self._may_forward.clear()

    def keep_answers_back(self) -> None:
        """Let nothing more through to the senders."""
        self._may_return.clear()

    def cut(self) -> None:
        """Break every connection."""
        for end in self._sockets:
            with contextlib.suppress(OSError):  # ended by itself
                end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:  # closed
                return
            far = socket.create_connection(("127.0.0.1", self._target_port))
            self._sockets += [near, far]
            for source, sink, gate in ((near, far, self._may_forward), (far, near, self._may_return)):
                thread = threading.Thread(target=self._pump, args=(source, sink, gate), name="proxy")
                self._threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, gate: threading.Event) -> None:
        position = 0
        with contextlib.suppress(OSError):
            while True:
                gate.wait()
                chunk = bytearray(source.recv(_CHUNK))
                gate.wait()  # closed while we read: this goes no further either
                if not chunk or self._is_closing:
                    break
                if gate is self._may_forward:
                    if self._flip_at is not None and position <= self._flip_at < position + len(chunk):
                        chunk[self._flip_at - position] ^= 0x10
                        self.num_flipped += 1
                    self.num_forwarded += len(chunk)
                    time.sleep(len(chunk) / self._bytes_per_s)
                position += len(chunk)
                sink.sendall(chunk)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, at: TracebackType | None) -> None:
        self._is_closing = True
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._may_forward.set()
        self._may_return.set()
        self.cut()
        for thread in self._threads:
            thread.join()
        for end in self._sockets:
            end.close()
