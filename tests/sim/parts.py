"""What a simulated cluster is made of: sizes and odds, nodes, clients, and messages of RPCs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from connector.memory_transport import MemoryTransport
from connector.transport import ReceiverEvent, SenderEvent
from decode_node.core import DecodeCore
from engine.block_pool import BlockPool
from engine.fake_runner import FakeRunner
from engine.plan import Plan
from engine.scheduler import Scheduler
from node.identity import NodeIdentity
from prefill_node.core import PrefillCore
from proto import baton_pb2 as pb
from router import events as rev


@dataclass(frozen=True)
class Sizes:
    """How large the cluster is, and how hostile its network; probabilities are per opportunity."""

    num_prefill: int = 2
    num_decode: int = 2
    num_blocks: int = 40
    num_slots: int = 4
    max_batched_tokens: int = 16
    max_model_len: int = 96
    p_lose_rpc: float = 0.0
    p_repeat_reserve: float = 0.0
    p_lose_answer: float = 0.0
    p_cut_link: float = 0.0
    p_flip: float = 0.0
    p_abort: float = 0.0
    p_stop: float = 0.0


@dataclass
class Rpc:
    """One message of an RPC on its way; `on_lost` is what the caller sees instead of an answer."""

    deliver: Callable[[], None]
    on_lost: Callable[[], None]
    timeout_s: float


@dataclass
class SimNode:
    """A node: its core and the shell's work, done by the world."""

    identity: NodeIdentity
    role: pb.Role.ValueType
    core: PrefillCore | DecodeCore
    pool: BlockPool
    scheduler: Scheduler
    runner: FakeRunner
    transport: MemoryTransport
    plans: deque[Plan] = field(default_factory=deque)
    inbox: deque[SenderEvent | ReceiverEvent] = field(default_factory=deque)
    to_router: deque[pb.NodeMessage] = field(default_factory=deque)
    from_router: deque[pb.RouterMessage] = field(default_factory=deque)

    @property
    def ref(self) -> rev.NodeRef:
        return rev.NodeRef(self.identity.name, self.identity.incarnation)


@dataclass
class Client:
    """Who waits for one choice of a request, its right answer, and what came of it."""

    expected: tuple[int, ...]
    expected_reason: str
    received: list[int] = field(default_factory=list)
    end: rev.Finished | rev.Failed | str | None = None
