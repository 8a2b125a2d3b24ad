"""Starts a mixed node: the knobs, then the cores of both roles, and its own, in the shell that all nodes share.

Not here: how the shell is started (node/starting.py), and the other roles, which a room of its own may not import: they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from mixed_node.core import FetchingPart, LeasingPart, MixedCore
from node.config import NodeConfig
from node.starting import start_node
from runtime.config import load
from runtime.process import end_while_loading, hold_standard_streams

if TYPE_CHECKING:
    from node.assembly import CoreParts
    from node.process import CoreMaker
    from node.roles import RoleName


def run(argv: Sequence[str] | None, make_cores: Mapping[RoleName, CoreMaker]) -> int:
    """Run the node until a signal; its exit code. `make_cores`: of the roles that it can take, this one included."""
    hold_standard_streams()
    end_while_loading()
    config = load(NodeConfig, "baton mixed", "Compute prompts and generate, in one process over one pool of KV.", argv)
    return start_node("mixed", config, make_cores)


def core_maker(
    make_prefill_core: Callable[[CoreParts], FetchingPart], make_decode_core: Callable[[CoreParts], LeasingPart]
) -> Callable[[CoreParts], MixedCore]:
    """What makes this role's core over a node's engine, of those of the others."""

    def make_core(parts: CoreParts) -> MixedCore:
        return MixedCore(parts.identity, parts.scheduler, make_prefill_core(parts), make_decode_core(parts))

    return make_core
