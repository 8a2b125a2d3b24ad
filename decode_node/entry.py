"""Starts a decode node: the knobs, then this role's core in the shell that all nodes share.

Not here: how the shell is started (node/starting.py).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from decode_node.core import DecodeCore
from node.config import NodeConfig
from node.starting import start_node
from node.validate import SECRET_BYTES
from runtime.config import load
from runtime.process import end_while_loading, hold_standard_streams

if TYPE_CHECKING:
    from node.assembly import CoreParts
    from node.process import CoreMaker
    from node.roles import RoleName


def run(argv: Sequence[str] | None, make_others: Mapping[RoleName, CoreMaker] | None = None) -> int:
    """Run the node until a signal; its exit code. `make_others`: cores of the roles that it can take besides."""
    hold_standard_streams()
    end_while_loading()
    config = load(NodeConfig, "baton decode", "Take the KV of prompts from prefill nodes, generate the rest.", argv)
    return start_node("decode", config, {**(make_others or {}), "decode": make_core})


def make_core(parts: CoreParts) -> DecodeCore:
    """This role's core over a node's engine."""
    return DecodeCore(
        parts.identity, parts.limits, parts.scheduler, parts.pool, parts.fingerprint, parts.key_seed, draw_lease
    )


def draw_lease() -> tuple[int, bytes]:
    """A lease id that is not 0, and the secret that goes with it."""
    return secrets.randbelow(2**64 - 1) + 1, secrets.token_bytes(SECRET_BYTES)
