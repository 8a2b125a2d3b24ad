"""The cluster's KV pool, and every node's threads over it: slow, failing, full, corrupting and lying, as the seed wants it.

What node/kv_pool.py, its threads and a store do on real machines, in short: blocks are copied some time after a SaveBlocks and are
in the pool some time after that, or never; a look is answered with some number; a fetch writes into its blocks at some time before
its answer, and garbage into those that it does not bring. Everything is answered once, whatever the pool does. No attempt may fail
of any of it.

Checked here: what is copied is what its key says (W01, W02); a fetch writes into leased blocks, and into no other's.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import numpy as np

from engine.block_pool import BlockState
from node import events as ev
from proto.block_key import next_key
from tests.sim.kernel import Kernel
from tests.sim.scenario import BLOCK_SIZE, Knobs

if TYPE_CHECKING:
    from tests.sim.nodes import SimNode

_KV_BYTES: Final = 4 * BLOCK_SIZE  # of a block that mean something (engine/fake_runner.py)
_GARBAGE: Final = 0x55
_IDENTITY: Final = bytes(16)
_P_FLAW: Final = 0.4  # that a flaw shows in one call
_FEW_BLOCKS: Final = 6  # that a full pool holds
_MANY_BLOCKS: Final = 10_000
_GIVES_UP_S: Final = 2.0  # a call that fails or hangs is answered by then
_COPIES_WITHIN_S: Final = 0.05


class SimKvPool:
    """One for the whole world."""

    def __init__(self, kernel: Kernel, knobs: Knobs) -> None:
        self._kernel = kernel
        self._flaws = knobs.kv_pool_flaws or ()
        self._rng: random.Random = kernel.rng("kv pool")
        self._stored: OrderedDict[bytes, bytes] = OrderedDict()  # the least recently used first
        self._not_wanted: dict[bytes, None] = {}  # keys that were ever to be taken out: saves may begin behind one

    def ask(self, node: SimNode, action: ev.SaveBlocks | ev.TakeOutBlocks | ev.LookInPool | ev.FetchBlocks) -> None:
        """A node's core asks; the answer comes in its own time, if the node lives to hear it."""
        match action:
            case ev.SaveBlocks():
                self._kernel.after(self._rng.uniform(0, _COPIES_WITHIN_S), lambda: self._copy(node, action), node)
            case ev.TakeOutBlocks(keys):
                self._not_wanted |= dict.fromkeys(keys)
                self._kernel.after(self._delay_s(), lambda: self._take_out(node, action), node)
            case ev.LookInPool():
                self._kernel.count("kv looks")
                self._kernel.after(self._delay_s(), lambda: self._look(node, action), node)
            case ev.FetchBlocks():
                self._kernel.count("kv fetches")
                seconds = self._delay_s() + 0.0001 * len(action.blocks)
                self._kernel.after(seconds * self._rng.random(), lambda: self._scribble(node, action), node)
                self._kernel.after(seconds, lambda: self._fetch(node, action, node.seconds(seconds)), node)

    def _shows(self, flaw: str) -> bool:
        is_shown = flaw in self._flaws and self._rng.random() < _P_FLAW
        if is_shown:
            self._kernel.count(f"kv pool {flaw}")
        return is_shown

    def _delay_s(self) -> float:
        if self._shows("slow"):
            return self._rng.uniform(0.05, _GIVES_UP_S)
        return self._rng.uniform(0.0001, 0.002)

    # ---------------------------------------------------------------- in

    def _copy(self, node: SimNode, action: ev.SaveBlocks) -> None:
        states, previous = node.block_states(), node.model.key_seed
        copies: list[tuple[bytes, bytes]] = []
        for key, block_id in action.blocks:
            state = states[block_id].value
            assert states[block_id] is BlockState.USED, f"{node.label}: block {block_id} is to be saved and is {state}"
            kv = node.memory[block_id, :_KV_BYTES].copy()
            token_ids = (kv.view("<i4") - 1).tolist()
            befores = (previous,) if copies else (previous, *self._not_wanted)
            is_right = any(next_key(before, token_ids) == key for before in befores)
            assert is_right, f"{node.label}: block {block_id} is saved under another's key"
            copies.append((key, kv.tobytes()))
            previous = key
        self._kernel.count("kv saves")
        is_dropped = self._shows("fails")
        node.post(ev.BlocksStaged(action.save_id, 0 if is_dropped else len(copies)))
        if not is_dropped:
            delay_s, keys = self._delay_s(), tuple(key for key, _ in copies)
            self._kernel.after(delay_s, lambda: self._store(copies))
            self._kernel.after(delay_s, lambda: node.post(ev.PoolSaid(_IDENTITY, stored=keys)), node)

    def _store(self, copies: list[tuple[bytes, bytes]]) -> None:
        for key, kv in copies:
            before = self._stored.setdefault(key, kv)
            assert before == kv, "one key for two contents"
            self._stored.move_to_end(key)
        while len(self._stored) > (_FEW_BLOCKS if "full" in self._flaws else _MANY_BLOCKS):
            self._stored.popitem(last=False)
            self._kernel.count("kv pool full")

    def _take_out(self, node: SimNode, action: ev.TakeOutBlocks) -> None:
        for key in action.keys:
            self._kernel.count("kv blocks taken out", self._stored.pop(key, None) is not None)
        node.post(ev.PoolSaid(_IDENTITY, lacking=action.keys))

    # ---------------------------------------------------------------- out

    def _look(self, node: SimNode, action: ev.LookInPool) -> None:
        num_blocks = next((n for n, key in enumerate(action.keys) if key not in self._stored), len(action.keys))
        if self._shows("fails"):
            num_blocks = 0
        elif self._shows("lies"):
            num_blocks = self._rng.randint(0, len(action.keys))
        node.post(ev.PoolLooked(action.look_id, num_blocks))
        self._say(node, action.keys, num_blocks)

    def _scribble(self, node: SimNode, action: ev.FetchBlocks) -> None:
        states = node.block_states()
        for _, block_id in action.blocks:
            state = states[block_id]
            assert state is BlockState.LEASED, (
                f"{node.label}: a fetch writes into block {block_id}, which is {state.value}"
            )
            node.memory[block_id] = _GARBAGE

    def _fetch(self, node: SimNode, action: ev.FetchBlocks, seconds: float) -> None:
        self._scribble(node, action)
        num_blocks = 0
        for key, block_id in action.blocks:
            if self._shows("fails") or key not in self._stored:
                break
            if self._shows("corrupts"):  # found by its checksum, and dropped
                del self._stored[key]
                break
            self._stored.move_to_end(key)
            node.memory[block_id, :_KV_BYTES] = np.frombuffer(self._stored[key], np.uint8)
            num_blocks += 1
        self._kernel.count("kv blocks fetched", num_blocks)
        self._kernel.count("kv fetches short", num_blocks < len(action.blocks))
        node.post(ev.BlocksFetched(action.fetch_id, num_blocks, seconds))
        self._say(node, tuple(key for key, _ in action.blocks), num_blocks)

    def _say(self, node: SimNode, keys: tuple[bytes, ...], num_blocks: int) -> None:
        lacking = keys[num_blocks : num_blocks + 1]
        node.post(ev.PoolSaid(_IDENTITY, found=keys[:num_blocks], lacking=lacking))
