"""KV blocks between processes of one host: the receiver copies them straight from the sender's memory, once.

    sender's pool (memfd, sealed) ──descriptor over an abstract unix socket──► mapped for reading by the receiver
                                  ──where the bytes are, per write──────────► copied into its own pool, hashed on the way

Two threads per node, one for the links it opens (shm_sender.py) and one for the links that others open to it (shm_receiver.py),
both asleep when nothing moves. Nothing has a name in a file system: whichever process is killed, the kernel cleans up.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from connector.landing import Landing
from connector.link_names import user_name
from connector.shm_receiver import ShmReceiver
from connector.shm_sender import ShmSender
from connector.shm_socket import find_connection
from connector.transport import Emit
from connector.two_ends import TwoEnds
from connector.writes import checked_memory
from proto import baton_pb2 as pb


class ShmTransport(TwoEnds):
    """Implements transport.Transport: both ends over one KV memory.

    memory: [num_blocks, block_bytes] u8, contiguous, all of what `descriptor` (a sealed memfd, which stays the caller's) holds.
    `landing`: where writes land, if other transports of this node let them into the same memory; none: one of its own. `emit` is
    called from both threads, and from inside `revoke`; not after `stop` has returned. `checksums` is the same on all nodes; without
    them a copy counts only if its link still stood behind it (shm_sender.py). Raises OSError where there are no abstract unix
    sockets, ValueError for a memory or a name that does not fit.
    """

    def __init__(
        self,
        memory: npt.NDArray[np.uint8],
        descriptor: int,
        node_id: str,
        incarnation: int,
        emit: Emit,
        landing: Landing | None = None,
        *,
        checksums: bool = True,
    ) -> None:
        checked_memory(memory)
        name = user_name(node_id, incarnation)
        receiver = ShmReceiver(landing or Landing(memory, emit), emit, checksums)
        super().__init__(ShmSender(memory, descriptor, name, emit, checksums), receiver)

    def reaches(self, endpoint: pb.Endpoint) -> bool:
        """Whether a process of this host, network namespace and user listens there now."""
        connection = find_connection(endpoint)
        if connection is None:
            return False
        connection.close()
        return True

    def _release(self) -> None:
        """The memory and its descriptor are the caller's."""
