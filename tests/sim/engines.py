"""What a node process decides with, all of it production code: pool, scheduler and the core of its role, over its KV memory."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from decode_node.core import DecodeCore
from engine.block_pool import BlockPool
from engine.fake_runner import BYTES_PER_TOKEN, FakeRunner
from engine.key_log import KeyLog
from engine.reserve import ReserveConfig
from engine.saving import SaveRules
from engine.scheduler import Scheduler, SchedulerConfig
from mixed_node.core import MixedCore
from node.cache_feed import TellingCore
from node.events import NodeCore
from node.identity import NodeIdentity, NodeLimits
from node.roles import find_leftover
from prefill_node.core import PrefillCore
from proto import baton_pb2 as pb
from tests.sim.models import Model
from tests.sim.scenario import BLOCK_SIZE, VOCAB_SIZE, Knobs

ROLES: Final = {"prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE, "mixed": pb.ROLE_MIXED}


def role_of(host: str) -> pb.Role.ValueType:
    """The role of the nodes on a host: its name says it."""
    return ROLES[host.partition("-")[0]]


@dataclass(frozen=True, slots=True)
class NodeParts:
    """One node process, but for its shell."""

    limits: NodeLimits
    pool: BlockPool
    scheduler: Scheduler
    memory: npt.NDArray[np.uint8]
    runner: FakeRunner
    core: TellingCore


@dataclass(frozen=True, slots=True)
class Life:
    """As what a node process begins, or goes on."""

    name: str
    role: pb.Role.ValueType
    model: Model
    before: NodeParts | None = None  # of the process whose role was another one; nothing touches them any more


def prefills_locally(role: pb.Role.ValueType, knobs: Knobs) -> bool:
    """Whether a node of this role only decodes, and computes prompts where it is asked to."""
    return role == pb.ROLE_DECODE and knobs.local_prefill_max_tokens is not None


def build_parts(life: Life, identity: NodeIdentity, knobs: Knobs, rng: random.Random) -> NodeParts:
    """A node that has just started, or taken a role; lease ids and secrets are drawn from `rng`."""
    role = life.role
    limits = NodeLimits(
        max_model_len=knobs.max_model_len,
        vocab_size=VOCAB_SIZE,
        max_attempts=knobs.max_attempts,
        max_fences=knobs.max_fences,
        lease_life_s=knobs.lease_life_s,
        reserve_wait_s=knobs.reserve_wait_s,
        max_waiting_reserves=knobs.max_waiting_reserves,
        preempt_move_s=knobs.preempt_move_s,
        reserves_for_running=knobs.reserves_for_running,
        reads_kv_pool=knobs.kv_pool_flaws is not None,
    )
    pool, scheduler, memory, runner = _build_engine(life, knobs) if life.before is None else _take_over(life, knobs)
    shared = (identity, limits, scheduler, pool, life.model.fingerprint, life.model.key_seed)
    prefill = PrefillCore(*shared)
    decode = DecodeCore(*shared, lambda: (rng.getrandbits(63) + 1, rng.randbytes(16)))
    core: NodeCore
    match role:
        case pb.ROLE_PREFILL:
            core = prefill
        case pb.ROLE_DECODE:
            core = decode
        case _:
            core = MixedCore(identity, scheduler, prefill, decode)
    return NodeParts(limits, pool, scheduler, memory, runner, TellingCore(core, pool, knobs.cache_piece))


_Engine = tuple[BlockPool, Scheduler, npt.NDArray[np.uint8], FakeRunner]


def _build_engine(life: Life, knobs: Knobs) -> _Engine:
    role = life.role
    pool, has_pool = BlockPool(knobs.num_blocks, BLOCK_SIZE), knobs.kv_pool_flaws is not None
    pool.key_log = KeyLog(knobs.key_log)
    config = SchedulerConfig(
        knobs.num_slots,
        knobs.max_batched_tokens,
        knobs.max_model_len,
        _beside_decodes(role, knobs),
        reserve=ReserveConfig(knobs.reserve_policy),
        saves=SaveRules(has_pool, has_pool and knobs.saves_finished, takes_out_broken=has_pool),
        resumes_preempted=role == pb.ROLE_MIXED,
        keeps_preempted=knobs.preempt_move_s > 0,
    )
    scheduler = Scheduler(config, pool, life.model.key_seed)
    memory = np.zeros((knobs.num_blocks, BYTES_PER_TOKEN * BLOCK_SIZE), dtype=np.uint8)
    return pool, scheduler, memory, FakeRunner(memory, BLOCK_SIZE, life.model.vocab_size, knobs.num_slots)


def _take_over(life: Life, knobs: Knobs) -> _Engine:
    """As node/incarnation.py."""
    before = life.before
    assert before is not None
    left = find_leftover(before.scheduler, before.pool, before.core.snapshot())
    assert not left, f"{life.name} takes another role with {left} left"
    before.core.forget_listeners()
    before.scheduler.take_role(life.role == pb.ROLE_MIXED, _beside_decodes(life.role, knobs))
    return before.pool, before.scheduler, before.memory, before.runner


def _beside_decodes(role: pb.Role.ValueType, knobs: Knobs) -> int | None:
    return knobs.local_prefill_chunk if prefills_locally(role, knobs) else None
