"""KV blocks over TCP, carried by zmq.

Two threads per node, one for the links it opens (zmq_sender.py) and one for the links that others open to it (zmq_receiver.py),
both asleep when nothing moves, both over one context with one libzmq I/O thread. Nothing is left behind in the file system.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import zmq

from connector.landing import Landing
from connector.link_names import user_name
from connector.transport import Emit
from connector.two_ends import TwoEnds
from connector.writes import checked_memory
from connector.zmq_options import (
    LOOPBACK,
    MAX_SOCKETS,
    USUAL_RULES,
    Context,
    LinkRules,
    Place,
    keep_buffers,
    start_collector,
)
from connector.zmq_receiver import ZmqReceiver
from connector.zmq_sender import ZmqSender
from proto import baton_pb2 as pb


class ZmqTransport(TwoEnds):
    """Implements transport.Transport: both ends over one KV memory.

    memory: [num_blocks, block_bytes] u8, contiguous. `landing`: where writes land, if other transports of this node let them into
    the same memory; none: one of its own. `emit` is called from both threads, and from inside `revoke`; not after
    `stop` has returned. Raises zmq.ZMQError if `place` cannot be bound, ValueError for a memory or a name that does not fit.
    """

    def __init__(
        self,
        memory: npt.NDArray[np.uint8],
        node_id: str,
        incarnation: int,
        emit: Emit,
        place: Place = LOOPBACK,
        landing: Landing | None = None,
        rules: LinkRules = USUAL_RULES,
    ) -> None:
        checked_memory(memory)
        name = user_name(node_id, incarnation)
        keep_buffers()
        self._context: Context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        try:
            receiver = ZmqReceiver(self._context, landing or Landing(memory, emit), emit, place, rules)
            start_collector()
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        super().__init__(ZmqSender(self._context, memory, name, emit, rules), receiver)

    def reaches(self, endpoint: pb.Endpoint) -> bool:
        """Whether a link may succeed; over a network, only trying tells."""
        return endpoint.transport == "zmq"

    def _release(self) -> None:
        self._context.term()
