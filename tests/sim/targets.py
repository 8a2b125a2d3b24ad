"""Why a router names no target for what is to move, by what it knows of its nodes: they have no room, or it has moved enough.

It is not asked why: here is written down whom it may not name, and whoever else has room could have been.
"""

from __future__ import annotations

from router.core import RouterCore
from router.entrance import RouterCoreConfig
from router.events import NodeRef
from tests.sim.clients import Client

REASONS = ("no room for what", "enough moves of what")  # what a host runs


class Targets:
    """What one router has named to the holders of its branches: who failed one is not named again for a while."""

    def __init__(self, core: RouterCore, config: RouterCoreConfig) -> None:
        self._core = core
        self._config = config
        self._named: dict[tuple[str, int], NodeRef] = {}  # by request id and choice
        self._held_off: dict[tuple[str, int, NodeRef], float] = {}

    def reason(self, client: Client, choice: int, holder: NodeRef, target: NodeRef | None, now: float) -> str | None:
        """One of the reasons why there is no target, for the answer that the holder gets; None: there is one, or no reason."""
        name = client.plan.name
        if (before := self._named.pop((name, choice), None)) is not None:  # it asks again, so that was in vain
            self._held_off[name, choice, before] = now + self._config.move_retry_s
        if target is not None:
            self._named[name, choice] = target
            return None
        if client.trials[choice].num_moved >= self._config.max_moves:
            return REASONS[1]
        is_unscored = client.plan.wants_prompt_logprobs and not client.choices[choice].is_prompt_scored
        if is_unscored or client.trials[choice].num_attempts > 1:  # who refused an attempt is held off, too
            return REASONS[0]
        total_tokens = len(client.plan.prompt) + client.plan.max_tokens
        nodes = {node.ref: node for node, circuit in self._core.nodes() if circuit == "closed"}
        could_be = [
            ref
            for ref, node in nodes.items()
            if ref != holder
            and holder in nodes
            and node.can_take_work
            and node.fingerprint == nodes[holder].fingerprint
            and total_tokens <= node.max_total_tokens
            and len(node.branches) < node.num_slots
            and node.has_blocks_for(total_tokens)
            and self._held_off.get((name, choice, ref), now) <= now
        ]
        return None if could_be else REASONS[0]
