"""The block pool against a model that is too naive to be wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.block_pool import BlockCounts, BlockPool, BlockPoolError, BlockState
from tests.thorough import examples

KEYS = tuple(bytes([n]) * 4 for n in range(6))  # few, so that publishing collides


@dataclass
class ModelBlock:
    state: BlockState = BlockState.FREE
    num_references: int = 0
    key: bytes | None = None


@dataclass
class ModelPool:
    """The pool's rules written down as lists and searches."""

    blocks: list[ModelBlock]
    lru: list[int] = field(default_factory=list)
    num_promised: int = 0

    def ids(self, *states: BlockState) -> list[int]:
        return [n for n, block in enumerate(self.blocks) if block.state in states]

    @property
    def num_available(self) -> int:
        return len(self.ids(BlockState.FREE, BlockState.CACHED)) - self.num_promised

    def took(self, block_ids: list[int], state: BlockState) -> None:
        """Free blocks first, then the least recently used cached ones, and those lose their keys."""
        num_free = len(self.ids(BlockState.FREE))
        assert len(set(block_ids)) == len(block_ids)
        assert all(self.blocks[n].state is BlockState.FREE for n in block_ids[:num_free])
        num_evicted = max(len(block_ids) - num_free, 0)
        assert block_ids[len(block_ids) - num_evicted :] == self.lru[:num_evicted]
        del self.lru[:num_evicted]
        for n in block_ids:
            self.blocks[n] = ModelBlock(state, int(state is BlockState.USED))

    def free(self, block_ids: list[int]) -> None:
        for n in reversed(block_ids):
            block = self.blocks[n]
            block.num_references -= 1
            if block.num_references == 0:
                block.state = BlockState.FREE if block.key is None else BlockState.CACHED
                self.lru += [n] if block.key is not None else []


