"""KV blocks over TCP, carried by zmq.

Two threads per node, one for the links it opens (zmq_sender.py) and one for the links that others open to it (zmq_receiver.py),
both asleep when nothing moves, both over one context with one libzmq I/O thread. Nothing is left behind in the file system.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Final

import numpy as np
import numpy.typing as npt
import zmq

from connector.landing import Landing
from connector.link_names import user_name
from connector.transport import Emit, LeaseRef
from connector.writes import checked_memory
from connector.zmq_options import MAX_SOCKETS, Context, keep_buffers
from connector.zmq_receiver import ZmqReceiver
from connector.zmq_sender import ZmqSender
from proto import baton_pb2 as pb

_LOG = logging.getLogger(__name__)

_STOP_S: Final = 1.0


class ZmqTransport:
    """Implements transport.Transport: both ends over one KV memory.

    memory: [num_blocks, block_bytes] u8, contiguous. `landing`: where writes land, if other transports of this node let them into
    the same memory; none: one of its own. `emit` is called from both threads, and from inside `revoke`; not after
    `stop` has returned. `checksums` is the same on all nodes; without them only TCP's own stand against flipped bits. Raises
    zmq.ZMQError if `host` cannot be bound, ValueError for a memory or a name that does not fit.
    """

    def __init__(
        self,
        memory: npt.NDArray[np.uint8],
        node_id: str,
        incarnation: int,
        emit: Emit,
        host: str = "127.0.0.1",
        landing: Landing | None = None,
        *,
        checksums: bool = True,
    ) -> None:
        checked_memory(memory)
        name = user_name(node_id, incarnation)
        keep_buffers()
        self._context: Context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        try:
            self._receiver = ZmqReceiver(self._context, landing or Landing(memory, emit), emit, host, checksums)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self._sender = ZmqSender(self._context, memory, name, emit, checksums)
        self._is_stopped = False
        self._receiver.start()
        self._sender.start()

    @property
    def ended(self) -> tuple[Future[None], ...]:
        """Resolved when a thread has ended, whether of `stop` or of a bug: a node that is not stopping should die of it then."""
        return self._sender.ended, self._receiver.ended

    def reaches(self, endpoint: pb.Endpoint) -> bool:
        """Whether a link may succeed; over a network, only trying tells."""
        return endpoint.transport == "zmq"

    def open(self, link_id: str, endpoint: pb.Endpoint) -> None:
        """As Sender.open; what precedes "@" in the link id names the peer in the byte counts."""
        self._sender.open(link_id, endpoint)

    def write(self, link_id: str, lease: LeaseRef, blocks: Sequence[tuple[int, int]]) -> None:
        """As Sender.write."""
        self._sender.write(link_id, lease, blocks)

    def notify(self, link_id: str, payload: bytes) -> None:
        """As Sender.notify."""
        self._sender.notify(link_id, payload)

    def close(self, link_id: str) -> None:
        """As Sender.close."""
        self._sender.close(link_id)

    def endpoint(self) -> pb.Endpoint:
        """As Receiver.endpoint."""
        return self._receiver.endpoint()

    def admit(self, lease_id: int, secret: bytes, block_ids: Sequence[int]) -> None:
        """As Receiver.admit."""
        self._receiver.admit(lease_id, secret, block_ids)

    def revoke(self, lease_id: int) -> None:
        """As Receiver.revoke."""
        self._receiver.revoke(lease_id)

    def answer(self, reply_to: object, payload: bytes) -> None:
        """As Receiver.answer."""
        self._receiver.answer(reply_to, payload)

    def stop(self) -> None:
        """As Transport.stop; links end without LinkClosed, since nobody is left to be told."""
        if self._is_stopped:
            return
        self._is_stopped = True
        instant = time.monotonic() + _STOP_S
        is_ended = self._sender.stop(_STOP_S)
        is_ended &= self._receiver.stop(max(0.0, instant - time.monotonic()))
        if is_ended:
            self._context.term()
        else:  # a daemon thread that is stuck in `emit`: the process can end without it, this call must
            _LOG.error("event=transport_stuck")

    def snapshot(self) -> Mapping[str, object]:
        """JSON-able counters: `kv_bytes_sent` and `kv_bytes_received` per peer, `writes_refused` per code, links, leases."""
        return {**self._sender.snapshot(), **self._receiver.snapshot()}
