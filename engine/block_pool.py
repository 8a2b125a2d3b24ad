"""Who owns each KV block of this node: counts, references, keys and promises. No bytes, no tokens, no sequences.

A block is in exactly one of five states, so the five counts always add up to the pool:

                 allocate (evicts if need be)
        +--------+ ------------------> +------+ --- free, no reference left, keyed ---> +--------+
        |  free  | <------------------ | used | <---------- acquire ------------------ | cached |
        +--------+  free, not keyed    +------+                                         +--------+
          |    ^                           ^                                                |
    lease |    | release_lease             | commit_lease                  allocate, lease  |
          v    |                           |                               (eviction: the   |
        +--------+ ------------------------+                               key is forgotten)|
        | leased | <------------------------------------------------------------------------+
        +--------+ -- quarantine --> +-------------+ -- release_lease --> free
                                     | quarantined |
                                     +-------------+

Only `used` blocks are counted by reference; every holder drops its own. A leased block belongs to a transfer that may be
writing into it, a quarantined one to a transfer that has not reported yet: neither is ever handed out.

A promise is room without a block: growth that somebody admitted may need later. Promises are kept out of what newcomers
may count on (`num_available`), never out of what their holder may allocate, so free + cached >= promised at all times, and
an allocation out of a promise cannot fail. Everything that takes a block out of free + cached without a promise, acquiring
a cached block included, is therefore bounded by `num_available`.

Every public operation is one transition: it checks all of its arguments, then changes all or nothing. Callers ask first
(`can_allocate`, `num_available`); use against these rules is a bug and raises.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Final

from engine.key_log import KeyLog

# In place of a number of references, which these blocks have none of.
_LEASED: Final = -1
_QUARANTINED: Final = -2


class BlockPoolError(Exception):
    """The pool was used against its rules: a bug in the caller."""


class BlockState(Enum):
    """What a block is doing."""

    FREE = "free"
    CACHED = "cached"  # no reference, content kept under its key, evictable
    USED = "used"
    LEASED = "leased"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks by state; the five always add up to the pool."""

    free: int
    cached: int
    used: int
    leased: int
    quarantined: int


