"""KV blocks by NIXL: the sender's hardware writes them into the receiver's memory, over RDMA, shared memory or TCP.

    sender's pool ──NIXL (UCX)──────────────────────────────────► receiver's pool, where the lease lies
                  ──TCP: who writes where, and what has landed──► checksum, events

Two threads per node, one for the links it opens (nixl_sender.py) and one for the links that others open to it (nixl_receiver.py),
both asleep when nothing moves. Nothing of it is encrypted.
"""

from __future__ import annotations

from connector.copying import Bytes
from connector.landing import Landing
from connector.link_names import user_name
from connector.nixl_agent import NixlLibrary
from connector.nixl_receiver import NixlReceiver
from connector.nixl_sender import NixlSender
from connector.transport import Emit
from connector.two_ends import TwoEnds
from connector.writes import checked_memory
from connector.zmq_options import LOOPBACK, Place
from proto import baton_pb2 as pb


class NixlTransport(TwoEnds):
    """Implements transport.Transport: both ends over one KV memory.

    memory: [num_blocks, block_bytes] u8, contiguous. `landing`: where writes land, if other transports of this node let them into
    the same memory; none: one of its own. `emit` is called from both threads, and from inside `revoke`; not after `stop` has
    returned. `checksums` is the same on all nodes. Raises nixl_agent.NixlFault where NIXL is not installed or does not run, OSError
    if `place` cannot be bound, ValueError for a memory or a name that does not fit.
    """

    def __init__(
        self,
        memory: Bytes,
        node_id: str,
        incarnation: int,
        emit: Emit,
        place: Place = LOOPBACK,
        landing: Landing | None = None,
        *,
        checksums: bool = True,
    ) -> None:
        checked_memory(memory)
        name = user_name(node_id, incarnation)
        library = NixlLibrary(place.host)
        receiver = NixlReceiver(library, memory, landing or Landing(memory, emit), emit, place, checksums)
        super().__init__(NixlSender(library, memory, name, emit, checksums), receiver)

    def reaches(self, endpoint: pb.Endpoint) -> bool:
        """Whether a link may succeed; over a network, only trying tells."""
        return endpoint.transport == "nixl"

    def _release(self) -> None:
        """The memory is the caller's."""
