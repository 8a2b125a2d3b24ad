"""Frames over a stream socket that never blocks: what the two ends of a shm or a nixl link say, and how it is cut.

    shm    sender    HELLO (memory's descriptor beside it) ─►                    WRITE ─►  WRITE ─►  NOTICE ─►
           receiver                                       ◄─ WELCOME (mapped)          ◄─ TAKEN ◄─ TAKEN      ◄─ ANSWER
    nixl   sender    HELLO ─►             ATTACH ─►              (bytes) WRITE ─►  NOTICE ─►             STOPPED ─►
           receiver         ◄─ WELCOME (agent)   ◄─ ATTACHED (where)                        ◄─ ANSWER ◄─ OVER

A frame is its kind (1 byte), the length of its body (4 bytes) and the body. TAKEN answers one WRITE, in order: the receiver will
not look at that write's source blocks again. A WRITE over nixl says that the bytes stand in the receiver's memory. All that
arrives is hostile: a kind or a length that is not allowed breaks the channel before anything is allocated for it.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from enum import IntEnum
from typing import Final, NamedTuple

from connector.writes import MAX_FRAME_BYTES

_HEADER: Final = struct.Struct("<BI")
_READ_BYTES: Final = 64 << 10
_MAX_UNSENT_BYTES: Final = 4 * MAX_FRAME_BYTES

MAX_HELLO_BYTES: Final = 1024


class FrameKind(IntEnum):
    """What a frame is; the values travel."""

    HELLO = 1  # LinkHello
    WELCOME = 2  # shm: empty; nixl: LinkWelcome
    WRITE = 3  # DataMessage{write}
    TAKEN = 4  # empty
    NOTICE = 5  # DataMessage{commit}
    ANSWER = 6  # DataMessage{answer}
    ATTACH = 7  # Attach
    ATTACHED = 8  # Attached
    OVER = 9  # LeaseOver: the receiver has ended it
    STOPPED = 10  # LeaseOver: the sender writes no more into it
    MOVING = 11  # empty: what is under way needs the receiver's end to go on, until it hears something else


_KINDS: Final = frozenset(int(kind) for kind in FrameKind)


class Frame(NamedTuple):
    """One frame that arrived whole."""

    kind: FrameKind
    body: bytes


class ChannelBroken(Exception):
    """Nothing more will arrive; the message says why."""


class ChannelEnded(ChannelBroken):
    """The peer has closed its end."""


class Channel:
    """One end of a link's socket, owned from here on. One thread serves it; others may `send` and `keep`, whole frames."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._received = bytearray()
        self._unsent = bytearray()
        self._is_deaf = False  # the peer reads no more
        self._lock = threading.Lock()  # on what is unsent, and against writing to a descriptor that is closed

    def fileno(self) -> int:
        """The descriptor to poll."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether something waits until the socket takes it: then poll for writing, and `flush`."""
        return bool(self._unsent)

    def send(self, kind: FrameKind, body: bytes = b"") -> None:
        """Send, or keep for `flush`; raises ChannelBroken if the peer lets too much lie unread.

        A peer that reads no more is no error: what it sent before can still be received.
        """
        self.keep(kind, body)
        self.flush()

    def keep(self, kind: FrameKind, body: bytes = b"") -> None:
        """As `send`, but only keep it for the next `send` or `flush`: waking the peer costs more than most frames."""
        with self._lock:
            if len(self._unsent) > _MAX_UNSENT_BYTES:
                raise ChannelBroken("the peer does not read")
            self._unsent += _HEADER.pack(kind, len(body))
            self._unsent += body

    def flush(self) -> None:
        """Send what the socket takes."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        while self._unsent and not self._is_deaf:
            try:
                num_sent = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                self._is_deaf = True
            except OSError as fault:  # such as a kernel without memory for it
                raise ChannelBroken(f"cannot send: {fault.strerror}") from None
            else:
                del self._unsent[:num_sent]
        self._unsent.clear()

    def send_hello(self, body: bytes, descriptor: int) -> None:
        """Send the first frame, and with it the right to read what the descriptor stands for; raises ChannelBroken."""
        frame = _HEADER.pack(FrameKind.HELLO, len(body)) + body
        try:
            num_sent = socket.send_fds(self._socket, [frame], [descriptor])
        except OSError as fault:
            raise ChannelBroken(f"connection lost: {fault.strerror}") from None
        self._unsent += frame[num_sent:]

    def receive_hello(self) -> tuple[list[Frame], int | None] | None:
        """As `receive`, with the descriptor that came along, if one did; the caller closes it. None: nothing has come yet."""
        descriptors: list[int] = []
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, _READ_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            frames = self._cut(data, MAX_HELLO_BYTES)
        except BlockingIOError:
            return None
        except OSError as fault:
            raise ChannelBroken(f"connection lost: {fault.strerror}") from None
        except ChannelBroken:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        return frames, descriptors[0] if descriptors else None

    def receive(self, max_bytes: int = MAX_FRAME_BYTES) -> list[Frame]:
        """The frames, of `max_bytes` at most, that one read completes; raises ChannelBroken at the end, or for what is no frame."""
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as fault:
            raise ChannelBroken(f"connection lost: {fault.strerror}") from None
        return self._cut(data, max_bytes)

    @property
    def has_arrived(self) -> bool:
        """Whether there is something to `receive` now."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def is_open_at_peer(self) -> bool:
        """Whether the peer has not closed its end until now, whatever of what it sent is still to be read."""
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        return not poll.poll(0)

    def close(self) -> None:
        """Release the socket; what is unsent is lost. The peer can see it before this returns (`is_open_at_peer`)."""
        with self._lock:
            with contextlib.suppress(OSError):  # as after a peer's reset
                self._socket.shutdown(socket.SHUT_RDWR)  # closing alone says nothing while a forked child has it too
            with contextlib.suppress(OSError):
                self._socket.close()

    def _cut(self, data: bytes, max_bytes: int) -> list[Frame]:
        if not data:
            raise ChannelEnded("connection lost")
        self._received += data
        frames: list[Frame] = []
        begin = 0
        while len(self._received) - begin >= _HEADER.size:
            kind, num_bytes = _HEADER.unpack_from(self._received, begin)
            if kind not in _KINDS or num_bytes > max_bytes:
                raise ChannelBroken(f"a frame of kind {kind} and {num_bytes} bytes, {max_bytes} allowed")
            end = begin + _HEADER.size + num_bytes
            if len(self._received) < end:
                break
            frames.append(Frame(FrameKind(kind), bytes(self._received[begin + _HEADER.size : end])))
            begin = end
        del self._received[:begin]
        return frames