class BlockPool:
    """All KV blocks of one node. One thread owns it."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """`num_blocks` blocks of `block_size` token positions each, all free."""
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens")
        self.num_blocks = num_blocks
        self.block_size = block_size
        # By block, all that says its state: a used one has references, a cached one none and a key, a free one neither.
        self._num_references = [0] * num_blocks  # or _LEASED, _QUARANTINED
        self._keys: list[bytes | None] = [None] * num_blocks
        self._block_of_key: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: block 0 goes first, the warmest next
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._num_leased = 0
        self._arrived: dict[int, None] = {}  # of committed leases, not taken yet; in order
        self._num_quarantined = 0
        self._num_promised = 0
        self.key_log = KeyLog()  # hears of every key that can be found, and no more

    # What there is

    def counts(self) -> BlockCounts:
        """Blocks by state."""
        free, cached = len(self._free), len(self._cached)
        used = self.num_blocks - free - cached - self._num_leased - self._num_quarantined
        return BlockCounts(free, cached, used, self._num_leased, self._num_quarantined)

    @property
    def num_available(self) -> int:
        """Blocks that a newcomer may count on: free and cached ones that nobody was promised."""
        return len(self._free) + len(self._cached) - self._num_promised

    @property
    def num_promised(self) -> int:
        """Blocks that those who were admitted may still ask for."""
        return self._num_promised

    def can_allocate(self, num_blocks: int, evict: bool = True) -> bool:
        """Whether allocate(), lease() or promise() of so many would succeed; `evict=False`: without evicting anything."""
        room = self.num_available if evict else min(len(self._free), self.num_available)
        return num_blocks <= room

    def is_cached(self, block_id: int) -> bool:
        """Whether acquiring this block would take it out of what is available (nobody references it)."""
        return self._num_references[block_id] == 0 and self._keys[block_id] is not None

    def num_freed_by(self, block_ids: Iterable[int]) -> int:
        """How many used blocks become available when a reference is dropped for each time that one is named here."""
        return sum(self._num_references[block_id] == number for block_id, number in Counter(block_ids).items())

    def find(self, key: bytes) -> int | None:
        """The block, used or cached, that holds this content."""
        return self._block_of_key.get(key)

    def keys_from(self, block_id: int, most: int) -> tuple[list[bytes], int | None]:
        """Keys that can be found, of `most` blocks from this one on, and the block behind them; None: there is none."""
        behind = block_id + most
        keys = [key for key in self._keys[block_id:behind] if key is not None]
        return keys, behind if behind < self.num_blocks else None

    # Promises

    def promise(self, num_blocks: int) -> None:
        """Set room aside for later allocate(promised=True)."""
        self._check_room(num_blocks, self.num_available, "promise")
        self._num_promised += num_blocks

    def unpromise(self, num_blocks: int) -> None:
        """Give back room that will not be needed."""
        self._check_room(num_blocks, self._num_promised, "unpromise")
        self._num_promised -= num_blocks

    # Used blocks

    def allocate(self, num_blocks: int, promised: bool = False) -> list[int]:
        """Take so many blocks, one reference each; least recently used cached ones are evicted when free ones are short.

        `promised=True` consumes as many promises, and cannot fail for want of blocks.
        """
        self._check_room(num_blocks, self._num_promised if promised else self.num_available, "allocate")
        if promised:
            self._num_promised -= num_blocks
        return self._take(num_blocks, 1)

    def acquire(self, block_ids: Sequence[int]) -> None:
        """Add one reference to each; cached blocks become used, which needs that many available."""
        self._check_states(block_ids, "acquire", BlockState.USED, BlockState.CACHED)
        self._check_room(sum(map(self.is_cached, block_ids)), self.num_available, "acquire")
        for block_id in block_ids:
            if self.is_cached(block_id):
                del self._cached[block_id]
            self._num_references[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop one reference from each; without any left a keyed block is cached, another one free.

        Of one call the last block counts as least recently used: a prefix cache is of no use without its leading blocks.
        """
        self._check_states(block_ids, "free", BlockState.USED)
        num_references, keys = self._num_references, self._keys
        for block_id in reversed(block_ids):
            num_references[block_id] -= 1
            if num_references[block_id] > 0:
                continue
            if keys[block_id] is None:
                self._free.append(block_id)
            else:
                self._cached[block_id] = None

    def publish(self, keys: Mapping[int, bytes]) -> None:
        """Let used blocks, full and final, be found, each by its key; one whose key another block has stays as it is."""
        self._check_states(keys.keys(), "publish", BlockState.USED)
        held, block_of_key = self._keys, self._block_of_key
        fresh = {block_id: key for block_id, key in keys.items() if held[block_id] != key}
        for block_id in fresh:
            if held[block_id] is not None:
                raise BlockPoolError(f"publish: block {block_id} already holds other content")
        found: list[bytes] = []
        for block_id, key in fresh.items():
            if block_of_key.setdefault(key, block_id) == block_id:
                held[block_id] = key
                found.append(key)
        self.key_log.add_each(found, True)

    def forget(self, block_ids: Sequence[int]) -> None:
        """Let nobody find these used blocks any more: they do not hold what their keys say. Who has them keeps them."""
        self._check_states(block_ids, "forget", BlockState.USED)
        for block_id in block_ids:
            if (key := self._keys[block_id]) is not None:
                del self._block_of_key[key]
                self._keys[block_id] = None
                self.key_log.add(key, False)

    # Leases

    def lease(self, num_blocks: int) -> list[int]:
        """Take so many blocks for a transfer to write into; they have no references until the lease is committed."""
        self._check_room(num_blocks, self.num_available, "lease")
        block_ids = self._take(num_blocks, _LEASED)
        self._num_leased += num_blocks
        return block_ids

    def commit_lease(self, block_ids: Sequence[int]) -> None:
        """The transfer is complete: the blocks are used, one reference each."""
        self._check_states(block_ids, "commit_lease", BlockState.LEASED)
        for block_id in block_ids:
            self._num_references[block_id] = 1
            self._arrived[block_id] = None
        self._num_leased -= len(block_ids)

    def take_arrived(self) -> tuple[int, ...]:
        """Blocks that a transfer filled and nobody asked about yet, whoever has them now: the next step's runner is told."""
        block_ids = tuple(self._arrived)
        self._arrived.clear()
        return block_ids

    def quarantine(self, block_ids: Sequence[int]) -> None:
        """The lease ended while something may still write into its blocks: keep them from everybody."""
        self._check_states(block_ids, "quarantine", BlockState.LEASED)
        for block_id in block_ids:
            self._num_references[block_id] = _QUARANTINED
        self._num_leased -= len(block_ids)
        self._num_quarantined += len(block_ids)

    def release_lease(self, block_ids: Sequence[int]) -> None:
        """The lease is over and nothing writes any more: leased or quarantined blocks are free."""
        self._check_states(block_ids, "release_lease", BlockState.LEASED, BlockState.QUARANTINED)
        for block_id in block_ids:
            if self._num_references[block_id] == _LEASED:
                self._num_leased -= 1
            else:
                self._num_quarantined -= 1
            self._num_references[block_id] = 0
            self._free.append(block_id)

    def snapshot(self) -> dict[str, object]:
        """Everything, block by block: for tests and for a look into a sick node."""
        return {
            "states": tuple(map(self._state_of, range(self.num_blocks))),
            "num_references": tuple(max(number, 0) for number in self._num_references),
            "keys": tuple(self._keys),
            "num_promised": self._num_promised,
        }

    # Inside

    def _state_of(self, block_id: int) -> BlockState:
        number = self._num_references[block_id]
        if number > 0:
            return BlockState.USED
        if number < 0:
            return BlockState.LEASED if number == _LEASED else BlockState.QUARANTINED
        return BlockState.FREE if self._keys[block_id] is None else BlockState.CACHED

    def _take(self, num_blocks: int, num_references: int) -> list[int]:
        num_free = min(num_blocks, len(self._free))
        block_ids = [self._free.pop() for _ in range(num_free)]
        if num_free < num_blocks:
            block_ids += self._evict(num_blocks - num_free)
        for block_id in block_ids:
            self._num_references[block_id] = num_references
        return block_ids

    def _evict(self, num_blocks: int) -> list[int]:
        keys, block_of_key, lost = self._keys, self._block_of_key, list[bytes]()
        block_ids = list(islice(self._cached, num_blocks))
        for block_id in block_ids:
            key = keys[block_id]
            assert key is not None, "only keyed blocks are cached"
            del self._cached[block_id], block_of_key[key]
            keys[block_id] = None
            lost.append(key)
        self.key_log.add_each(lost, False)
        return block_ids

    def _check_room(self, num_blocks: int, room: int, operation: str) -> None:
        if not 0 <= num_blocks <= room:
            raise BlockPoolError(f"{operation}: {num_blocks} blocks where {room} are to be had")

    def _check_states(self, block_ids: Collection[int], operation: str, *legal: BlockState) -> None:
        if len(block_ids) > 1 and len({*block_ids}) < len(block_ids):
            block_id, times = Counter(block_ids).most_common(1)[0]
            raise BlockPoolError(f"{operation}: block {block_id} named {times} times")
        num_references, num_blocks = self._num_references, self.num_blocks
        may_be_used = BlockState.USED in legal  # as nearly all are that steps name
        for block_id in block_ids:
            if not 0 <= block_id < num_blocks:
                raise BlockPoolError(f"{operation}: there is no block {block_id}")
            if may_be_used and num_references[block_id] > 0:
                continue
            if (state := self._state_of(block_id)) not in legal:
                raise BlockPoolError(f"{operation}: block {block_id} is {state.value}")
