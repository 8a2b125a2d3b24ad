"""The scheduler under random interleavings of everything that can happen to it, leases and hand-overs included."""

from __future__ import annotations

from collections.abc import Hashable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from engine.block_pool import BlockState
from engine.sequence import Phase, blocks_for
from tests.engine_pure.checked_node import CheckedNode, Sizes, make_spec

STREAMS = ([0, 0, 1, 2, 0, 1] * 8, [0, 0, 1, 2, 3, 4] * 8)  # prompts are starts of these, so prefixes are shared


class SchedulerMachine(RuleBasedStateMachine):
    """One node that prefills for others, decodes for others, and runs its own; checks are CheckedNode's."""

    @initialize(
        num_blocks=st.integers(8, 14),
        num_slots=st.integers(1, 4),
        spare_tokens=st.integers(0, 12),
        cache_generated=st.booleans(),
    )
    def start(self, num_blocks: int, num_slots: int, spare_tokens: int, cache_generated: bool) -> None:
        self.sizes = Sizes(
            num_blocks=num_blocks,
            block_size=4,
            num_slots=num_slots,
            max_batched_tokens=num_slots + spare_tokens,
            max_model_len=32,
            vocab_size=5,
            cache_generated=cache_generated,
        )
        self.node = CheckedNode(self.sizes)
        self.next_id = 0
        self.unreleased: set[Hashable] = set()  # lending sequences
        self.leases: list[list[int]] = []  # of blocks nobody will ever commit

    def new_id(self) -> int:
        self.next_id += 1
        return self.next_id

    def alive(self) -> list[Hashable]:
        gone = self.node.aborted | set(self.node.finished)
        return [sequence_id for sequence_id in self.node.specs if sequence_id not in gone]

    @rule(
        stream=st.sampled_from(STREAMS),
        num_tokens=st.integers(1, 20),
        max_new_tokens=st.integers(1, 12),
        seed=st.none() | st.integers(1, 2**64 - 1),
        stops=st.frozensets(st.integers(0, 4), max_size=2),
        lends=st.booleans(),
        data=st.data(),
    )
    def submit(
        self,
        stream: list[int],
        num_tokens: int,
        max_new_tokens: int,
        seed: int | None,
        stops: frozenset[int],
        lends: bool,
        data: st.DataObject,
    ) -> None:
        spec = make_spec(
            self.new_id(),
            stream[:num_tokens],
            1 if lends and data.draw(st.booleans()) else max_new_tokens,
            self.sizes,
            seed=seed,
            stop_token_ids=stops,
            num_generated=data.draw(st.integers(0, num_tokens)),
            lends=lends,
        )
        self.node.submit(spec)
        if lends:
            self.unreleased.add(spec.sequence_id)

    @precondition(lambda self: len(self.node.unread) < 3)
    @rule()
    def plan(self) -> None:
        self.node.plan()

    @precondition(lambda self: self.node.unread)
    @rule()
    def complete(self) -> None:
        self.node.complete()
        self.check_lent()

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence_id = data.draw(st.sampled_from(self.alive()))
        was_waiting = self.node.phases.get(sequence_id, Phase.WAITING) is Phase.WAITING
        self.node.abort(sequence_id)
        if was_waiting:
            self.unreleased.discard(sequence_id)
        self.check_lent()

    def ended_lenders(self) -> list[Hashable]:
        return sorted(self.unreleased - set(self.alive()), key=str)

    @precondition(lambda self: self.ended_lenders())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        sequence_id = data.draw(st.sampled_from(self.ended_lenders()))
        assert self.node.scheduler.release(sequence_id)
        self.unreleased.remove(sequence_id)

    @rule(count=st.integers(1, 4))
    def lease(self, count: int) -> None:
        if self.node.pool.can_allocate(count):
            block_ids = self.node.pool.lease(count)
            assert not set(block_ids) & self.node.blocks_in_flight(), "leased while an unread step has it"
            self.node.memory[block_ids] = 255  # a transfer writes what it likes
            self.leases.append(block_ids)

    @precondition(lambda self: self.leases)
    @rule(in_quarantine=st.booleans())
    def end_lease(self, in_quarantine: bool) -> None:
        block_ids = self.leases.pop(0)
        if in_quarantine:
            self.node.pool.quarantine(block_ids)
        self.node.pool.release_lease(block_ids)

    def handable(self) -> list[Hashable]:
        """Lenders whose first token is there and is not their last."""
        finished = self.node.finished
        return [n for n in self.ended_lenders() if finished.get(n) == "length" and len(self.node.token_ids[n]) == 1]

    @precondition(lambda self: self.handable())
    @rule(data=st.data(), max_new_tokens=st.integers(1, 8), uses_cache=st.booleans())
    def hand_over(self, data: st.DataObject, max_new_tokens: int, uses_cache: bool) -> None:
        """What a receiver does from reserve to commit, with this node at both ends."""
        sender_id = data.draw(st.sampled_from(self.handable()))
        sent, pool = self.node.specs[sender_id], self.node.pool
        spec = make_spec(
            self.new_id(),
            [*sent.token_ids, *self.node.token_ids[sender_id]],
            max_new_tokens,
            self.sizes,
            seed=sent.sampling.seed if sent.sampling.temperature else None,
            num_generated=sent.num_generated + 1,
        )
        num_full = len(sent.token_ids) // self.sizes.block_size
        held = self.node.cache.acquire_match(spec.block_keys, num_full if uses_cache else 0)
        num_leased = blocks_for(len(spec.token_ids), self.sizes.block_size) - len(held)
        num_promised = spec.num_blocks_at_limit(self.sizes.block_size) - num_leased - len(held)
        if not pool.can_allocate(num_leased + num_promised) or not self.node.scheduler.reserve_slot():
            pool.free(held)
            return
        leased = pool.lease(num_leased)
        pool.promise(num_promised)
        source = self.node.scheduler.block_ids(sender_id)[len(held) :]
        self.node.memory[leased[: len(source)]] = self.node.memory[list(source)]
        pool.commit_lease(leased)
        self.node.adopt(spec, [*held, *leased], num_promised)
        assert self.node.scheduler.release(sender_id)
        self.unreleased.remove(sender_id)

    def check_lent(self) -> None:
        """What is lent stays in use, and readable, until it is released."""
        states = self.node.pool.snapshot()["states"]
        assert isinstance(states, tuple)
        for sequence_id in self.ended_lenders():
            block_ids = self.node.scheduler.block_ids(sequence_id)
            assert all(states[block_id] is BlockState.USED for block_id in block_ids)
            if sequence_id in self.node.finished:
                token_ids = self.node.specs[sequence_id].token_ids
                assert self.node.tokens_in(block_ids, len(token_ids)) == list(token_ids)

    def teardown(self) -> None:
        if not hasattr(self, "node"):
            return
        for block_ids in self.leases:
            self.node.pool.release_lease(block_ids)
        for _ in range(len(self.node.specs) + 1):  # each release may let the head of the queue in
            self.node.run_to_the_end()
            for sequence_id in self.ended_lenders():
                self.node.scheduler.release(sequence_id)
                self.unreleased.remove(sequence_id)
        assert not self.alive(), "every sequence ended"
        assert self.node.is_idle()


@pytest.mark.covers("P01", "P02", "Q03", "Q05", "Q08", "S12", "S13", "S14")
def test_whatever_happens_each_sequence_gets_its_own_tokens_and_no_block_is_lost_or_reused_early() -> None:
    run_state_machine_as_test(
        SchedulerMachine, settings=settings(deadline=None, max_examples=100, stateful_step_count=60)
    )
