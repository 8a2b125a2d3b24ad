"""The scheduler under random interleavings of everything that can happen to it, leases and hand-overs included."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from engine.block_pool import BlockState
from engine.plan import BROKEN_ROW, STALLED_ROW
from engine.reserve import ReservePolicy
from engine.saving import SaveRules
from engine.sequence import Phase, blocks_for
from tests.engine_pure.checked_node import CheckedNode, Sizes, make_spec, rows_of
from tests.thorough import examples

STREAMS = ([0, 0, 1, 2, 0, 1] * 8, [0, 0, 1, 2, 3, 4] * 8)  # prompts are starts of these, so prefixes are shared
EVENTS = {
    "submit": 3,
    "submit_to_hand_over": 3,
    "plan": 10,
    "complete": 8,
    "break_a_row": 1,
    "abort": 1,
    "release": 1,
    "hand_over": 4,
    "lease": 1,
    "end_lease": 2,
    "pause": 2,
    "resume": 6,
    "lend": 2,
    "end_lend": 1,
    "stage": 4,
    "abandon": 2,
}
POLICIES: tuple[ReservePolicy, ...] = ("full", "ratio", "fixed", "none")
MAX_UNREAD = 3
NUM_EVENTS = 250


class Life:
    """One node that prefills for others, decodes for others, and runs its own; CheckedNode checks every step."""

    def __init__(self, random: Random) -> None:
        self.random = random
        num_slots = self.random.randint(1, 5)
        self.sizes = Sizes(
            num_blocks=self.random.randint(8, 20),
            block_size=4,
            num_slots=num_slots,
            max_batched_tokens=num_slots + self.random.randint(0, 12),
            max_model_len=32,
            vocab_size=5,
            cache_generated=self.random.random() < 0.7,
            max_beside_decodes=self.random.choice((None, None, 1, 3)),
            policy=self.random.choice(POLICIES),
            resumes=self.random.random() < 0.7,
            keeps=self.random.random() < 0.5,
            saves=SaveRules(of_preempted=self.random.random() < 0.6, of_finished=self.random.random() < 0.4),
        )
        self.node = CheckedNode(self.sizes)
        self.happened: Counter[str] = Counter()
        self.unreleased: set[Hashable] = set()  # lending sequences
        self.to_hand_over: set[Hashable] = set()
        self.leases: list[list[int]] = []  # of blocks that nobody will ever commit
        self.moving: dict[Hashable, dict[int, list[int]]] = {}  # whose blocks a link reads: what it found in them

    def live(self) -> None:
        for _ in range(NUM_EVENTS):
            self.let(self.random.choices(list(EVENTS), list(EVENTS.values()))[0])

    def let(self, event: str) -> None:
        """It happens, if it can."""
        self.happened[event] += getattr(self, event)()
        self.node.check()
        self.check_lent()
        self.check_moving()

    # Events: each says whether it could happen

    def submit(self) -> bool:
        if self.node.scheduler.num_waiting > 4:
            return False
        lends = self.random.random() < 0.3
        num_tokens = self.random.randint(1, 20)
        spec = make_spec(
            len(self.node.specs),
            self.random.choice(STREAMS)[:num_tokens],
            self.random.randint(1, 12),
            self.sizes,
            seed=self.draw_seed(),
            stop_token_ids=frozenset(self.random.sample(range(5), self.random.randint(0, 2))),
            num_generated=self.random.randint(0, num_tokens),
            lends=lends,
        )
        self.node.submit(spec)
        self.unreleased |= {spec.sequence_id} if lends else set()
        return True

    def submit_to_hand_over(self) -> bool:
        """What a prefill node does: one token, then somebody else goes on."""
        if self.node.scheduler.num_waiting > 4:
            return False
        token_ids = self.random.choice(STREAMS)[: self.random.randint(1, 20)]
        spec = make_spec(len(self.node.specs), token_ids, 1, self.sizes, seed=self.draw_seed(), lends=True)
        self.node.submit(spec)
        self.unreleased.add(spec.sequence_id)
        self.to_hand_over.add(spec.sequence_id)
        return True

    def plan(self) -> bool:
        return len(self.node.unread) < MAX_UNREAD and self.node.plan() is not None

    def complete(self) -> bool:
        if not self.node.unread:
            return False
        self.node.complete()
        return True

    def break_a_row(self) -> bool:
        """It has no numbers, or is not told what may follow; of a row that nobody wants any more nothing comes."""
        if not self.node.unread or self.random.random() < 0.6:
            return False
        num_rows = len(rows_of(self.node.unread[0]))
        if num_rows:
            self.node.complete((self.random.randrange(num_rows), self.random.choice((BROKEN_ROW, STALLED_ROW))))
        return num_rows > 0

    def abort(self) -> bool:
        if not self.alive():
            return False
        sequence_id = self.random.choice(self.alive())
        if self.node.phases.get(sequence_id, Phase.WAITING) is Phase.WAITING:
            self.unreleased.discard(sequence_id)  # it held nothing: nothing to release
        self.node.abort(sequence_id)
        return True

    def release(self) -> bool:
        candidates = [n for n in self.ended_lenders() if n not in self.to_hand_over or n in self.node.aborted]
        if not candidates:
            return False
        sequence_id = self.random.choice(candidates)
        assert self.node.scheduler.release(sequence_id)
        self.unreleased.remove(sequence_id)
        return True

    def lease(self) -> bool:
        count = self.random.randint(1, 3)
        if not self.node.pool.can_allocate(count):
            return False
        block_ids = self.node.pool.lease(count)
        assert not set(block_ids) & self.node.blocks_in_flight(), "leased while an unread step has it"
        self.node.memory[block_ids] = 255  # a transfer writes what it likes
        self.leases.append(block_ids)
        return True

    def end_lease(self) -> bool:
        if not self.leases:
            return False
        block_ids = self.leases.pop(0)
        if self.random.random() < 0.5:
            self.node.pool.quarantine(block_ids)
        self.node.pool.release_lease(block_ids)
        return True

    def hand_over(self) -> bool:
        """What a receiver does from reserve to commit, with this node at both ends."""
        sender_id = next(iter(self.to_hand_over & self.unreleased & set(self.node.finished)), None)
        if sender_id is None:
            return False
        sent, pool = self.node.specs[sender_id], self.node.pool
        spec = make_spec(
            len(self.node.specs),
            [*sent.token_ids, *self.node.token_ids[sender_id]],
            self.random.randint(1, 9),
            self.sizes,
            seed=sent.sampling.seed if sent.sampling.temperature else None,
            num_generated=1,
            stop_token_ids=frozenset(self.random.sample(range(5), self.random.randint(0, 1))),
        )
        num_full = len(sent.token_ids) // self.sizes.block_size
        held = self.node.cache.acquire_match(spec.block_keys, num_full if self.random.random() < 0.5 else 0)
        num_leased = blocks_for(len(spec.token_ids), self.sizes.block_size) - len(held)
        is_promised = self.node.scheduler.promises_growth
        num_at_limit = spec.num_blocks_at_limit(self.sizes.block_size)
        num_promised = num_at_limit - num_leased - len(held) if is_promised else 0
        remaining = () if is_promised else (spec.max_new_tokens,)
        is_there_room = self.node.scheduler.admits(num_leased + num_promised, remaining)
        if not is_there_room or not self.node.scheduler.reserve_slots(1):
            pool.free(held)
            return False
        leased = pool.lease(num_leased)
        pool.promise(num_promised)
        assert not set(leased) & self.node.blocks_in_flight(), "leased while an unread step has it"
        source = self.node.scheduler.block_ids(sender_id)[len(held) :]
        self.node.memory[leased[: len(source)]] = self.node.memory[list(source)]
        pool.commit_lease(leased)
        self.node.adopt(spec, [*held, *leased], num_promised)
        assert self.node.scheduler.release(sender_id)
        self.unreleased.remove(sender_id)
        return True

    def pause(self) -> bool:
        decoding = [n for n in self.alive() if self.node.phases.get(n) is Phase.RUNNING_DECODE]
        return bool(decoding) and self.node.pause(self.random.choice(decoding))

    def resume(self) -> bool:
        """A move came to nothing."""
        can_resume = [n for n, why in self.node.paused.items() if why == "paused" or self.sizes.resumes]
        if not can_resume:
            return False
        self.node.resume(self.random.choice(can_resume))
        return True

    def lend(self) -> bool:
        """A link is going to read what a sequence has, which runs or is paused."""
        phases = (Phase.RUNNING_DECODE, Phase.PREEMPTING, Phase.PAUSED)
        free = [n for n in self.alive() if n not in self.moving and n not in self.unreleased]
        assert all(self.node.scheduler.can_move(n) == (self.node.phases.get(n) in phases) for n in free)
        free = [n for n in free if self.node.scheduler.can_move(n)]
        if not free:
            return False
        sequence_id = self.random.choice(free)
        self.node.scheduler.lend(sequence_id)
        self.moving[sequence_id] = {}
        return True

    def end_lend(self) -> bool:
        """The link has read everything, or is gone."""
        if not self.moving:
            return False
        sequence_id = self.random.choice(list(self.moving))
        del self.moving[sequence_id]
        self.node.scheduler.release(sequence_id)
        return True

    def stage(self) -> bool:
        """The KV pool has copied something, in no order."""
        if not self.node.saves:
            return False
        self.node.stage(self.random.choice(list(self.node.saves)))
        return True

    def abandon(self) -> bool:
        """No other node takes what gave way."""
        gave_way = [n for n, why in self.node.paused.items() if why == "preempted"]
        if not gave_way:
            return False
        self.node.abandon(self.random.choice(gave_way))
        return True

    # What it looks at

    def draw_seed(self) -> int | None:
        return self.random.choice([None, self.random.getrandbits(64)])

    def alive(self) -> list[Hashable]:
        gone = self.node.aborted | set(self.node.finished)
        return [sequence_id for sequence_id in self.node.specs if sequence_id not in gone]

    def ended_lenders(self) -> list[Hashable]:
        return [
            n for n in self.node.specs if n in self.unreleased and (n in self.node.aborted or n in self.node.finished)
        ]

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

    def check_moving(self) -> None:
        """What a link may read is final, and stays in use until it was released, whatever became of the sequence."""
        states = self.node.pool.snapshot()["states"]
        assert isinstance(states, tuple)
        for sequence_id, read in self.moving.items():
            if sequence_id in self.alive() and self.node.phases[sequence_id] is not Phase.WAITING:
                table, size = self.node.scheduler.block_ids(sequence_id), self.sizes.block_size
                known = [*self.node.specs[sequence_id].token_ids, *self.node.token_ids[sequence_id]]
                num_readable = self.node.scheduler.num_readable(sequence_id)
                num_full = min(num_readable, (len(known) - 1) // size)
                is_paused = sequence_id in self.node.paused
                assert num_full == num_readable or is_paused
                assert self.node.tokens_in(table[:num_full], num_full * size) == known[: num_full * size]
                read |= {block_id: known[at * size : (at + 1) * size] for at, block_id in enumerate(table[:num_full])}
                self.happened["read while it runs"] += num_full > 0 and not is_paused
                self.happened["read while it is paused"] += num_readable > num_full
            for block_id, token_ids in read.items():
                assert states[block_id] is BlockState.USED, "a link reads a block that is not in use"
                assert self.node.tokens_in([block_id], self.sizes.block_size) == token_ids

    def end(self) -> None:
        """Nothing new comes; everything that was accepted ends."""
        for sequence_id in self.moving:
            self.node.scheduler.release(sequence_id)
        self.moving.clear()
        for block_ids in self.leases:
            self.node.pool.release_lease(block_ids)
        while self.alive():
            for sequence_id in self.ended_lenders():  # may be what the head of the queue waits for
                self.node.scheduler.release(sequence_id)
                self.unreleased.remove(sequence_id)
            while self.resume():
                pass
            for sequence_id in list(self.node.paused):  # it gave way on a node that resumes nobody
                self.node.abandon(sequence_id)
            while self.stage():
                pass
            is_at_work = self.node.plan() is not None or self.node.unread or not self.alive()
            assert is_at_work, "something is alive, but nothing can be done"
            while self.node.unread:
                self.node.complete()
        self.node.run_to_the_end()
        for sequence_id in self.ended_lenders():
            self.node.scheduler.release(sequence_id)
        while self.stage():
            pass
        assert self.node.is_idle() and not self.node.scheduler.has_sequences
        assert Counter(self.node.saved) == Counter(self.node.to_save)


@pytest.mark.covers("P01", "P02", "Q03", "Q05", "Q07", "Q08", "S12", "S13", "S14", "W01", "W03", "W09")
@pytest.mark.parametrize("seed", range(examples(100, 2)))
def test_whatever_happens_each_sequence_gets_its_own_tokens_and_no_block_is_lost_or_reused_early(seed: int) -> None:
    life = Life(Random(seed))
    life.live()
    life.end()


class SchedulerMachine(RuleBasedStateMachine):
    """The same events in an order that Hypothesis chooses, and makes short where it finds a failure."""

    @initialize(seed=st.integers(0, 2**32))
    def start(self, seed: int) -> None:
        self.life = Life(Random(seed))

    @rule(
        events=st.lists(st.sampled_from([name for name, weight in EVENTS.items() for _ in range(weight)]), min_size=1)
    )
    def let(self, events: list[str]) -> None:
        for event in events:
            self.life.let(event)

    def teardown(self) -> None:
        if hasattr(self, "life"):
            self.life.end()


@pytest.mark.covers("P01", "P02", "Q03", "Q05", "Q08", "S12", "S13", "S14")
def test_in_any_order_of_events_the_scheduler_does_what_the_checked_node_allows() -> None:
    run_state_machine_as_test(
        SchedulerMachine, settings=settings(deadline=None, max_examples=examples(50, 3), stateful_step_count=20)
    )


def test_everything_does_happen() -> None:
    happened: Counter[str] = Counter()
    for seed in range(60):
        life = Life(Random(seed))
        life.live()
        happened += life.happened
        happened["preempted"] += life.node.scheduler.num_preempted
    assert set(happened) == {*EVENTS, "preempted", "read while it runs", "read while it is paused"}
    assert all(happened.values())
