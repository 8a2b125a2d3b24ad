"""What bench.block_index has nodes hold: conversations of equal length behind one beginning, each on one node, or on several. Pure.

Nothing is kept of it: a key follows from its conversation and its place there, and who holds a conversation from its number,
so a thousand nodes with a million blocks each take no memory beside the index that is measured.

*Apart*: every conversation is on one node. *Shared*: a quarter of a node's are on all nodes (documents, few-shot prompts),
half on some of its group of 16 (a tenant's; each on half of them, drawn), a quarter on it alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from router.key_table import Keys

PIECE: Final = 4096  # keys in a message, as of node/cache_feed.py
SHARED: Final = 64  # blocks that every node holds
GROUP: Final = 16  # nodes of a group
_ALL: Final = 1 << 40  # numbers of conversations on all nodes begin there, and those of groups further on
_GROUPS: Final = 1 << 41

Numbers = npt.NDArray[np.uint64]


class Asked(NamedTuple):
    """A prompt, and who holds all of it."""

    keys: Keys
    nodes: list[int]


class Caches:
    """Of so many nodes, with so many blocks each behind the shared ones."""

    def __init__(self, nodes: int, blocks: int, chain: int, *, are_shared: bool) -> None:
        """`chain`: blocks of a conversation."""
        self._nodes = nodes
        self._chain = chain
        self._num_chains = blocks // chain  # of a node
        self._are_shared = are_shared

    def pieces(self, node: int) -> Iterator[Keys]:
        """A node's keys, a message's worth at a time."""
        yield _keys_of(np.array([0], dtype=np.uint64), SHARED)
        conversations = self._conversations(node)
        step = max(PIECE // self._chain, 1)
        for first in range(0, len(conversations), step):
            yield _keys_of(conversations[first : first + step], self._chain)

    def draw(self, rng: random.Random) -> Asked:
        """The prompt of a node's next turn, drawn."""
        node = rng.randrange(self._nodes)
        conversations = self._conversations(node)
        number = conversations[rng.randrange(len(conversations))]
        own = _keys_of(np.array([number], dtype=np.uint64), self._chain)
        keys = np.concatenate((_keys_of(np.array([0], dtype=np.uint64), SHARED), own))
        return Asked(keys, [each for each in self._near(node, int(number)) if self._holds(each, int(number))])

    def _conversations(self, node: int) -> Numbers:
        """The numbers of a node's; 0 is the beginning that all share."""
        alone = np.arange(1, 1 + self._num_chains, dtype=np.uint64) + np.uint64(node << 24)
        if not self._are_shared:
            return alone
        quarter = self._num_chains // 4
        of_all = np.arange(_ALL, _ALL + quarter, dtype=np.uint64)
        first = _GROUPS + (node // GROUP << 24)
        of_group = np.arange(first, first + 4 * quarter, dtype=np.uint64)
        held = of_group[_mixed(of_group) >> np.uint64(node % GROUP) & np.uint64(1) == 1]
        return np.concatenate((of_all, held, alone[:quarter]))

    def _near(self, node: int, number: int) -> range:
        """Nodes that may hold what this one does."""
        if number < _ALL:
            return range(node, node + 1)
        first = 0 if number < _GROUPS else node // GROUP * GROUP
        return range(first, self._nodes if number < _GROUPS else min(first + GROUP, self._nodes))

    def _holds(self, node: int, number: int) -> bool:
        if number < _GROUPS:
            return True
        return bool(int(_mixed(np.array([number], dtype=np.uint64))[0]) >> node % GROUP & 1)


def _keys_of(conversations: Numbers, chain: int) -> Keys:
    """Keys of all blocks of these, the same ones each time."""
    places = np.arange(chain, dtype=np.uint64)
    return _mixed((conversations[:, None] << np.uint64(14)) + places).reshape(-1)


def _mixed(numbers: Numbers) -> Numbers:
    """SplitMix64 of each."""
    mixed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
