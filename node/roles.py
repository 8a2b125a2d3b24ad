"""The roles of a node process, and what of its engine goes by them. Pure.

A process may change its role: model, KV memory, pool, scheduler and runner stay, and everything else that a process of that
role has is made anew (node/incarnation.py). What must not be there then is told here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from engine.block_pool import BlockPool
from engine.scheduler import Scheduler
from node.config import NodeConfig
from proto import baton_pb2 as pb

RoleName = Literal["prefill", "decode", "mixed"]

ROLES: Final[Mapping[RoleName, pb.Role.ValueType]] = {
    "prefill": pb.ROLE_PREFILL,
    "decode": pb.ROLE_DECODE,
    "mixed": pb.ROLE_MIXED,
}


@dataclass(frozen=True, slots=True)
class RoleRules:
    """What a role asks of the scheduler; see SchedulerConfig."""

    resumes_preempted: bool
    max_prompt_tokens_beside_decodes: int | None


def rules_of(role: RoleName, config: NodeConfig) -> RoleRules:
    """Those of a role. What gives way on a decode node is placed anew: there may be a prefill node, or a decode node with room."""
    return RoleRules(role == "mixed", config.local_prefill_chunk if role == "decode" else None)


def prefills_locally(role: RoleName, config: NodeConfig) -> bool:
    """Whether a node of this role computes prompts that stay with it."""
    return role == "mixed" or (role == "decode" and config.local_prefill == "on")


def role_named(role: int) -> RoleName | None:
    """The name of a role of the protocol's; None: there is none such."""
    return next((name for name, each in ROLES.items() if each == role), None)


def find_leftover(scheduler: Scheduler, pool: BlockPool, snapshot: Mapping[str, object]) -> str:
    """What of an earlier role something may still touch, as words; empty when there is nothing. `snapshot`: its core's.

    The prefix cache stays: its blocks are full, final, and nobody's.
    """
    counts = pool.counts()
    left = {
        "sequences": int(scheduler.has_sequences),
        "reserved slots": scheduler.num_slots - scheduler.num_free_slots,
        "blocks in use": counts.used,
        "leased blocks": counts.leased,
        "quarantined blocks": counts.quarantined,
        "promised blocks": pool.num_promised,
        "questions to the KV pool": _number(snapshot, "kv_looks") + _number(snapshot, "kv_fetches"),
    }
    return ", ".join(f"{number} {what}" for what, number in left.items() if number)


def _number(snapshot: Mapping[str, object], name: str) -> int:
    number = snapshot.get(name, 0)
    assert isinstance(number, int)
    return number
