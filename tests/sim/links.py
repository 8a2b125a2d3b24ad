"""The data plane on the simulated network: moves the steps of connector/memory_transport.py, each when it is its time.

The hub says which steps could be taken; here is decided when. A link keeps its order because of each link and kind one step at most
is pending. Every write that lands is watched: the bytes of a block may change only while a lease has the block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from connector.memory_link import LinkKey
from connector.memory_transport import LinkStep, MemoryHub
from engine.block_pool import BlockState
from tests.sim.kernel import Kernel
from tests.sim.network import Network
from tests.sim.nodes import SimNode

DROPS_AFTER_S: Final = 2.0  # a receiver tears a one-sided link down whose sender does not say that it stopped


class Links:
    """Every link between nodes."""

    def __init__(
        self, kernel: Kernel, network: Network, hub: MemoryHub, struck: Callable[[frozenset[str]], None]
    ) -> None:
        """`struck`: hears between which hosts an armed fault has found something to hurt."""
        self._kernel = kernel
        self._struck = struck
        self._network = network
        self._hub = hub
        self._nodes: dict[str, SimNode] = {}  # by transport address, dead ones too
        self._scheduled: dict[tuple[LinkKey, str], None] = {}
        self._waits_since: dict[LinkKey, float] = {}  # for the sender of a one-sided link to say that it stopped
        self._armed: list[tuple[str, str, str, int]] = []  # kind, sender's host, receiver's host, number

    def add(self, node: SimNode) -> None:
        """A new process with its transport."""
        self._nodes[node.transport.address] = node

    def arm(self, kind: str, sender: str, receiver: str, number: int) -> None:
        """Fault: at the next step that it can hurt."""
        self._armed.append((kind, sender, receiver, number))

    def disarm(self) -> None:
        """What has found nothing to hurt will not any more."""
        self._armed.clear()

    def look(self) -> None:
        """Something was done to a transport: schedule what can happen now."""
        due = self._hub.due()
        waiting = [step.key for step in due if step.kind == "drop"]
        self._waits_since = {key: self._waits_since.get(key, self._kernel.now) for key in waiting}
        for step in due:
            name = (step.key, step.kind)
            if name not in self._scheduled:
                self._scheduled[name] = None
                delay_s = DROPS_AFTER_S if step.kind == "drop" else self._network.delay(*self._ends_of(step))
                self._kernel.after(delay_s, lambda name=name: self._move(*name))  # type: ignore[misc]

    def _ends_of(self, step: LinkStep) -> tuple[str, str]:
        sender = self._nodes[step.key.sender].host
        receiver = sender if step.receiver is None else self._nodes[step.receiver].host
        return (receiver, sender) if step.kind in ("return", "drop") else (sender, receiver)

    def _move(self, key: LinkKey, kind: str) -> None:
        del self._scheduled[key, kind]
        index = self._find(key, kind)
        if index is None:
            return
        step = self._hub.due()[index]
        if (wake_at := self._held_until(step)) > self._kernel.now:
            self._scheduled[key, kind] = None
            self._kernel.at(wake_at, lambda: self._move(key, kind))
            return
        self._hurt(step)
        index = self._find(key, kind)  # a fault may have taken it away
        if index is not None:
            self._take(index, step)
        self.look()

    def _find(self, key: LinkKey, kind: str) -> int | None:
        steps = enumerate(self._hub.due())
        return next((index for index, step in steps if step.key == key and step.kind == kind), None)

    def _held_until(self, step: LinkStep) -> float:
        """When whoever does it is awake and the way is free. What lands does so by itself."""
        if step.kind == "land":
            return self._network.blocked_until(*self._ends_of(step))
        acting = step.receiver if step.kind in ("deliver", "drop") else step.key.sender
        paused_until = 0.0 if acting is None else self._nodes[acting].paused_until
        if step.kind == "drop":
            return max(paused_until, self._waits_since[step.key] + DROPS_AFTER_S)
        if step.kind in ("take", "close"):
            return paused_until
        return max(paused_until, self._network.blocked_until(*self._ends_of(step)))

    def _take(self, index: int, step: LinkStep) -> None:
        if step.kind == "drop":
            self._kernel.count("dropped links")
        if step.kind not in ("deliver", "land") or step.receiver is None:
            self._hub.step(index)
            return
        receiver = self._nodes[step.receiver]
        before, admitted = receiver.memory.copy(), receiver.admitted_blocks()
        self._hub.step(index)
        changed = np.flatnonzero((before != receiver.memory).any(axis=1))
        states = receiver.block_states() if len(changed) else ()
        if any(states[block_id] is BlockState.QUARANTINED for block_id in changed):
            self._kernel.count("writes into quarantine")
        for block_id in changed:
            is_lent = states[block_id] in (BlockState.LEASED, BlockState.QUARANTINED)
            assert is_lent and block_id in admitted, (
                f"{receiver.label}: a write landed in block {block_id}, which is {states[block_id].value}"
                f"{'' if block_id in admitted else ' and in no lease'}"
            )

    def _hurt(self, step: LinkStep) -> None:
        """Let an armed fault strike that this step gives an opportunity to."""
        if not self._armed or step.receiver is None:
            return
        hosts = (self._nodes[step.key.sender].host, self._nodes[step.receiver].host)
        for armed in list(self._armed):
            kind, sender, receiver, number = armed
            if (sender, receiver) != hosts:
                continue
            if kind == "flip bit":
                is_struck = self._hub.flip(step.key, number * 7)
            elif kind == "cut link":
                is_struck = self._hub.cut(step.key, number)
            else:
                is_struck = step.kind == "return" and self._hub.drop_answer(step.key)
            if is_struck:
                self._armed.remove(armed)
                self._kernel.count(kind)
                self._struck(frozenset(hosts))
                self._kernel.tell("NETWORK", kind, f"on the link from {sender} to {receiver}")
