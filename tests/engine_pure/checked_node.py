"""A scheduler, a pool and a fake runner, watched: every plan and every result is checked against the rules of the engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.block_pool import BlockPool, BlockState
from engine.fake_runner import FakeRunner, expected_tokens
from engine.plan import DecodeRow, Plan, PrefillChunk, SamplingParams, SlotResult, StepResult
from engine.prefix_cache import PrefixCache
from engine.reserve import ReserveConfig, ReservePolicy
from engine.saving import Save, SaveRules
from engine.scheduler import Scheduler, SchedulerConfig
from engine.sequence import Phase, Progress, SequenceSpec
from proto.block_key import block_keys, seed_key

KEY_SEED = seed_key(b"checked node")
Owner = tuple[int, int]  # slot, generation
P = Phase
NEXT_PHASES = {  # as far as two looks apart can tell
    P.WAITING: set(P) - {P.PREEMPTING, P.PAUSED},
    P.RUNNING_PREFILL: {P.RUNNING_PREFILL, P.RUNNING_DECODE, P.FINISHED},
    P.RUNNING_DECODE: {P.RUNNING_DECODE, P.FINISHED},
    P.PREEMPTING: {P.PREEMPTING, P.WAITING, P.PAUSED, P.FINISHED},
    P.PAUSED: {P.PAUSED, P.RUNNING_DECODE, P.WAITING, P.FINISHED},
    P.FINISHED: {P.FINISHED},
}
BACK = {(P.RUNNING_DECODE, P.PREEMPTING)}  # under pressure, or where it is asked for


@dataclass(frozen=True)
class Sizes:
    num_blocks: int = 64
    block_size: int = 4
    num_slots: int = 4
    max_batched_tokens: int = 16
    max_model_len: int = 64
    vocab_size: int = 7
    cache_generated: bool = True
    max_beside_decodes: int | None = None
    policy: ReservePolicy = "full"
    resumes: bool = True
    keeps: bool = False
    saves: SaveRules = field(default_factory=SaveRules)


def make_spec(
    sequence_id: Hashable,
    token_ids: Sequence[int],
    max_new_tokens: int,
    sizes: Sizes,
    *,
    seed: int | None = None,
    stop_token_ids: frozenset[int] = frozenset(),
    num_generated: int = 0,
    lends: bool = False,
) -> SequenceSpec:
    """A sequence with the block keys that its sender would have computed; greedy unless it has a seed."""
    return SequenceSpec(
        sequence_id=sequence_id,
        token_ids=tuple(token_ids),
        num_generated=num_generated,
        sampling=SamplingParams(0.0 if seed is None else 1.0, seed or 0),
        max_new_tokens=max_new_tokens,
        stop_token_ids=stop_token_ids,
        block_keys=tuple(block_keys(KEY_SEED, token_ids, sizes.block_size)),
        lends=lends,
    )


def right_answer(spec: SequenceSpec, vocab_size: int) -> list[int]:
    """What the sequence must give, up to and with its first stop token."""
    num_prompt = len(spec.token_ids) - spec.num_generated
    prompt, generated = spec.token_ids[:num_prompt], spec.token_ids[num_prompt:]
    token_ids = expected_tokens(prompt, generated, spec.sampling, spec.max_new_tokens, vocab_size)
    stops = [index for index, token_id in enumerate(token_ids) if token_id in spec.stop_token_ids]
    return token_ids[: stops[0] + 1] if stops else token_ids


class CheckedNode:
    """Plans run when their results are read: as late as they can, which is when early reuse of a block hurts."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.memory = np.zeros((sizes.num_blocks, 4 * sizes.block_size + 5), dtype=np.uint8)
        self.pool = BlockPool(sizes.num_blocks, sizes.block_size)
        self.cache = PrefixCache(self.pool)
        config = SchedulerConfig(
            num_slots=sizes.num_slots,
            max_batched_tokens=sizes.max_batched_tokens,
            max_model_len=sizes.max_model_len,
            max_prompt_tokens_beside_decodes=sizes.max_beside_decodes,
            cache_generated=sizes.cache_generated,
            reserve=ReserveConfig(sizes.policy),
            resumes_preempted=sizes.resumes,
            keeps_preempted=sizes.keeps,
            saves=sizes.saves,
        )
        self.scheduler = Scheduler(config, self.pool, KEY_SEED)
        self.runner = FakeRunner(self.memory, sizes.block_size, sizes.vocab_size, sizes.num_slots)
        self.unread: deque[Plan] = deque()
        self.specs: dict[Hashable, SequenceSpec] = {}
        self.token_ids: dict[Hashable, list[int]] = {}  # new ones
        self.finished: dict[Hashable, str] = {}
        self.aborted: set[Hashable] = set()
        self.paused: dict[Hashable, str] = {}  # why: "paused", or "preempted" and kept
        self.asked_to_pause: set[Hashable] = set()
        self.phases: dict[Hashable, Phase] = {}
        self.tables: dict[Owner, list[int]] = {}
        self.generations: dict[int, int] = {}
        self.positions: dict[Owner, int] = {}  # the next position of each owner
        self.marked: set[Owner] = set()
        self.block_of_key: dict[bytes, list[int]] = {}  # token ids of every block that may ever be published
        self.saves: dict[int, Save] = {}  # handed out, and being copied
        self.saved: list[tuple[bytes, ...]] = []  # the keys of each that was ever handed out
        self.to_save: list[tuple[bytes, ...]] = []  # what they must be, in any order
        self.on_host: set[int] = (
            set()
        )  # blocks that a device of its own memory has brought there since they were written

    # What a caller does

    def submit(self, spec: SequenceSpec) -> None:
        self.scheduler.submit(spec)
        self._remember(spec)

    def adopt(self, spec: SequenceSpec, block_ids: Sequence[int], num_promised: int) -> None:
        self.scheduler.adopt(spec, block_ids, num_promised)
        self._remember(spec)

    def _remember(self, spec: SequenceSpec) -> None:
        self.specs[spec.sequence_id], self.token_ids[spec.sequence_id] = spec, []
        size = self.sizes.block_size
        token_ids = [*spec.token_ids, *right_answer(spec, self.sizes.vocab_size)]
        for index, key in enumerate(block_keys(KEY_SEED, token_ids, size)):
            self.block_of_key[key] = token_ids[index * size : (index + 1) * size]

    def abort(self, sequence_id: Hashable) -> None:
        assert self.scheduler.abort(sequence_id)
        self.paused.pop(sequence_id, None)
        if sequence_id not in self.finished:
            self.aborted.add(sequence_id)

    def abandon(self, sequence_id: Hashable) -> None:
        """One that gave way, and that no other node takes."""
        assert self.paused.pop(sequence_id) == "preempted"
        self._expect_save(sequence_id, is_finished=False, decodes=True)
        self.scheduler.abandon(sequence_id)
        self.aborted.add(sequence_id)
        self._take_saves()

    def stage(self, save_id: int) -> None:
        """The KV pool has copied what it was given."""
        del self.saves[save_id]
        self.scheduler.saved(save_id)
        self.check()

    def pause(self, sequence_id: Hashable) -> bool:
        """Whether it will be; its Progress comes."""
        is_decoding = self.phases.get(sequence_id) is Phase.RUNNING_DECODE
        assert self.scheduler.pause(sequence_id) == is_decoding
        if is_decoding:
            self.asked_to_pause.add(sequence_id)
        self.check()
        return is_decoding

    def resume(self, sequence_id: Hashable) -> None:
        """Go on, with the tokens that it would have had anyhow."""
        if self.paused.pop(sequence_id) == "preempted":
            self._expect_save(sequence_id, is_finished=False, decodes=True)
        self.scheduler.resume(sequence_id)
        self._take_saves()
        self.check()

    def plan(self) -> Plan | None:
        """The next plan, checked."""
        plan = self.scheduler.plan()
        if plan is not None:
            self._check_plan(plan)
            self.unread.append(plan)
        self._take_saves()
        self.check()
        return plan

    def complete(self, spoilt: tuple[int, int] | None = None) -> list[Progress]:
        """Run and read the oldest unread step, checked. `spoilt`: the index of a row, and what it answers for a token."""
        plan = self.unread.popleft()
        slots = self.scheduler.snapshot()["slots"]
        assert isinstance(slots, tuple)
        result = self.runner.run(plan)
        if spoilt is not None:
            answers = [*result]
            row = answers[spoilt[0]]
            answers[spoilt[0]] = SlotResult(row.slot, row.generation, spoilt[1])
            result = StepResult.of(plan.step_id, answers)
        progress = [*self.scheduler.complete(result)]
        self.on_host |= {*plan.leaving_block_ids}
        for item in progress:
            self._check_progress(item)
            if item.finish in ("stop", "length"):
                decodes = any(slots[row.slot] == item.sequence_id for row in plan.decodes)
                self._expect_save(item.sequence_id, is_finished=True, decodes=decodes)
        for name in (slots[mark.slot] for mark in plan.marks):
            if self.scheduler.is_waiting(name) or (name in self.finished and self.finished[name] == "preempted"):
                self._expect_save(name, is_finished=False, decodes=True)
        self._take_saves()
        self.check()
        return progress

    def run_to_the_end(self, depth: int = 2) -> None:
        """Plan up to `depth` steps ahead until nothing is left to do."""
        while True:
            while len(self.unread) < depth and self.plan() is not None:
                pass
            if not self.unread:
                return
            self.complete()

    def _expect_save(self, sequence_id: Hashable, *, is_finished: bool, decodes: bool) -> None:
        """The rule, from what a caller sees: full blocks whose KV is final, of the prompt, and of the completion if it decodes."""
        rules, spec = self.sizes.saves, self.specs[sequence_id]
        known = [*spec.token_ids, *self.token_ids[sequence_id]][:-1]  # the last token is never fed
        if not (decodes and self.sizes.cache_generated):
            known = known[: len(spec.token_ids) - spec.num_generated]
        keys = tuple(block_keys(KEY_SEED, known, self.sizes.block_size))
        if keys and (rules.of_finished if is_finished else rules.of_preempted):
            self.to_save.append(keys)

    def _take_saves(self) -> None:
        for save in self.scheduler.take_saves():
            assert {block_id for _, block_id in save.blocks} <= self.on_host, (
                "copied from where the device has not put it"
            )
            self.saves[save.save_id] = save
            self.saved.append(tuple(key for key, _ in save.blocks))

    # What must hold

    def check(self) -> None:
        counts = self.pool.counts()
        assert counts.free + counts.cached + counts.used + counts.leased + counts.quarantined == self.pool.num_blocks
        assert self.pool.num_available >= 0
        assert 0 <= self.scheduler.num_free_slots <= self.sizes.num_slots
        assert self.scheduler.steps_in_flight == len(self.unread)
        keys = self.pool.snapshot()["keys"]
        assert isinstance(keys, tuple)
        for block_id, key in enumerate(keys):  # what the prefix cache hands out is final, and what its key says
            assert key is None or self.tokens_in([block_id], self.sizes.block_size) == self.block_of_key[key]
        self._check_saves()
        self._check_leaving()
        phases = self.scheduler.snapshot()["phases"]
        assert isinstance(phases, dict)
        for sequence_id, phase in phases.items():
            before = self.phases.get(sequence_id, Phase.WAITING)
            may_go_back = self.sizes.policy != "full" or sequence_id in self.asked_to_pause
            assert phase in NEXT_PHASES[before] or (may_go_back and (before, phase) in BACK)
            assert (phase is Phase.PAUSED) == (sequence_id in self.paused)
            self.phases[sequence_id] = phase

    def _check_saves(self) -> None:
        """What is being copied is whole, final, in use, and stays so."""
        states = self.pool.snapshot()["states"]
        assert isinstance(states, tuple)
        for save in self.saves.values():
            for key, block_id in save.blocks:
                assert states[block_id] is BlockState.USED
                assert self.tokens_in([block_id], self.sizes.block_size) == self.block_of_key[key]

    def _check_leaving(self) -> None:
        """What an unread step copies to the host is in use: a lease of it would be overwritten, with whatever arrived by then."""
        states = self.pool.snapshot()["states"]
        assert isinstance(states, tuple)
        for plan in self.unread:
            assert all(states[block_id] is BlockState.USED for block_id in plan.leaving_block_ids)

    def blocks_in_flight(self, but: Owner | None = None) -> set[int]:
        """Blocks that unread steps read or write, those of one owner left out."""
        owners = {(row.slot, row.generation) for plan in self.unread for row in rows_of(plan)} - {but}
        return {block_id for owner in owners for block_id in self.tables[owner]}

    def tokens_in(self, block_ids: Sequence[int], num_tokens: int) -> list[int]:
        """The tokens whose KV lies in these blocks."""
        kv = self.memory[:, : 4 * self.sizes.block_size].view("<i4")
        token_ids: list[int] = (kv[list(block_ids)].reshape(-1)[:num_tokens] - 1).tolist()
        return token_ids

    def is_idle(self) -> bool:
        """No block is in use, leased or promised; no slot is taken."""
        counts = self.pool.counts()
        is_pool_idle = counts.free + counts.cached == self.pool.num_blocks and self.pool.num_promised == 0
        return is_pool_idle and self.scheduler.num_free_slots == self.sizes.num_slots

    def _check_plan(self, plan: Plan) -> None:
        has_more = bool(plan.marks or plan.leaving_block_ids)
        assert 0 < plan.num_tokens <= self.sizes.max_batched_tokens or (has_more and plan.num_tokens == 0)
        owners = [(row.slot, row.generation) for row in (*rows_of(plan), *plan.marks)]
        assert len({slot for slot, _ in owners}) == len(owners)
        assert not self.marked & {*owners}, "nothing follows a mark"
        self.marked |= {(mark.slot, mark.generation) for mark in plan.marks}
        for start in plan.starts:
            assert start.generation > self.generations.get(start.slot, 0)
            assert start.slot not in {row.slot for unread in self.unread for row in rows_of(unread)}
            self.generations[start.slot] = start.generation
            self.tables[start.slot, start.generation] = []
        states = self.pool.snapshot()["states"]
        assert isinstance(states, tuple)
        for row in rows_of(plan):
            owner = (row.slot, row.generation)
            table = self.tables[owner]
            table += row.new_block_ids
            assert all(states[block_id] is BlockState.USED for block_id in table)
            first, end = span_of(row)
            assert first == self.positions.get(owner, first), "a row continues where the last one ended"
            self.positions[owner] = end
            written = set(table[first // self.sizes.block_size : (end - 1) // self.sizes.block_size + 1])
            assert not written & self.blocks_in_flight(but=owner), "reused while an unread step has it"
            self.on_host -= written

    def _check_progress(self, item: Progress) -> None:
        sequence_id = item.sequence_id
        assert sequence_id not in self.finished and sequence_id not in self.aborted
        if item.finish in ("broken", "stalled"):
            self.aborted.add(sequence_id)
            return
        if item.token_id is not None:
            self.token_ids[sequence_id].append(item.token_id)
        is_kept = item.finish == "paused" or (item.finish == "preempted" and self.scheduler.knows(sequence_id))
        if is_kept:
            self._check_paused(sequence_id, item)
        elif item.finish is not None:
            self.finished[sequence_id] = item.finish
        spec = self.specs[sequence_id]
        right = right_answer(spec, self.sizes.vocab_size)
        got = self.token_ids[sequence_id]
        assert got == right[: len(got)]
        if is_kept:
            assert len(got) < len(right)
        elif item.finish == "preempted":
            assert not self.sizes.resumes and len(got) < len(right)
        elif item.finish is not None:
            assert got == right
            assert item.finish == ("stop" if got[-1] in spec.stop_token_ids else "length")
        else:
            known = [*spec.token_ids, *got]
            table = self.scheduler.block_ids(sequence_id)
            assert self.tokens_in(table, item.num_computed) == known[: item.num_computed]

    def _check_paused(self, sequence_id: Hashable, item: Progress) -> None:
        """All that it said was told before, and all KV of it but the last token's is in its blocks."""
        assert item.finish is not None and item.token_id is None
        assert (item.finish == "paused") == (sequence_id in self.asked_to_pause)
        self.asked_to_pause.discard(sequence_id)
        self.paused[sequence_id] = item.finish
        known = [*self.specs[sequence_id].token_ids, *self.token_ids[sequence_id]]
        assert item.num_computed == len(known) - 1 == self.scheduler.num_planned(sequence_id)
        table = self.scheduler.block_ids(sequence_id)
        assert self.tokens_in(table, item.num_computed) == known[:-1]


def rows_of(plan: Plan) -> tuple[DecodeRow | PrefillChunk, ...]:
    """A plan's rows in the order of its results."""
    return (*plan.decodes, *plan.chunks)


def span_of(row: DecodeRow | PrefillChunk) -> tuple[int, int]:
    """First and end position that a row computes."""
    if isinstance(row, DecodeRow):
        return row.position, row.position + 1
    return row.start, row.start + len(row.token_ids)


SIZES = Sizes()


def phase_of(node: CheckedNode, sequence_id: object) -> Phase:
    """The phase of a sequence that the scheduler knows."""
    phases = node.scheduler.snapshot()["phases"]
    assert isinstance(phases, dict)
    phase = phases[sequence_id]
    assert isinstance(phase, Phase)
    return phase
