"""The index of blocks: equal to a dict of sets whatever happens to it, coarser at its bound and never wrong."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from router.cache_index import CacheIndex, Run
from router.key_table import Keys, KeyTable
from tests.thorough import examples

POOL: list[int] = np.random.default_rng(3).integers(0, 2**64, size=600, dtype=np.uint64).tolist()
ROOMY = 1 << 20


def array(keys: Iterable[int]) -> Keys:
    return np.array(list(keys), dtype=np.uint64)


def leading_of(model: dict[int, set[int]], keys: Sequence[int]) -> dict[int, int]:
    """Blocks in a row by holder, counted one by one; holders without any are left out."""
    counts = {}
    for holder, held in model.items():
        num_blocks = next((index for index, key in enumerate(keys) if key not in held), len(keys))
        if num_blocks:
            counts[holder] = num_blocks
    return counts


def leading_in(runs: Sequence[Run], holders: Iterable[int]) -> dict[int, int]:
    """The same as the index says it."""
    assert [run.num_blocks for run in runs] == sorted({run.num_blocks for run in runs}), "longer and longer"
    return {
        holder: max(run.num_blocks for run in runs if run.holders >> holder & 1)
        for holder in holders
        if any(run.holders >> holder & 1 for run in runs)
    }


class IndexMachine(RuleBasedStateMachine):
    """Stores, evictions, holders that come and go, sweeps at any time; a dict of sets beside."""

    holders = Bundle("holders")

    def __init__(self) -> None:
        super().__init__()
        self.index = CacheIndex(ROOMY, seed=7)
        self.model: dict[int, set[int]] = {}
        self.rng = random.Random(3)

    @rule(target=holders)
    def opens(self) -> int:
        holder = self.index.open()
        assert holder is not None and holder not in self.model
        self.model[holder] = set()
        return holder

    @rule(holder=consumes(holders))
    def closes(self, holder: int) -> None:
        self.index.close(holder)
        del self.model[holder]

    @rule(holder=holders, first=st.integers(0, 599), number=st.integers(0, 300))
    def stores(self, holder: int, first: int, number: int) -> None:
        keys = POOL[first : first + number]
        self.index.store(holder, array([*keys, *keys[:2]]))
        self.model[holder] |= set(keys)

    @rule(holder=holders, first=st.integers(0, 599), number=st.integers(0, 300))
    def evicts(self, holder: int, first: int, number: int) -> None:
        keys = POOL[first : first + number]
        self.index.evict(1 << holder, array(keys))
        self.model[holder] -= set(keys)

    @rule(number=st.sampled_from((1, 7, 1000)))
    def sweeps(self, number: int) -> None:
        self.index.sweep(number)

    @rule(first=st.integers(0, 599), number=st.integers(0, 300))
    def looks(self, first: int, number: int) -> None:
        keys = POOL[first : first + number]
        assert leading_in(self.index.leading(array(keys)), self.model) == leading_of(self.model, keys)

    @invariant()
    def is_equal(self) -> None:
        for holder, held in self.model.items():
            assert self.index.keys_of(holder) == held
        assert self.index.num_dropped == 0 and self.index.share == 1

    def teardown(self) -> None:
        """Without holders nothing is left, however it ended."""
        for holder in self.model:
            self.index.close(holder)
        for _ in range(10_000):
            if not self.index.is_sweeping:
                break
            self.index.sweep(64)
        assert not self.index.is_sweeping and self.index.num_keys == 0


TestIndex = pytest.mark.covers("R02")(IndexMachine.TestCase)
IndexMachine.TestCase.settings = settings(max_examples=examples(30, 3), stateful_step_count=30, deadline=None)


@pytest.mark.covers("R02")
def test_at_its_bound_the_index_is_a_sample_that_is_the_same_for_all_nodes_and_says_nothing_wrong() -> None:
    index = CacheIndex(1 << 16)  # room for some 4,000 blocks
    rng = random.Random(5)
    chains = [[rng.getrandbits(64) for _ in range(200)] for _ in range(100)]
    holders = [index.open() or 0 for _ in range(20)]
    model: dict[int, set[int]] = {holder: set() for holder in holders}
    for number, chain in enumerate(chains):
        for holder in (holders[number % 10], holders[10 + number % 10]):
            keys = set(chain) | set(chains[number - 1][:100])
            model[holder] |= keys
            index.store(holder, array(keys))
    assert index.num_dropped == 0
    assert index.share < 1 / 2 and index.num_bytes <= 1 << 16
    found = 0
    for chain in chains:
        exact = leading_of(model, chain)
        said = leading_in(index.leading(array(chain)), model)
        assert all(num_blocks <= exact[holder] for holder, num_blocks in said.items())
        found += sum(said.values())
    exactly = sum(sum(leading_of(model, chain).values()) for chain in chains)
    assert found > 0.75 * exactly, f"{found} of {exactly} blocks are known"
    for holder, held in model.items():
        index.evict(1 << holder, array(held))
        assert index.keys_of(holder) == set()


@pytest.mark.covers("R02")
def test_without_room_for_another_set_a_key_keeps_its_holders_and_the_newcomer_is_counted() -> None:
    index = CacheIndex(1 << 13)  # 1 KiB for sets
    holders = [index.open() or 0 for _ in range(8)]
    keys = POOL[:40]
    rng = random.Random(1)
    model: dict[int, set[int]] = {holder: set() for holder in holders}
    for key in keys:
        for holder in rng.sample(holders, 3):
            index.store(holder, array([key]))
            model[holder].add(key)
    assert index.num_dropped > 0
    assert all(index.keys_of(holder) <= held for holder, held in model.items())
    for holder in holders:
        index.evict(1 << holder, array(keys))
        assert index.keys_of(holder) == set()
    assert index.num_keys == 0


@pytest.mark.covers("R02")
def test_a_number_is_given_out_again_only_when_nothing_in_the_table_has_it() -> None:
    index = CacheIndex(ROOMY)
    first = index.open()
    assert first is not None
    index.store(first, array(POOL))
    index.close(first)
    assert index.leading(array(POOL[:3])) == []
    second = index.open()
    assert second not in (None, first) and index.keys_of(second) == set()
    while index.is_sweeping:
        index.sweep(10)
    assert index.open() == first and index.keys_of(first) == set() and index.num_keys == 0


def test_the_table_grows_by_pieces_and_loses_nothing_at_any_load() -> None:
    table = KeyTable(1 << 20)
    most = max(number for number in range(0, 90_000, 500) if table.has_room(number))
    assert most > 0.7 * 8 * (1 << 20) / 96, "of the room that it may take most is used"
    keys = np.random.default_rng(1).integers(0, 2**64, size=most, dtype=np.uint64)
    keys = np.unique(keys)
    buckets = [table.num_buckets]
    num_lost = 0
    for start in range(0, len(keys), 500):
        assert table.has_room(len(keys[start : start + 500]))
        num_lost += len(table.put(keys[start : start + 500], 1 + start))
        buckets.append(table.num_buckets)
    assert num_lost == 0 and len(table) == len(keys) and not table.has_room(1000)
    assert max(np.diff(buckets)) < 200, "no leap"
    for start in range(0, len(keys), 500):
        piece = keys[start : start + 500]
        assert (table.values_at(table.find(piece)) == 1 + start).all()
        table.set_at(table.find(piece), 0)
    assert len(table) == 0 and (table.find(keys) == -1).all()


@pytest.mark.covers("R02")
def test_a_run_ends_at_the_first_block_that_a_holder_lacks_whatever_it_has_behind() -> None:
    index = CacheIndex(ROOMY)
    first, second, third = (index.open() or 0 for _ in range(3))
    index.store(first, array([*POOL[:1], *POOL[2:200]]))
    index.store(second, array(POOL[:200]))
    index.store(third, array(POOL[1:200]))
    runs = index.leading(array(POOL[:200]))
    assert leading_in(runs, (first, second, third)) == {first: 1, second: 200}
    assert leading_in(index.leading(array(POOL[2:3])), (first, second, third)) == dict.fromkeys(
        (first, second, third), 1
    )
    assert index.leading(array([])) == index.leading(array(POOL[300:400])) == []
