"""What both ends of a zmq link agree on: how long silence may last, how much may queue.

What bounds memory: a link holds at most `QUEUED_MESSAGES` messages of 4 MiB at most at each end, besides what the two kernels
hold. Answers are small and not limited so tightly: a ROUTER that has no room drops what it should send.

The kernel finds a peer whose host is gone, and one that takes nothing any more, as over nixl; one that lives and says nothing is
the business of sessions and leases, as over shm. ZMTP's own heartbeats stay off: libzmq 4.3.5 ends the process that sends or
answers one on a connection that broke while its queue was full.
Source: https://github.com/zeromq/libzmq/issues/4364, https://man7.org/linux/man-pages/man7/tcp.7.html
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Final

import zmq

OPEN_S: Final = 1.8  # from connect to the end of the handshake: under the 2 s in which a dead node must be found
SILENCE_MS: Final = 1800  # of the peer's kernel, about what it was sent or asked; under 2 s as well
_IDLE_S: Final = 1  # until the kernel asks, and between two times; there is nothing less
QUEUED_MESSAGES: Final = 3
_CIPHER_BYTES: Final = 64  # that CURVE adds to a frame
MAX_SOCKETS: Final = 16_384  # three for each link

_M_TRIM_THRESHOLD: Final = -1  # malloc.h
_M_MMAP_THRESHOLD: Final = -3
_KEPT_BYTES: Final = 64 << 20
_HEAP_CHUNK_BYTES: Final = 32 << 20  # the most that glibc takes


@dataclass(frozen=True, slots=True)
class LinkRules:
    """What is equal on all nodes of a cluster."""

    has_checksums: bool = True  # without them only TCP's own stand against flipped bits
    is_encrypted: bool = False  # by CURVE


USUAL_RULES: Final = LinkRules()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node takes links."""

    host: str = "127.0.0.1"  # to listen at: a name or an address, 0.0.0.0 or :: for all
    port: int = 0  # 0: a free one
    known_as: str | None = None  # the host that senders dial; None: the address that was taken


LOOPBACK: Final = Place()

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]


def bound_link(link: Socket, address: str, max_frame_bytes: int) -> None:
    """Set what both ends share, before the socket `link` binds or connects to the address."""
    link.setsockopt(zmq.IPV6, int("[" in address))
    link.setsockopt(zmq.LINGER, 0)
    link.setsockopt(zmq.RCVHWM, QUEUED_MESSAGES)
    link.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes + _CIPHER_BYTES)
    link.setsockopt(zmq.HANDSHAKE_IVL, int(OPEN_S * 1000))
    link.setsockopt(zmq.TCP_MAXRT, SILENCE_MS)
    link.setsockopt(zmq.TCP_KEEPALIVE, 1)
    link.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _IDLE_S)
    link.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _IDLE_S)


def tcp_address(host: str, port: int | str) -> str:
    """As libzmq spells it."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def start_collector() -> None:
    """Have pyzmq start what it needs for messages that go out from where they lie: a thread with a context of its own.

    It would at the first of them. Without a descriptor or a thread left that would end the sending thread, or libzmq the process.
    """
    zmq.Frame(b"", copy=False)


def keep_buffers() -> None:
    """Have malloc keep the memory of messages for the next ones, in all of this process; does nothing where it cannot be told.

    Else each message of 1 MiB is mapped, faulted in page by page and unmapped again, which costs more than copying it. These are
    the thresholds that glibc itself arrives at in a process that has once freed 32 MiB, as nodes do when they load a model.
    Source: https://man7.org/linux/man-pages/man3/mallopt.3.html
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _HEAP_CHUNK_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
