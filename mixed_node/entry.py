"""Starts a mixed node: the knobs, then the cores of both roles, and its own, in the shell that all nodes share.

Not here: the shell (node/process.py). It is imported late, because it loads torch, which takes its threads from an
environment that the knobs decide. Nor the other roles, which a room of its own may not import: they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from mixed_node.core import FetchingPart, LeasingPart, MixedCore
from node.config import NodeConfig
from runtime.collecting import loading
from runtime.config import load, set_grpc_environment, set_thread_environment
from runtime.process import die_with_parent, end_while_loading, hold_standard_streams

if TYPE_CHECKING:
    from node.assembly import CoreParts
    from node.process import CoreMaker
    from node.roles import RoleName


def run(argv: Sequence[str] | None, make_cores: Mapping[RoleName, CoreMaker]) -> int:
    """Run the node until a signal; its exit code. `make_cores`: of the roles that it can take, this one included."""
    hold_standard_streams()
    end_while_loading()
    config = load(NodeConfig, "baton mixed", "Compute prompts and generate, in one process over one pool of KV.", argv)
    die_with_parent(config.parent_pid)  # before what takes seconds to load
    set_thread_environment(config.num_threads)
    set_grpc_environment()
    with loading():
        from node.process import run_node

    return run_node("mixed", config, make_cores)


def core_maker(
    make_prefill_core: Callable[[CoreParts], FetchingPart], make_decode_core: Callable[[CoreParts], LeasingPart]
) -> Callable[[CoreParts], MixedCore]:
    """What makes this role's core over a node's engine, of those of the others."""

    def make_core(parts: CoreParts) -> MixedCore:
        return MixedCore(parts.identity, parts.scheduler, make_prefill_core(parts), make_decode_core(parts))

    return make_core
