"""Starts a prefill node: the knobs, then this role's core in the shell that all nodes share.

Not here: how the shell is started (node/starting.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from node.config import NodeConfig
from node.starting import start_node
from prefill_node.core import PrefillCore
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
    config = load(NodeConfig, "baton prefill", "Compute prompts, hand their KV to decode nodes.", argv)
    return start_node("prefill", config, {**(make_others or {}), "prefill": make_core})


def make_core(parts: CoreParts) -> PrefillCore:
    """This role's core over a node's engine."""
    return PrefillCore(parts.identity, parts.limits, parts.scheduler, parts.pool, parts.fingerprint, parts.key_seed)
