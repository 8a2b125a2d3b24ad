"""The prefix cache over a pool that is short, against a naive model: a list of the token prefixes that are held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

from engine.block_pool import BlockPool
from engine.prefix_cache import PrefixCache
from proto.block_key import block_keys, seed_key
from tests.thorough import examples

SEED = seed_key(b"prefix cache model")
BLOCK_SIZE = 2
Prefix = tuple[int, ...]


@dataclass
class Running:
    """A sequence that holds the blocks of its full prefixes."""

    prefixes: list[Prefix]  # what it holds, by block; computed twice where a twin was published earlier
    block_ids: list[int]


class CacheMachine(RuleBasedStateMachine):
    """Sequences come, match, compute the rest, and go; others take blocks, and are promised some."""

    @initialize(num_blocks=st.integers(2, 9))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.cache = PrefixCache(self.pool)
        self.running: list[Running] = []
        self.taken: list[int] = []  # by others, never published
        self.num_promised = 0
        self.holders: dict[Prefix, int] = {}  # every prefix that can be found -> how many hold its block
        self.unheld: list[Prefix] = []  # of them those that nobody holds, the next to be evicted first
        self.num_twins = 0  # blocks in use whose content was published by another block

    def num_free(self) -> int:
        return self.pool.num_blocks - len(self.holders) - len(self.taken) - self.num_twins

    def num_available(self) -> int:
        return self.num_free() + len(self.unheld) - self.num_promised

    def evict_for(self, num_blocks: int) -> None:
        for _ in range(num_blocks - self.num_free()):
            del self.holders[self.unheld.pop(0)]

    @rule(tokens=st.lists(st.integers(0, 1), max_size=10), max_blocks=st.integers(0, 5), is_reversed=st.booleans())
    def begin(self, tokens: list[int], max_blocks: int, is_reversed: bool) -> None:
        """Match, then compute what is left; `is_reversed`: publish in another order, so that holes come about."""
        prefixes = [tuple(tokens[: end * BLOCK_SIZE]) for end in range(1, len(tokens) // BLOCK_SIZE + 1)]
        expected, room = 0, self.num_available()
        while expected < min(max_blocks, len(prefixes)) and prefixes[expected] in self.holders:
            room -= prefixes[expected] in self.unheld
            if room < 0:
                break
            expected += 1
        keys = block_keys(SEED, tokens, BLOCK_SIZE)
        matched = self.cache.acquire_match(keys, max_blocks)
        assert matched == [self.pool.find(key) for key in keys[:expected]], (
            "not the longest prefix that there is room for"
        )
        for prefix in prefixes[:expected]:
            self.holders[prefix] += 1
            self.unheld = [other for other in self.unheld if other != prefix]
        num_new = len(prefixes) - expected
        assert self.pool.num_available == self.num_available()
        if num_new > self.num_available():
            self.end(Running(prefixes[:expected], matched))
            return
        self.evict_for(num_new)
        fresh = self.pool.allocate(num_new)
        assert not set(fresh) & set(matched), "what was matched was evicted for what comes behind it"
        order: Sequence[int] = range(num_new)
        for index in reversed(order) if is_reversed else order:
            prefix = prefixes[expected + index]
            self.pool.publish({fresh[index]: keys[expected + index]})
            is_first = self.pool.find(keys[expected + index]) == fresh[index]
            assert is_first == (prefix not in self.holders)
            if is_first:
                self.holders[prefix] = 1
            else:
                self.num_twins += 1
        self.running.append(Running(prefixes, matched + fresh))

    def end(self, sequence: Running) -> None:
        self.pool.free(sequence.block_ids)
        keys = self.pool.snapshot()["keys"]
        assert isinstance(keys, tuple)
        for prefix, block_id in reversed(list(zip(sequence.prefixes, sequence.block_ids, strict=True))):
            if keys[block_id] is None:
                self.num_twins -= 1
                continue
            self.holders[prefix] -= 1
            if not self.holders[prefix]:
                self.unheld.append(prefix)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.end(self.running.pop(data.draw(st.integers(0, len(self.running) - 1))))

    @rule(count=st.integers(0, 3))
    def take(self, count: int) -> None:
        if count <= self.num_available():
            self.evict_for(count)
            self.taken += self.pool.allocate(count)

    @precondition(lambda self: self.taken)
    @rule()
    def give_back(self) -> None:
        self.pool.free(self.taken)
        self.taken = []

    @rule(count=st.integers(0, 3))
    def promise(self, count: int) -> None:
        if count <= self.num_available():
            self.pool.promise(count)
            self.num_promised += count

    @rule()
    def unpromise(self) -> None:
        self.pool.unpromise(self.num_promised)
        self.num_promised = 0

    @invariant()
    def what_is_found_is_what_is_held(self) -> None:
        assert self.pool.num_available == self.num_available() >= 0
        for prefix in self.holders:
            keys = block_keys(SEED, prefix, BLOCK_SIZE)
            expected = next(
                (n for n in range(len(keys)) if prefix[: (n + 1) * BLOCK_SIZE] not in self.holders), len(keys)
            )
            assert len(self.cache.match(keys, len(keys))) == expected
        counts = self.pool.counts()
        assert (counts.free, counts.cached) == (self.num_free(), len(self.unheld))


@pytest.mark.covers("P02", "S12", "S13")
def test_the_cache_finds_what_the_naive_model_holds_and_never_more_than_there_is_room_for() -> None:
    run_state_machine_as_test(
        CacheMachine, settings=settings(deadline=None, max_examples=examples(100, 3), stateful_step_count=40)
    )