class PoolMachine(RuleBasedStateMachine):
    """Every operation, at random, also where it is not allowed."""

    @initialize(num_blocks=st.integers(1, 10))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, block_size=4)
        self.model = ModelPool([ModelBlock() for _ in range(num_blocks)])

    def some(self, data: st.DataObject, *states: BlockState) -> list[int]:
        """Mostly legal block ids in any order; now and then anything, repetitions and strangers included."""
        if data.draw(st.integers(0, 7)) == 0:
            return data.draw(st.lists(st.integers(-1, self.pool.num_blocks), max_size=3))
        legal = self.model.ids(*states)
        return data.draw(st.lists(st.sampled_from(legal), unique=True)) if legal else []

    def attempt(self, is_legal: bool, operation: Callable[[], object]) -> bool:
        """Perform it if it is legal; else see it refused. The invariants see that a refusal changed nothing."""
        if is_legal:
            operation()
            return True
        with pytest.raises(BlockPoolError):
            operation()
        return False

    def are(self, block_ids: list[int], *states: BlockState) -> bool:
        return len(set(block_ids)) == len(block_ids) and set(block_ids) <= set(self.model.ids(*states))

    @rule(count=st.integers(-1, 6), promised=st.booleans())
    def allocate(self, count: int, promised: bool) -> None:
        room = self.model.num_promised if promised else self.model.num_available
        taken: list[int] = []
        if self.attempt(0 <= count <= room, lambda: taken.extend(self.pool.allocate(count, promised))):
            assert len(taken) == count
            self.model.num_promised -= count if promised else 0
            self.model.took(taken, BlockState.USED)

    @rule(count=st.integers(-1, 6))
    def lease(self, count: int) -> None:
        taken: list[int] = []
        if self.attempt(0 <= count <= self.model.num_available, lambda: taken.extend(self.pool.lease(count))):
            assert len(taken) == count
            self.model.took(taken, BlockState.LEASED)

    @rule(count=st.integers(-1, 6))
    def promise(self, count: int) -> None:
        if self.attempt(0 <= count <= self.model.num_available, lambda: self.pool.promise(count)):
            self.model.num_promised += count

    @rule(count=st.integers(-1, 6))
    def unpromise(self, count: int) -> None:
        if self.attempt(0 <= count <= self.model.num_promised, lambda: self.pool.unpromise(count)):
            self.model.num_promised -= count

    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        block_ids = self.some(data, BlockState.USED, BlockState.CACHED)
        is_legal = self.are(block_ids, BlockState.USED, BlockState.CACHED)
        is_legal = is_legal and sum(n in self.model.lru for n in block_ids) <= self.model.num_available
        if self.attempt(is_legal, lambda: self.pool.acquire(block_ids)):
            for n in block_ids:
                self.model.blocks[n].num_references += 1
                self.model.blocks[n].state = BlockState.USED
                self.model.lru = [other for other in self.model.lru if other != n]

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        block_ids = self.some(data, BlockState.USED)
        if self.attempt(self.are(block_ids, BlockState.USED), lambda: self.pool.free(block_ids)):
            self.model.free(block_ids)

    @rule(data=st.data(), keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=3))
    def publish(self, data: st.DataObject, keys: list[bytes]) -> None:
        """The same key for two of them is that of twins."""
        offered = dict(zip(self.some(data, BlockState.USED) or [-1], keys, strict=False))
        is_legal = self.are([*offered], BlockState.USED)
        is_legal = is_legal and all(self.model.blocks[n].key in (None, key) for n, key in offered.items())
        if self.attempt(is_legal, lambda: self.pool.publish(offered)):
            for n, key in offered.items():
                if key not in [block.key for block in self.model.blocks]:
                    self.model.blocks[n].key = key

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block_ids = self.some(data, BlockState.USED)
        if self.attempt(self.are(block_ids, BlockState.USED), lambda: self.pool.forget(block_ids)):
            for n in block_ids:
                self.model.blocks[n].key = None

    @rule(count=st.integers(1, 4), keys=st.permutations(KEYS))
    def leave_in_the_cache(self, count: int, keys: list[bytes]) -> None:
        """What a short sequence does, so that cached blocks are common."""
        fresh = [key for key in keys if self.pool.find(key) is None][:count]
        if len(fresh) <= self.model.num_available:
            block_ids = self.pool.allocate(len(fresh))
            self.model.took(block_ids, BlockState.USED)
            self.pool.publish(dict(zip(block_ids, fresh, strict=True)))
            for block_id, key in zip(block_ids, fresh, strict=True):
                self.model.blocks[block_id].key = key
            self.pool.free(block_ids)
            self.model.free(block_ids)

    @precondition(lambda self: self.model.lru)
    @rule()
    def promise_all_there_is(self) -> None:
        self.pool.promise(self.pool.num_available)
        self.model.num_promised += self.model.num_available

    @precondition(lambda self: self.model.ids(BlockState.LEASED, BlockState.QUARANTINED))
    @rule(data=st.data(), what=st.sampled_from(["commit", "quarantine", "release"]))
    def end_lease(self, data: st.DataObject, what: str) -> None:
        legal = (BlockState.LEASED, BlockState.QUARANTINED) if what == "release" else (BlockState.LEASED,)
        block_ids = self.some(data, *legal)
        operation, state = {
            "commit": (self.pool.commit_lease, BlockState.USED),
            "quarantine": (self.pool.quarantine, BlockState.QUARANTINED),
            "release": (self.pool.release_lease, BlockState.FREE),
        }[what]
        if self.attempt(self.are(block_ids, *legal), lambda: operation(block_ids)):
            for n in block_ids:
                self.model.blocks[n] = ModelBlock(state, int(state is BlockState.USED))

    @precondition(lambda self: self.model.lru and self.model.num_available)
    @rule()
    def acquire_the_next_to_be_evicted(self) -> None:
        """What a prefix match does."""
        n = self.model.lru.pop(0)
        self.pool.acquire([n])
        self.model.blocks[n].num_references, self.model.blocks[n].state = 1, BlockState.USED

    @precondition(lambda self: self.model.num_available)
    @rule(key=st.sampled_from(KEYS))
    def compute_a_twin(self, key: bytes) -> None:
        """Two sequences that began alike at the same time: who comes second keeps its block to itself."""
        block_ids = self.pool.allocate(1)
        self.model.took(block_ids, BlockState.USED)
        is_first = key not in [block.key for block in self.model.blocks]
        self.pool.publish({block_ids[0]: key})
        assert (self.pool.find(key) == block_ids[0]) == is_first
        self.model.blocks[block_ids[0]].key = key if is_first else None

    @rule(releases=st.booleans(), count=st.integers(1, 4))
    def quarantine_a_lease(self, releases: bool, count: int) -> None:
        """What a transfer does that ends badly, so that quarantined blocks are common, and released sooner or later."""
        if (left := self.model.ids(BlockState.QUARANTINED)) and releases:
            self.pool.release_lease(left)
            for n in left:
                self.model.blocks[n] = ModelBlock()
        elif count <= self.model.num_available:
            block_ids = self.pool.lease(count)
            self.model.took(block_ids, BlockState.LEASED)
            self.pool.quarantine(block_ids)
            for n in block_ids:
                self.model.blocks[n].state = BlockState.QUARANTINED

    @invariant()
    def counts_add_up_to_the_pool(self) -> None:
        counts = self.pool.counts()
        by_state = Counter(block.state for block in self.model.blocks)
        assert counts == BlockCounts(*(by_state[state] for state in BlockState))
        assert counts.free + counts.cached + counts.used + counts.leased + counts.quarantined == self.pool.num_blocks
        assert min(counts.free, counts.cached, counts.used, counts.leased, counts.quarantined) >= 0

    @invariant()
    def every_block_is_as_in_the_model(self) -> None:
        assert self.pool.snapshot() == {
            "states": tuple(block.state for block in self.model.blocks),
            "num_references": tuple(block.num_references for block in self.model.blocks),
            "keys": tuple(block.key for block in self.model.blocks),
            "num_promised": self.model.num_promised,
        }
        for key in KEYS:
            holders = [n for n, block in enumerate(self.model.blocks) if block.key == key]
            assert self.pool.find(key) == (holders[0] if holders else None)
            assert len(holders) <= 1
        assert [self.pool.is_cached(n) for n in range(self.pool.num_blocks)] == [
            block.state is BlockState.CACHED for block in self.model.blocks
        ]

    @invariant()
    def promises_can_always_be_kept(self) -> None:
        assert self.pool.num_available == self.model.num_available >= 0
        assert self.pool.num_promised == self.model.num_promised
        num_free = len(self.model.ids(BlockState.FREE))
        for count in range(self.pool.num_blocks + 1):
            assert self.pool.can_allocate(count) == (count <= self.model.num_available)
            without_evicting = count <= self.model.num_available and count <= num_free
            assert self.pool.can_allocate(count, evict=False) == without_evicting


@pytest.mark.covers("S13")
def test_the_pool_does_what_the_naive_model_does_and_its_counts_add_up_after_every_operation() -> None:
    run_state_machine_as_test(
        PoolMachine, settings=settings(deadline=None, max_examples=examples(100, 3), stateful_step_count=40)
    )


def test_the_longest_prefix_survives_eviction() -> None:
    pool = BlockPool(4, block_size=2)
    block_ids = pool.allocate(4)
    pool.publish(dict(zip(block_ids, KEYS, strict=False)))
    pool.free(block_ids)
    pool.allocate(2)
    assert [pool.find(key) is not None for key in KEYS[:4]] == [True, True, False, False]


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0), (-1, 16)])
def test_a_pool_without_room_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="a pool of"):
        BlockPool(num_blocks, block_size)
