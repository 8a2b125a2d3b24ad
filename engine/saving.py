"""Blocks on their way to the KV pool: kept beyond the end of their sequence until they are copied, and no longer. Pure.

    its mark is answered (its blocks were named with the mark), or          finished: named in the next plan,
    it gives up waiting for another node                                    whose step is read
                             '------------------> take() --> copied <---------------'
                                                             staged(): one reference dropped

One reference on each block is the save's own, whoever else has the block, and whoever gets it in the meantime: it is full, so
nobody writes into it. What is kept counts as coming (Scheduler): others wait for it, and nobody gives way for the same need.
Named means in Plan.leaving_block_ids: on a device with memory of its own a block must be on the host's side before it is copied.
Whose rows have no numbers leaves keys instead, which are handed out by take_broken(): what is stored under them is not to be found.
Not here: which keys a sequence's blocks have (engine/room.py), the copying and the pool (node/kv_pool.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from engine.block_pool import BlockPool
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SaveRules:
    """Of whom the blocks are saved."""

    of_preempted: bool = False  # who gave way, and is not taken by another node as it is
    of_finished: bool = False  # who said its last token
    takes_out_broken: bool = False  # whether what is behind a row without numbers is to be taken out of the KV pool


@dataclass(frozen=True, slots=True)
class Save:
    """A sequence's leading full blocks, to be stored."""

    save_id: int
    blocks: tuple[tuple[bytes, int], ...]  # (key, block id), in the sequence's order

    def without(self, keys: Collection[bytes]) -> Save:
        """The blocks that have none of these keys."""
        return Save(self.save_id, tuple(block for block in self.blocks if block[0] not in keys))


class Saves:
    """What one scheduler keeps for the KV pool."""

    def __init__(self, pool: BlockPool, rules: SaveRules) -> None:
        self._pool = pool
        self._rules = rules
        self._kept: dict[int, Save] = {}  # whole; what the lists below have of it may be less
        self._unnamed: list[Save] = []
        self._named: list[tuple[int, Save]] = []  # by the step of the plan that names it
        self._ready: list[Save] = []
        self._broken: dict[bytes, None] = {}
        self._next_id = 0

    def __len__(self) -> int:
        """How many are not copied yet."""
        return len(self._kept)

    @property
    def num_references(self) -> int:
        """On blocks, that are the saves' own."""
        return sum(len(save.blocks) for save in self._kept.values())

    @property
    def of_preempted(self) -> bool:
        """Whether a plan names the blocks of who gives way with its mark."""
        return self._rules.of_preempted

    def block_ids(self) -> Iterator[int]:
        """A block as often as it is kept."""
        for save in self._kept.values():
            for _, block_id in save.blocks:
                yield block_id

    def preempted(self, sequence: Sequence) -> None:
        """It gave way, and is about to let go of its blocks, which the plan with its mark named."""
        if self._rules.of_preempted and sequence.keys:
            self._ready.append(self._keep(sequence))

    def finished(self, sequence: Sequence) -> None:
        """It has said its last token, and is about to let go of its blocks."""
        if self._rules.of_finished and sequence.keys:
            self._unnamed.append(self._keep(sequence))

    def broken(self, sequence: Sequence) -> None:
        """A row of it had no numbers, so that some block behind it has none, and the KV pool may have that, too."""
        if self._rules.takes_out_broken:
            # It may break in its first chunk, before it has keys.
            matched = sequence.spec.block_keys[: sequence.num_matched]
            keys = dict.fromkeys((*matched, *sequence.keys[len(matched) :]))
            self._broken |= keys
            self._leave_out(keys)

    def _leave_out(self, keys: Collection[bytes]) -> None:
        """Those of them that were not handed out yet never are, or they would be stored behind their removal."""
        self._unnamed = [save.without(keys) for save in self._unnamed]
        self._named = [(step_id, save.without(keys)) for step_id, save in self._named]
        self._ready = [save.without(keys) for save in self._ready]

    def _keep(self, sequence: Sequence) -> Save:
        save = Save(self._next_id, tuple(zip(sequence.keys, sequence.block_ids, strict=False)))
        self._next_id += 1
        self._pool.acquire([block_id for _, block_id in save.blocks])
        self._kept[save.save_id] = save
        return save

    def name(self, step_id: int) -> list[int]:
        """The blocks that the plan of this step is to name."""
        self._named += [(step_id, save) for save in self._unnamed]
        block_ids = [block_id for save in self._unnamed for _, block_id in save.blocks]
        self._unnamed.clear()
        return block_ids

    def read(self, step_id: int) -> None:
        """The step was read: what its plan named may be copied."""
        while self._named and self._named[0][0] <= step_id:
            self._ready.append(self._named.pop(0)[1])

    def take(self) -> list[Save]:
        """What may be copied and was not handed out yet; each is answered by staged()."""
        ready, self._ready = self._ready, []
        return ready

    def take_broken(self) -> tuple[bytes, ...]:
        """Keys of blocks that the KV pool should not have, handed out once."""
        keys = tuple(self._broken)
        self._broken.clear()
        return keys

    def staged(self, save_id: int) -> None:
        """Nobody copies its blocks any more. KeyError: there is no such save, or it was answered before."""
        self._pool.free([block_id for _, block_id in self._kept.pop(save_id).blocks])
