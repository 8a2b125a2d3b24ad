"""The planner's fast engine against the product's scheduler, step by step, on random small nodes that are often short of blocks."""

from __future__ import annotations

import random
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.plan_door import Door
from bench.plan_engine import KEY_SEED, Engine, ExactEngine, Sizes, Work
from bench.plan_fast import FastEngine
from engine.reserve import ReserveConfig, ReservePolicy
from proto.block_key import block_keys

POLICIES: Final[tuple[ReservePolicy, ...]] = ("ratio", "fixed", "none", "full")


class _Side:
    """One engine, its door, and what came of it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.door = Door(engine)
        self.works: dict[int, Work] = {}
        self.num_unread = 0

    def plan(self) -> tuple[object, ...] | None:
        """The shape, and who is begun behind what a cache has."""
        step = self.engine.plan()
        self.num_unread += step is not None
        return step and (step.shape, *((work.request, num_cached) for work, num_cached in step.starts))

    def complete(self) -> list[tuple[object, ...]]:
        self.num_unread -= 1
        return sorted(
            (each.work.request, *each[1:4], each.num_left if each.finish else 0) for each in self.engine.complete()
        )


class _Pair:
    """Both engines under the same random life; every difference is an error."""

    def __init__(self, seed: int, role: str, policy: ReservePolicy) -> None:
        self.rng = random.Random(seed)
        self.role = role
        self.block_size = self.rng.choice((1, 2, 4, 5))
        slots = self.rng.randint(1, 6)
        sizes = Sizes(
            self.rng.randint(12, 40), self.block_size, slots, slots + self.rng.randint(0, 9), ReserveConfig(policy)
        )
        self.exact, self.fast = _Side(ExactEngine(sizes, role)), _Side(FastEngine(sizes, role))
        self.sides = (self.exact, self.fast)
        self.longest = sizes.max_model_len
        self.num_asked = self.num_ended = self.num_preempted = self.num_skipped = 0
        self.num_foreseen = self.num_foreseen_ends = 0
        self.leased: list[int] = []
        self.lent: list[int] = []
        self.shared = [self.rng.randrange(2, 9) for _ in range(self.longest)]

    def ask(self) -> None:
        """A newcomer, whose prompt may begin as others' do; on a decode node it asks for a lease."""
        num_new = self.rng.randint(2 if self.role == "decode" else 1, min(14, self.longest // 2))
        num_prompt = self.rng.randint(1, max(1, min(30, self.longest - num_new)))
        num_shared = self.rng.choice((0, num_prompt // 2, num_prompt))
        own = [self.rng.randrange(2, 9) for _ in range(num_prompt - num_shared)]
        token_ids = tuple(self.shared[:num_shared] + own)
        keys = block_keys(KEY_SEED, token_ids, self.block_size)
        self.num_asked += 1
        for side in self.sides:
            work = Work(self.num_asked, num_prompt, num_prompt, num_new, keys, token_ids)
            side.works[work.request] = work
            if self.role == "decode":
                side.door.ask(work)
            else:
                side.engine.submit(work)

    def settle(self) -> None:
        granted = [[(work.request, held) for work, held in side.door.settle()] for side in self.sides]
        assert granted[0] == granted[1]
        self.leased += [request for request, _ in granted[0]]

    def commit(self) -> None:
        if self.leased:
            request = self.leased.pop(self.rng.randrange(len(self.leased)))
            for side in self.sides:
                side.door.commit(side.works[request])

    def release(self) -> None:
        if self.lent:
            request = self.lent.pop(self.rng.randrange(len(self.lent)))
            for side in self.sides:
                side.engine.release(side.works[request])

    def step(self) -> None:
        """Plan as far ahead as a node does, or read a step."""
        if self.exact.num_unread < 2 and self.rng.random() < 0.8:
            self.plan()
        elif self.exact.num_unread:
            self.read()

    def plan(self) -> bool:
        steps = [side.plan() for side in self.sides]
        assert steps[0] == steps[1]
        self.check()
        return steps[0] is not None

    def read(self) -> None:
        told = [side.complete() for side in self.sides]
        assert told[0] == told[1]
        for request, _, _, finish, _ in told[0]:
            self.num_ended += finish == "length"
            self.num_preempted += finish == "preempted"
            if finish == "length" and self.role == "prefill":
                assert isinstance(request, int)
                self.lent.append(request)
        self.check()

    def skip(self) -> None:
        """As many steps as are alike: at once, and one by one."""
        number = self.fast.engine.num_uniform()
        if not number:
            return
        number = self.rng.randint(1, number)
        self.fast.engine.skip(number)
        for _ in range(number):
            assert self.exact.complete() == []
            step = self.exact.plan()
            assert step is not None
        self.num_skipped += number
        self.check()

    def foresee(self) -> None:
        """As many plans as are foretold, one by one: each has the shape that was said, and none but the last tells anything."""
        while self.exact.num_unread < 2 and self.plan():
            pass
        if self.rng.random() < 0.3:
            self.ask()  # somebody may come in the very next plan
        found = self.fast.engine.ahead()
        if found is None:
            return
        number, shape = found
        assert number > 0
        for index in range(number):
            assert [side.complete() for side in self.sides] == [[], []]
            assert [side.plan() for side in self.sides] == [(shape.after(index),)] * 2
            self.check()
        assert [side.complete() for side in self.sides] == [[], []]
        num_over = self.num_ended + self.num_preempted
        self.read()
        self.num_foreseen += number
        self.num_foreseen_ends += self.num_ended + self.num_preempted > num_over

    def check(self) -> None:
        assert self.exact.engine.pool.counts() == self.fast.engine.pool.counts()
        assert self.exact.engine.pool.num_promised == self.fast.engine.pool.num_promised
        assert self.exact.engine.num_preempted == self.fast.engine.num_preempted

    def live(self, num_events: int) -> None:
        """Random events, then all to their ends."""
        acts = (self.ask, self.settle, self.commit, self.release, self.skip, *[self.foresee] * 2, *[self.step] * 6)
        for _ in range(num_events):
            self.rng.choice(acts)()
        for _ in range(20_000):
            self.settle()
            self.commit()
            self.release()
            self.skip()
            if self.exact.num_unread < 2 and self.plan():
                continue
            if not self.exact.num_unread and not self.leased and not self.lent:
                break
            if self.exact.num_unread:
                self.read()
        assert self.num_ended + self.num_preempted == self.num_asked, "each ends once"
        counts = self.fast.engine.pool.counts()
        assert (counts.used, counts.leased, counts.quarantined) == (0, 0, 0)


@pytest.mark.parametrize("role", ["prefill", "decode", "mixed"])
@given(seed=st.integers(0, 1 << 32), policy=st.sampled_from(POLICIES))
@settings(max_examples=25, deadline=None)
def test_the_fast_engine_plans_every_step_as_the_scheduler_does(role: str, seed: int, policy: ReservePolicy) -> None:
    """Shapes of steps, what they tell, blocks by state, promises and preemptions, whether steps are skipped or not."""
    _Pair(seed, role, policy).live(120)


def test_the_random_nodes_are_short_of_blocks_and_skip_steps() -> None:
    """What the property is worth: preemptions, skipped steps and foretold ends happened in what it looked at."""
    preempted = skipped = foreseen = ends = 0
    for seed in range(12):
        for role in ("decode", "mixed"):
            pair = _Pair(seed, role, "none")
            pair.live(80)
            preempted += pair.fast.engine.num_preempted
            skipped += pair.num_skipped
            foreseen += pair.num_foreseen
            ends += pair.num_foreseen_ends
    assert preempted > 10
    assert skipped > 40
    assert foreseen > 40
    assert ends > 20
