"""Who a node is and what it can hold: the values that its core is made with."""

from __future__ import annotations

from dataclasses import dataclass

from proto import baton_pb2 as pb


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """A node process; a restarted one has another incarnation."""

    name: str
    incarnation: int  # 64 random bits, not zero

    def to_proto(self) -> pb.PeerId:
        """The message form."""
        return pb.PeerId(name=self.name, incarnation=self.incarnation)


@dataclass(frozen=True, slots=True)
class NodeLimits:
    """Bounds that a core keeps."""

    max_model_len: int  # tokens of prompt and completion together
    vocab_size: int  # token ids are below it
    max_attempts: int = 256  # accepted attempts that have not ended; above it BUSY
    max_fences: int = 65_536  # branches whose fence floor is remembered; above it BUSY
    lease_life_s: float = 10.0  # of a lease that nobody renews
    rpc_timeout_s: float = 2.0  # of one Reserve or Renew, never longer than the deadline
    reserve_wait_s: float = 5.0  # how long a Reserve may wait for room, as its sender asks
    max_waiting_reserves: int = 64  # that wait at one node; above it NO_BLOCKS or BUSY at once
    preempt_move_s: float = 0.0  # how long who gave way is kept for another node that has room; 0: not at all
    reads_kv_pool: bool = False  # whether leading blocks of prompts are looked for in the cluster's KV pool
    reserves_for_running: bool = True  # whether room is left to those that decode when a Reserve is answered
