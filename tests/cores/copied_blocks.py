"""A KV pool as a world of cores has it: copies what it is given, in its own time, and sees that it is what its keys say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from node import events as ev
from proto.block_key import next_key
from tests.cores.nodes import BLOCK_SIZE, SEED


@dataclass
class CopiedBlocks:
    """Of all nodes; `waiting` are told that they were copied by calling them, in any order."""

    waiting: list[Callable[[], None]] = field(default_factory=list)
    stored: dict[bytes, list[int]] = field(default_factory=dict)  # token ids by key
    num_saves: int = 0

    def save(self, action: ev.SaveBlocks, memory: NDArray[np.uint8], feed: Callable[[ev.Event], None]) -> None:
        """`memory` is the fake runner's, [num_blocks, block_bytes] u8; `feed` takes the answer."""
        self.waiting.append(lambda: self._copy(action, memory, feed))

    def copy(self, index: int) -> None:
        """One of them."""
        self.waiting.pop(index)()

    def _copy(self, action: ev.SaveBlocks, memory: NDArray[np.uint8], feed: Callable[[ev.Event], None]) -> None:
        previous = SEED
        for key, block_id in action.blocks:
            token_ids = (memory[block_id, : 4 * BLOCK_SIZE].view("<i4") - 1).tolist()
            assert -1 not in token_ids and next_key(previous, token_ids) == key, (
                "the block does not hold what its key says"
            )
            self.stored[key] = token_ids
            previous = key
        self.num_saves += 1
        feed(ev.BlocksStaged(action.save_id, len(action.blocks)))
