"""Which sequence runs, on which blocks, in which step. No tensors, no clock, no requests: plans out, results in.

Each step is a plan within a token budget: first one row for every sequence that decodes, then chunks of prompts, oldest
first, then chunks of newly admitted ones; the chunks of a step that decodes may have a smaller budget, for what decodes waits
for them. Admission is first come, first served (engine/room.py says who fits), and a head of
the queue that does not fit holds up those behind it rather than starve.

Short of blocks: a decode row that finds no block for its next position waits, and the youngest RUNNING_DECODE gives way, unless
as many blocks are on their way already; only decodes do, a prompt would have to be computed again. A running prompt whose chunk
finds no blocks ends the step. Nobody new is admitted in a step that was short, nor while somebody gives way. Of two prompts
neither can hold what the other lacks: a prompt is begun when all chunks of those before it are planned.

Steps overlap: plan() is called again before complete() brought the last results. Of a sequence that samples in an unread
step the next token is unknown, yet its next row can be planned, because the runner keeps each slot's last token. A sequence
therefore never runs past `max_new_tokens`, but a stop token is discovered one or two rows late; the surplus rows write into
the sequence's own blocks, and their results are ignored. Nor is the length of a sequence known that has to give way: its slot is
marked, the runner answers the mark in order, and only then is the sequence queued again, first in line, kept for another node,
or ended. A sequence that moves is stopped in the same way; it may be resumed where it was.

Who owns a sequence's blocks and slot, and until when:

    waiting      nothing
    admitted     slot; matched and allocated blocks, one reference each; promises, where room.py gives any
    preempting   the same, until the mark is answered
    paused       blocks and promises; a reserved slot, unless it gave way
    finished     the same without promises, until the results of the last step launched with it (its mark's, if it was giving
                 way) were read: until then that step may still write into them
    then         the slot is free for the next generation; the blocks' references are dropped, or, where the sequence lends
                 (a link still reads them), kept until release()
    shown        what a plan puts where links read has one more reference until its step, which copies it, was read

A full block is offered to the prefix cache when the step that completed it was read, never before: what the cache hands out
is final. Surplus rows write behind everything published.
"""

from __future__ import annotations

from collections import abc, deque
from dataclasses import dataclass, field, replace

from engine.block_pool import BlockPool
from engine.plan import Plan, StepResult
from engine.planning import Planner
from engine.population import Backlog, Population, Waiting
from engine.reading import Reader
from engine.reserve import ReserveConfig
from engine.room import Room
from engine.saving import Save, SaveRules, Saves
from engine.sequence import Phase, Progresses, Sequence, SequenceSpec


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Sizes of one node's batch."""

    num_slots: int  # sequences that run at the same time
    max_batched_tokens: int  # token positions of one step; at least one per slot, so that everything that runs advances
    max_model_len: int  # prompt and completion of one sequence
    max_prompt_tokens_beside_decodes: int | None = None  # of those, in a step that decodes too; None: all that is left
    cache_generated: bool = True  # whether blocks with completion tokens are offered to the prefix cache, and saved
    reserve: ReserveConfig = field(default_factory=ReserveConfig)
    saves: SaveRules = field(default_factory=SaveRules)  # whose blocks go to the KV pool
    resumes_preempted: bool = True  # here, first in line; else a preempted sequence ends with Progress "preempted"
    keeps_preempted: bool = False  # then it is PAUSED with its blocks, for another node to take; else they are free

    def __post_init__(self) -> None:
        if self.num_slots < 1:
            raise ValueError(f"{self.num_slots} slots")
        if self.max_batched_tokens < self.num_slots:
            raise ValueError(f"{self.max_batched_tokens} batched tokens for {self.num_slots} slots: at least one each")
        if (beside := self.max_prompt_tokens_beside_decodes) is not None and beside < 1:
            raise ValueError(f"{beside} prompt tokens beside decodes: no prompt would ever end")


