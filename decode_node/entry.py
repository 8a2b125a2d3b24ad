"""Starts a decode node: the knobs, then this role's core in the shell that all nodes share.

Not here: the shell (node/process.py). It is imported late, because it loads torch, which takes its threads from an
environment that the knobs decide.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from decode_node.core import DecodeCore
from node.config import NodeConfig
from node.validate import SECRET_BYTES
from runtime.collecting import loading
from runtime.config import load, set_grpc_environment, set_thread_environment
from runtime.process import die_with_parent, end_while_loading, hold_standard_streams

if TYPE_CHECKING:
    from node.assembly import CoreParts
    from node.process import CoreMaker
    from node.roles import RoleName


def run(argv: Sequence[str] | None, make_others: Mapping[RoleName, CoreMaker] | None = None) -> int:
    """Run the node until a signal; its exit code. `make_others`: cores of the roles that it can take besides."""
    hold_standard_streams()
    end_while_loading()
    config = load(NodeConfig, "baton decode", "Take the KV of prompts from prefill nodes, generate the rest.", argv)
    die_with_parent(config.parent_pid)  # before what takes seconds to load
    set_thread_environment(config.num_threads)
    set_grpc_environment()
    with loading():
        from node.process import run_node

    return run_node("decode", config, {**(make_others or {}), "decode": make_core})


def make_core(parts: CoreParts) -> DecodeCore:
    """This role's core over a node's engine."""
    return DecodeCore(
        parts.identity, parts.limits, parts.scheduler, parts.pool, parts.fingerprint, parts.key_seed, draw_lease
    )


def draw_lease() -> tuple[int, bytes]:
    """A lease id that is not 0, and the secret that goes with it."""
    return secrets.randbelow(2**64 - 1) + 1, secrets.token_bytes(SECRET_BYTES)
