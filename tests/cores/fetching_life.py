"""A prefill core over a KV pool that has some blocks, forgets some, lies about some, and answers when it likes, or not in time."""

from __future__ import annotations

from typing import Final

import numpy as np

from engine.block_pool import BlockState
from node import events as ev
from proto.block_key import block_keys
from tests.cores.nodes import BLOCK_SIZE, SEED, VOCAB_SIZE
from tests.cores.prefill_life import EVENTS, Life

NUM_HEADS: Final = 4  # long beginnings that prompts have in common
HEAD_BLOCKS: Final = 6
GARBAGE: Final = 0x7F  # no KV of any token


class FetchingLife(Life):
    """The life of a node where leading blocks of prompts may be in the KV pool."""

    events = EVENTS | {"answer_look": 8, "answer_fetch": 8, "store": 2}
    reads_kv_pool = True

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.heads = [
            [self.random.randrange(VOCAB_SIZE) for _ in range(HEAD_BLOCKS * BLOCK_SIZE)] for _ in range(NUM_HEADS)
        ]
        self.stored: dict[bytes, list[int]] = {}  # the tokens whose KV a block is
        self.looks: dict[int, ev.LookInPool] = {}
        self.fetches: dict[int, ev.FetchBlocks] = {}
        self.lies = self.random.choice((0.0, 0.3))

    def step(self) -> bool:
        """One that takes its time, or there would be no speed to compare with."""
        if self.plans:
            self.now += 0.004
            self.take(self.core.tick(self.now))
        return super().step()

    def draw_head(self) -> list[int]:
        """Some of a beginning, in whole blocks or not."""
        return self.random.choice(self.heads)[: self.random.randrange(HEAD_BLOCKS * BLOCK_SIZE)]

    # ------------------------------------------------------------ the KV pool

    def store(self) -> bool:
        """Somebody stores, or the pool forgets, a beginning."""
        head = self.random.choice(self.heads)
        keys = block_keys(SEED, head, BLOCK_SIZE)
        first, *_, last = sorted(self.random.choices(range(HEAD_BLOCKS + 1), k=3))
        for index in range(first, last):
            self.stored.pop(keys[index], None)
        for index in range(first):
            self.stored[keys[index]] = head[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
        return True

    def ask_pool(self, action: ev.LookInPool | ev.FetchBlocks) -> None:
        """Nothing of it is under way twice, and no fetch writes where anybody else does."""
        if isinstance(action, ev.LookInPool):
            assert action.look_id not in self.looks and action.keys
            self.looks[action.look_id] = action
            return
        assert action.fetch_id not in self.fetches and action.blocks
        under_way = [block for fetch in self.fetches.values() for block in fetch.blocks]
        for name, index in (("key", 0), ("block", 1)):
            both = [block[index] for block in (*under_way, *action.blocks)]
            assert len({*both}) == len(both), f"a {name} is fetched twice at a time"
        assert len(both) <= self.pool.num_blocks // 4, "fetches take more than their share of the pool"
        for key, block_id in action.blocks:
            assert self.pool.find(key) is None, "what is here is fetched"
            assert self.state_of(block_id) is BlockState.LEASED
        self.fetches[action.fetch_id] = action
        self.happened["fetches"] += 1
        self.check_prefix(action.blocks[0][0])
        self.scribble(action)

    def check_prefix(self, first: bytes) -> None:
        """S12: what the run continues is still here: making room for it evicted none of it."""
        for attempt in self.attempts.values():
            keys = block_keys(SEED, attempt.dispatch.prompt_token_ids, BLOCK_SIZE)
            if first in keys:
                missing = [key for key in keys[: keys.index(first)] if self.pool.find(key) is None]
                self.happened["fetches behind a match"] += keys.index(first) > 0
                assert not missing, "room for a fetch was made of its own prefix"

    def state_of(self, block_id: int) -> BlockState:
        states = self.pool.snapshot()["states"]
        assert isinstance(states, tuple)
        state = states[block_id]
        assert isinstance(state, BlockState)
        return state

    def scribble(self, fetch: ev.FetchBlocks) -> None:
        """Until it is answered, anything may be in the blocks."""
        for _, block_id in fetch.blocks:
            self.runner_memory[block_id] = GARBAGE

    def answer_look(self) -> bool:
        """Truly, or with any number."""
        if not self.looks:
            return False
        look = self.looks.pop(self.random.choice(list(self.looks)))
        num_blocks = next((n for n, key in enumerate(look.keys) if key not in self.stored), len(look.keys))
        if self.random.random() < self.lies:
            num_blocks = self.random.randint(0, len(look.keys))
        self.feed(ev.PoolLooked(look.look_id, num_blocks))
        return True

    def answer_fetch(self) -> bool:
        """With what it has by now, of that sometimes less; behind it lies anything."""
        if not self.fetches:
            return False
        fetch = self.fetches.pop(self.random.choice(list(self.fetches)))
        self.scribble(fetch)
        num_blocks = next((n for n, (key, _) in enumerate(fetch.blocks) if key not in self.stored), len(fetch.blocks))
        if self.random.random() < self.lies:
            num_blocks = self.random.randint(0, num_blocks)
        for key, block_id in fetch.blocks[:num_blocks]:
            kv = np.array(self.stored[key], np.int32) + 1
            self.runner_memory[block_id, : kv.nbytes] = kv.view(np.uint8)
        for _, block_id in fetch.blocks:
            assert self.state_of(block_id) is BlockState.LEASED, "given back while the reader may write"
        self.happened["fetched all"] += num_blocks == len(fetch.blocks)
        self.happened["fetched less"] += num_blocks < len(fetch.blocks)
        self.feed(ev.BlocksFetched(fetch.fetch_id, num_blocks, self.random.choice((0.0, 0.001, 0.02))))
        return True

    def answer_pool(self) -> bool:
        """Whatever it owes."""
        return self.answer_look() or self.answer_fetch()

    # ------------------------------------------------------------ what must hold

    def check(self) -> None:
        """And: whoever waits for the pool is looked at again; fetches hold what they say and no more."""
        super().check()
        snapshot, counts = self.core.snapshot(), self.pool.counts()
        assert (snapshot["kv_looks"], snapshot["kv_fetches"]) == (len(self.looks), len(self.fetches))
        assert counts.leased == sum(len(fetch.blocks) for fetch in self.fetches.values())
        num_waiting = snapshot["waiting_for_kv"]
        unknown = [key for key in self.attempts if not self.scheduler.knows(key)]
        assert isinstance(num_waiting, int) and num_waiting <= len(unknown), "in the scheduler, and held"
        assert not num_waiting or self.core.next_deadline() is not None
        self.happened["waited"] += num_waiting > 0
        if not self.fetches:
            assert snapshot["references_of_fetches"] == 0