class Scheduler:
    """One node's sequences over one pool. Not thread-safe: the loop that decides owns it."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, key_seed: bytes) -> None:
        """`key_seed` is proto.block_key.seed_key(fingerprint). Raises ValueError for a pool that cannot hold one sequence."""
        if (room := pool.num_blocks * pool.block_size) < config.max_model_len:
            raise ValueError(f"a pool of {room} tokens cannot hold max_model_len = {config.max_model_len}")
        self._config = config
        self._pool = pool
        self._room = Room(pool, config.reserve, config.cache_generated)
        self._all = Population(pool, config.num_slots, key_seed)
        self._saves = Saves(pool, config.saves)
        budgets = (config.max_batched_tokens, config.max_prompt_tokens_beside_decodes)
        self._planner = Planner(self._all, self._room, self._saves, *budgets)
        resumes, keeps = config.resumes_preempted, config.keeps_preempted
        self._reader = Reader(self._all, self._room, self._saves, resumes_preempted=resumes, keeps_preempted=keeps)
        self._unread: deque[Plan] = deque()
        self.num_prompt_tokens = 0  # prompt positions that the steps read so far have computed

    def take_role(self, resumes_preempted: bool, max_prompt_tokens_beside_decodes: int | None) -> None:
        """Go on under other rules (SchedulerConfig). ValueError: somebody is here, whom other rules let in."""
        if self.has_sequences or self._all.slots.num_reserved:
            raise ValueError("there are sequences, or slots kept for some")
        self._config = replace(self._config, resumes_preempted=resumes_preempted)
        self._planner.bound_prompts(max_prompt_tokens_beside_decodes)
        self._reader.resumes_preempted = resumes_preempted
        self.num_prompt_tokens = 0

    # Sequences come and go

    def submit(self, spec: SequenceSpec) -> None:
        """Queue a sequence behind all others. ValueError: it can never run here, or its id is taken."""
        self._check(spec)
        self._all.waiting[spec.sequence_id] = Waiting(spec, self._all.new_arrival())

    def adopt(
        self, spec: SequenceSpec, block_ids: abc.Sequence[int], num_promised: int, num_published: int = 0
    ) -> None:
        """Run a sequence whose KV came from elsewhere, in a slot taken with reserve_slots().

        `block_ids` hold the KV of token_ids[:-1]; the first step feeds token_ids[-1]. The caller's references on them and its
        `num_promised` promises pass to the sequence; under the policy "full" they are enough for its limit, else there are
        none. Full blocks are published now, but for the leading `num_published`, which were offered before, be it with a
        sequence that shares them. ValueError, and nothing passes: no slot was reserved, too few blocks, or what submit() refuses.
        """
        self._check(spec)
        num_computed = len(spec.token_ids) - 1
        if len(block_ids) * self._pool.block_size < num_computed:
            raise ValueError(f"{len(block_ids)} blocks cannot hold the KV of {num_computed} tokens")
        num_at_limit = spec.num_blocks_at_limit(self._pool.block_size)
        if self._room.promises_growth and len(block_ids) + num_promised < num_at_limit:
            raise ValueError(f"{len(block_ids)} + {num_promised} blocks are less than {spec.sequence_id}'s limit")
        if self._all.slots.num_reserved < 1:
            raise ValueError(f"no slot is reserved for {spec.sequence_id}")
        self._all.slots.unreserve(1)
        sequence = self._all.occupy(Waiting(spec, self._all.new_arrival()), list(block_ids), num_promised, num_computed)
        num_published = min(num_published, self._room.num_cacheable(spec, num_computed, decodes=True))
        sequence.keys += spec.block_keys[:num_published]
        self._all.start_decoding(sequence)
        self._room.publish(sequence, num_computed, decodes=True)

    def abort(self, sequence_id: abc.Hashable) -> bool:
        """End a sequence wherever it is, without further progress; False if nobody knows it. A finished one stays as it is.

        It needs no mark: what it generates does not matter any more, and that its rows are done is said by their results.
        """
        if self._all.waiting.pop(sequence_id, None) is not None:
            return True
        if (paused := self._all.paused.get(sequence_id)) is not None:
            self._all.drop(paused)
            return True
        sequence = self._all.admitted.get(sequence_id)
        if sequence is None:
            return sequence_id in self._all.lent
        if not self._reader.is_finished(sequence):
            self._all.finish(sequence)
            if not self._reader.has_unread_rows(sequence):
                self._all.retire(sequence)
        return True

    def abandon(self, sequence_id: abc.Hashable) -> None:
        """What gave way does not go on here, nor is it another node's: end it, its blocks saved where that is asked for."""
        if (paused := self._all.paused.get(sequence_id)) is not None:
            self._saves.preempted(paused)
        self.abort(sequence_id)

    def release(self, sequence_id: abc.Hashable) -> bool:
        """Nobody reads a lending sequence's blocks any more: drop them, once no unread step can write them either.

        False if nobody knows it (one aborted while it waited lent nothing). ValueError: it does not lend, or still runs and
        did not begin to with lend().
        """
        block_ids = self._all.lent.pop(sequence_id, None)
        if block_ids is not None:
            self._pool.free(block_ids)
            return True
        if (moving := self._all.read.pop(sequence_id, None)) is not None:
            moving.is_read = False
            return True
        sequence = self._all.admitted.get(sequence_id)
        if sequence is None and sequence_id not in self._all.waiting:
            return False
        if sequence is None or not sequence.is_lending or not self._reader.is_finished(sequence):
            raise ValueError(f"sequence {sequence_id} has nothing to release")
        sequence.is_lending = False
        return True

    def knows(self, sequence_id: abc.Hashable) -> bool:
        """Whether the sequence is here, be it only until a step that was launched with it is read."""
        return self._all.knows(sequence_id)

    def is_waiting(self, sequence_id: abc.Hashable) -> bool:
        """Whether it holds nothing yet, or nothing any more."""
        return sequence_id in self._all.waiting

    def block_ids(self, sequence_id: abc.Hashable) -> tuple[int, ...]:
        """The block table so far; until the blocks are dropped. KeyError: nobody knows the sequence."""
        if sequence_id in self._all.waiting:
            return ()
        if sequence_id in self._all.admitted or sequence_id in self._all.paused:  # it may have left others behind, lent
            return tuple(self._held(sequence_id).block_ids)
        return tuple(self._all.lent[sequence_id])

    # A sequence moves to another node

    def can_move(self, sequence_id: abc.Hashable) -> bool:
        """Whether it has decoded, and holds blocks: it decodes, gives way, or is paused; and no link reads its blocks yet."""
        if sequence_id in self._all.read or sequence_id in self._all.lent:
            return False
        sequence = self._all.admitted.get(sequence_id)
        if sequence is None:
            return sequence_id in self._all.paused
        return self._all.slots.phase_of(sequence) in (Phase.RUNNING_DECODE, Phase.PREEMPTING)

    def lend(self, sequence_id: abc.Hashable) -> None:
        """A link is going to read a sequence that can_move(): what it has stays until release(), whatever becomes of it.

        Its blocks become readable as they become final: num_readable().
        """
        sequence = self._held(sequence_id)
        sequence.is_read, sequence.num_shown, sequence.num_readable = True, 0, 0
        self._all.read[sequence_id] = sequence

    def num_readable(self, sequence_id: abc.Hashable) -> int:
        """How many leading blocks of a sequence that lend() named a link may read now; of a paused one in the end all."""
        return self._held(sequence_id).num_readable

    def num_planned(self, sequence_id: abc.Hashable) -> int:
        """How many leading positions of an admitted or paused sequence are computed, or will be by steps that are launched."""
        sequence = self._held(sequence_id)
        if sequence_id in self._all.paused:
            return len(sequence.token_ids) - 1
        return int(self._all.slots.num_planned[sequence.slot])

    def pause(self, sequence_id: abc.Hashable) -> bool:
        """Stop a sequence that decodes, in order: it is marked in the next plan, and nothing of it follows.

        Its Progress "paused" comes behind every token that it said; it keeps blocks, promises and a slot until resume() or
        abort(). False, and nothing happens, if it does not decode: it waits, computes its prompt, ends, or gives way.
        """
        sequence = self._all.admitted.get(sequence_id)
        if sequence is None or self._all.slots.phase_of(sequence) is not Phase.RUNNING_DECODE:
            return False
        self._planner.pause(sequence)
        return True

    def resume(self, sequence_id: abc.Hashable) -> None:
        """A paused sequence decodes on where it was; one that gave way is first in line again. KeyError: none is paused.

        ValueError: it gave way, and this node resumes nobody who did.
        """
        sequence = self._all.paused[sequence_id]
        if sequence.keeps_slot:
            self._all.unpark(sequence)
        elif self._config.resumes_preempted:
            self._saves.preempted(sequence)
            self._all.requeue(sequence)
        else:
            raise ValueError(f"sequence {sequence_id} gave way, and does not go on here")

    # Blocks for the KV pool

    def take_saves(self) -> list[Save]:
        """What is to be stored and was not handed out yet; its blocks are kept until saved()."""
        return self._saves.take()

    def take_broken(self) -> tuple[bytes, ...]:
        """Keys of blocks that are to be taken out of the KV pool, where it has them; handed out once."""
        return self._saves.take_broken()

    def saved(self, save_id: int) -> None:
        """Nobody copies this save's blocks any more. KeyError: there is no such save, or it was answered before."""
        self._saves.staged(save_id)

    # Room for sequences that come from elsewhere

    @property
    def promises_growth(self) -> bool:
        """Whether adopt() wants promises up to the limit (the reserve policy "full")."""
        return self._room.promises_growth

    def admits(
        self, num_blocks: int, remaining: abc.Sequence[int], granted: abc.Sequence[int] = (), reserves: bool = True
    ) -> bool:
        """Whether sequences that take so many blocks of the pool find room beside what runs here.

        `remaining`: how many tokens each may still say; `granted`: the same of those that have a reserved slot. Without
        `reserves` what runs is left nothing to grow into. Never while somebody who runs lacks blocks.
        """
        if self._planner.is_short or self._all.num_preempting:
            return False
        if not reserves:
            return self._pool.can_allocate(num_blocks)
        return self._room.admits(num_blocks, remaining, self._all.slots, granted)

    def reserve_slots(self, num_slots: int) -> bool:
        """Keep so many free slots for a later adopt() each; False, and nothing reserved, if there are fewer."""
        return self._all.slots.reserve(num_slots)

    def unreserve_slots(self, num_slots: int) -> None:
        """Give back what reserve_slots() took. ValueError: fewer are reserved."""
        self._all.slots.unreserve(num_slots)

    # Numbers

    def backlog(self) -> Backlog:
        """What a newcomer would find in front of it."""
        return self._all.backlog()

    @property
    def has_sequences(self) -> bool:
        """Whether anything is here, be it only blocks that a link reads, or that are saved, or a step that was launched."""
        here = self._all
        return bool(here.waiting or here.admitted or here.paused or here.lent or self._unread or self._saves)

    @property
    def num_saves(self) -> int:
        """Sequences that are gone, and whose blocks are kept for the KV pool."""
        return len(self._saves)

    @property
    def resumes_preempted(self) -> bool:
        """Whether who gave way goes on here."""
        return self._config.resumes_preempted

    @property
    def num_slots(self) -> int:
        """All there are."""
        return self._config.num_slots

    @property
    def num_free_slots(self) -> int:
        """Slots neither occupied nor reserved."""
        return self._all.slots.num_free

    @property
    def num_waiting(self) -> int:
        """Sequences that hold nothing yet."""
        return len(self._all.waiting)

    @property
    def num_running(self) -> int:
        """Sequences admitted and not finished."""
        return len(self._all.admitted) - self.num_in(Phase.FINISHED)

    def num_in(self, phase: Phase) -> int:
        """Sequences of this phase that hold a slot."""
        return self._all.slots.num_in(phase)

    @property
    def num_preempted(self) -> int:
        """Preemptions so far."""
        return self._planner.num_preempted

    @property
    def steps_in_flight(self) -> int:
        """Plans whose results were not read yet."""
        return len(self._unread)

    def snapshot(self) -> dict[str, object]:
        """Every sequence with its phase, and who holds the slots."""
        return {
            **self._all.snapshot(),
            "num_preempted": self.num_preempted,
            "num_late": self._reader.num_late,
            "reserve": self._room.reserve.value,
            "steps_in_flight": len(self._unread),
            "num_saves": len(self._saves),
            "references_of_saves": self._saves.num_references,
            "references_of_shown": sum(1 for _ in self._planner.shown_block_ids()),
        }

    # Steps

    def plan(self) -> Plan | None:
        """The next step; None if there is nothing to do before further results, sequences or room."""
        plan = self._planner.plan()
        if plan is not None:
            self._unread.append(plan)
        return plan

    def complete(self, result: StepResult) -> Progresses:
        """Read the results of the oldest unread step. ValueError, and nothing changes: they are not that step's, row by row."""
        if not self._unread or result.step_id != self._unread[0].step_id:
            raise ValueError(f"results of step {result.step_id} out of order")
        plan = self._unread[0]
        self._reader.check(plan, result)
        shown = self._planner.read(plan.step_id)  # first: who retires with this step frees its blocks in order
        progress = self._reader.read(plan, result)
        self._unread.popleft()
        self.num_prompt_tokens += plan.num_tokens - len(plan.decodes)
        self._saves.read(plan.step_id)
        for each in shown:
            if each.sequence.owner == each.owner:  # else it was resumed, and goes on writing its last block
                each.sequence.num_readable = each.num_blocks
        return progress

    # Inside

    def _held(self, sequence_id: abc.Hashable) -> Sequence:
        return self._all.paused.get(sequence_id) or self._all.admitted[sequence_id]

    def _check(self, spec: SequenceSpec) -> None:
        if self.knows(spec.sequence_id):
            raise ValueError(f"sequence {spec.sequence_id} is here already")
        spec.check_fits(self._config.max_model_len, self._pool.block_size)
