"""A node that computes prompts for itself, mixed or decode, with its runner, and messages to feed it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from decode_node.core import DecodeCore
from engine.block_pool import BlockPool
from engine.fake_runner import BYTES_PER_TOKEN, FakeRunner
from engine.plan import Plan
from engine.reserve import ReserveConfig, ReservePolicy
from engine.saving import SaveRules
from engine.scheduler import Scheduler, SchedulerConfig
from mixed_node.core import MixedCore
from node import events as ev
from node.identity import NodeIdentity, NodeLimits
from prefill_node.core import PrefillCore
from proto import baton_pb2 as pb
from tests.cores.nodes import BLOCK_SIZE, FINGERPRINT, MAX_MODEL_LEN, ROUTER, SEED, VOCAB_SIZE

MIXED = NodeIdentity("mixed-0", 11)


@dataclass
class Mixed:
    """Everything of one node but its shell."""

    num_blocks: int = 20
    num_slots: int = 4
    max_batched_tokens: int = 12
    policy: ReservePolicy = "ratio"
    max_attempts: int = 64
    max_fences: int = 4096
    role: Literal["mixed", "decode"] = "mixed"
    identity: NodeIdentity = MIXED
    draw: Callable[[], tuple[int, bytes]] | None = None
    reads_kv_pool: bool = False
    saves: SaveRules = field(default_factory=SaveRules)
    pool: BlockPool = field(init=False)
    scheduler: Scheduler = field(init=False)
    core: MixedCore | DecodeCore = field(init=False)
    memory: NDArray[np.uint8] = field(init=False)
    runner: FakeRunner = field(init=False)
    plans: deque[Plan] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks, BLOCK_SIZE)
        reserve = ReserveConfig(self.policy)
        sizes = (self.num_slots, self.max_batched_tokens, MAX_MODEL_LEN)
        resumes = self.role == "mixed"
        config = SchedulerConfig(*sizes, reserve=reserve, resumes_preempted=resumes, saves=self.saves)
        self.scheduler = Scheduler(config, self.pool, SEED)
        bounds = (self.max_attempts, self.max_fences)
        limits = NodeLimits(MAX_MODEL_LEN, VOCAB_SIZE, *bounds, lease_life_s=1.0, reads_kv_pool=self.reads_kv_pool)
        serial = count(1)
        draw = self.draw or (lambda: (next(serial), bytes(16)))
        shared = (self.identity, limits, self.scheduler, self.pool, FINGERPRINT, SEED)
        decode = DecodeCore(*shared, draw)
        self.core = decode
        if self.role == "mixed":
            self.core = MixedCore(self.identity, self.scheduler, PrefillCore(*shared), decode)
        self.memory = np.zeros((self.num_blocks, BYTES_PER_TOKEN * BLOCK_SIZE), dtype=np.uint8)
        self.runner = FakeRunner(self.memory, BLOCK_SIZE, VOCAB_SIZE, self.num_slots)

    def feed(self, event: ev.Event, now: float = 0.0) -> list[ev.Action]:
        """What the core does about an event; its plans are kept for `step`."""
        return self.keep_plans(self.core.receive(event, now))

    def keep_plans(self, actions: list[ev.Action]) -> list[ev.Action]:
        """The actions but for the plans."""
        self.plans += [action.plan for action in actions if isinstance(action, ev.RunStep)]
        return [action for action in actions if not isinstance(action, ev.RunStep)]

    def step(self, now: float = 0.0) -> list[ev.Action]:
        """Run the oldest plan; its results are read."""
        return self.feed(ev.StepDone(self.runner.run(self.plans.popleft())), now)

    def send(self, message: pb.Dispatch | pb.Cancel, now: float = 0.0, router: ev.RouterId = ROUTER) -> list[ev.Action]:
        """A router says so."""
        if isinstance(message, pb.Dispatch):
            return self.feed(ev.FromRouter(router, pb.RouterMessage(dispatch=message)), now)
        return self.feed(ev.FromRouter(router, pb.RouterMessage(cancel=message)), now)

    def assert_empty(self) -> None:
        """Nobody holds anything."""
        counts, snapshot = self.pool.counts(), self.core.snapshot()
        assert (counts.used, counts.leased, counts.quarantined, self.pool.num_promised) == (0, 0, 0, 0)
        assert self.scheduler.num_free_slots == self.num_slots and not self.scheduler.num_waiting
        names = ("attempts", "reserves_unanswered", "leases", "branches", "waiting_reserves", "local_branches")
        assert not any(snapshot.get(name) for name in names), snapshot


def target_of(identity: NodeIdentity) -> pb.Target:
    """The node as a Dispatch names it."""
    return pb.Target(node=identity.to_proto(), grpc_address=identity.name)
