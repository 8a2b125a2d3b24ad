"""Which sequence runs, on which blocks, in which step. No tensors, no clock, no requests: plans out, results in.

Each step is a plan within a token budget: first one row for every sequence that decodes, then chunks of prompts, oldest
first, then chunks of newly admitted ones. Admission is first come, first served, and reserves a sequence's whole limit:
blocks not needed yet are promised by the pool and taken one by one as the sequence grows. So growth cannot fail, nothing is
ever preempted, and a head of the queue that does not fit holds up those behind it rather than starve.

Steps overlap: plan() is called again before complete() brought the last results. Of a sequence that samples in an unread
step the next token is unknown, yet its next row can be planned, because the runner keeps each slot's last token. A sequence
therefore never runs past `max_new_tokens`, but a stop token is discovered one or two rows late; the surplus rows write into
the sequence's own blocks, and their results are ignored.

Who owns a sequence's blocks and slot, and until when:

    waiting      nothing
    admitted     slot; matched and allocated blocks, one reference each; promises for the rest
    finished     the same without promises, until the results of the last step launched with it were read: until then that step
                 may still write into them
    then         the slot is free for the next generation; the blocks' references are dropped, or, where the sequence lends
                 (a sender still reads them), kept until release()

A full block is offered to the prefix cache when the step that completed it was read, never before: what the cache hands out
is final. Surplus rows write behind everything published.
"""

from __future__ import annotations

from collections import OrderedDict, abc, deque
from dataclasses import dataclass

from engine.block_pool import BlockPool
from engine.plan import BROKEN_ROW, DecodeRow, Plan, PrefillChunk, SlotResult, SlotStart, StepResult
from engine.prefix_cache import PrefixCache
from engine.sequence import NEVER, Phase, Progress, Sequence, SequenceSpec, blocks_for


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Sizes of one node's batch."""

    num_slots: int  # sequences that run at the same time
    max_batched_tokens: int  # token positions of one step; at least one per slot, so that everything that runs advances
    max_model_len: int  # prompt and completion of one sequence
    cache_generated: bool = True  # whether blocks with completion tokens are offered to the prefix cache

    def __post_init__(self) -> None:
        if self.num_slots < 1:
            raise ValueError(f"{self.num_slots} slots")
        if self.max_batched_tokens < self.num_slots:
            raise ValueError(f"{self.max_batched_tokens} batched tokens for {self.num_slots} slots: at least one each")


class Scheduler:
    """One node's sequences over one pool. Not thread-safe: the loop that decides owns it."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, key_seed: bytes) -> None:
        """`key_seed` is proto.block_key.seed_key(fingerprint). Raises ValueError for a pool that cannot hold one sequence."""
        if (room := pool.num_blocks * pool.block_size) < config.max_model_len:
            raise ValueError(f"a pool of {room} tokens cannot hold max_model_len = {config.max_model_len}")
        self._config = config
        self._pool = pool
        self._cache = PrefixCache(pool)
        self._key_seed = key_seed
        self._waiting: OrderedDict[abc.Hashable, SequenceSpec] = OrderedDict()
        self._admitted: dict[abc.Hashable, Sequence] = {}  # all that hold a slot, finished ones included
        self._lent: dict[abc.Hashable, list[int]] = {}  # finished, slot free, blocks not released yet
        # Of the admitted ones, those with something left to plan, oldest first:
        self._prefilling: OrderedDict[abc.Hashable, Sequence] = OrderedDict()
        self._decoding: OrderedDict[abc.Hashable, Sequence] = OrderedDict()
        self._slots: list[Sequence | None] = [None] * config.num_slots
        self._generations = [0] * config.num_slots
        self._free_slots = list(range(config.num_slots - 1, -1, -1))
        self._num_reserved_slots = 0
        self._unread: deque[Plan] = deque()
        self._next_step_id = 0
        self._last_read_step_id = NEVER

    # Sequences come and go

    def submit(self, spec: SequenceSpec) -> None:
        """Queue a sequence behind all others. ValueError: it can never run here, or its id is taken."""
        self._check(spec)
        self._waiting[spec.sequence_id] = spec

    def adopt(
        self, spec: SequenceSpec, block_ids: abc.Sequence[int], num_promised: int, num_published: int = 0
    ) -> None:
        """Run a sequence whose KV came from elsewhere, in a slot taken with reserve_slots().

        `block_ids` hold the KV of token_ids[:-1]; the first step feeds token_ids[-1]. The caller's references on them and its
        `num_promised` promises, together enough for the sequence's limit, pass to the sequence. Full blocks are published
        now, but for the leading `num_published`, which were offered with a sequence that shares them. ValueError, and
        nothing passes: no slot was reserved, too few blocks, or what submit() refuses.
        """
        self._check(spec)
        num_computed = len(spec.token_ids) - 1
        if self._num_reserved_slots < 1:
            raise ValueError(f"no slot is reserved for {spec.sequence_id}")
        if len(block_ids) * self._pool.block_size < num_computed:
            raise ValueError(f"{len(block_ids)} blocks cannot hold the KV of {num_computed} tokens")
        if len(block_ids) + num_promised < spec.num_blocks_at_limit(self._pool.block_size):
            raise ValueError(f"{len(block_ids)} + {num_promised} blocks are less than {spec.sequence_id}'s limit")
        self._num_reserved_slots -= 1
        sequence = self._occupy_slot(spec, list(block_ids), num_promised)
        sequence.phase = Phase.RUNNING_DECODE
        sequence.num_planned = sequence.num_computed = num_computed
        if num_published:
            sequence.num_published, sequence.last_key = num_published, spec.block_keys[num_published - 1]
        self._decoding[spec.sequence_id] = sequence
        self._publish(sequence)

    def abort(self, sequence_id: abc.Hashable) -> bool:
        """End a sequence wherever it is, without further progress; False if nobody knows it. A finished one stays as it is."""
        if self._waiting.pop(sequence_id, None) is not None:
            return True
        sequence = self._admitted.get(sequence_id)
        if sequence is None:
            return sequence_id in self._lent
        if sequence.phase is not Phase.FINISHED:
            self._finish(sequence)
            if sequence.last_step_id <= self._last_read_step_id:
                self._retire(sequence)
        return True

    def release(self, sequence_id: abc.Hashable) -> bool:
        """Nobody reads a lending sequence's blocks any more: drop them, once no unread step can write them either.

        False if nobody knows it (one aborted while it waited lent nothing). ValueError: it does not lend, or still runs.
        """
        block_ids = self._lent.pop(sequence_id, None)
        if block_ids is not None:
            self._pool.free(block_ids)
            return True
        sequence = self._admitted.get(sequence_id)
        if sequence is None and sequence_id not in self._waiting:
            return False
        if sequence is None or not sequence.is_lending or sequence.phase is not Phase.FINISHED:
            raise ValueError(f"sequence {sequence_id} has nothing to release")
        sequence.is_lending = False
        return True

    def knows(self, sequence_id: abc.Hashable) -> bool:
        """Whether the sequence is here, be it only until a step that was launched with it is read."""
        return sequence_id in self._waiting or sequence_id in self._admitted or sequence_id in self._lent

    def block_ids(self, sequence_id: abc.Hashable) -> tuple[int, ...]:
        """The block table so far; until the blocks are dropped. KeyError: nobody knows the sequence."""
        if sequence_id in self._waiting:
            return ()
        if sequence_id in self._lent:
            return tuple(self._lent[sequence_id])
        return tuple(self._admitted[sequence_id].block_ids)

    # Slots

    def reserve_slots(self, num_slots: int) -> bool:
        """Keep so many free slots for a later adopt() each; False, and nothing reserved, if there are fewer."""
        if self.num_free_slots < num_slots:
            return False
        self._num_reserved_slots += num_slots
        return True

    def unreserve_slots(self, num_slots: int) -> None:
        """Give back what reserve_slots() took. ValueError: fewer are reserved."""
        if self._num_reserved_slots < num_slots:
            raise ValueError(f"of {num_slots} slots to unreserve {self._num_reserved_slots} are reserved")
        self._num_reserved_slots -= num_slots

    # Numbers

    @property
    def num_free_slots(self) -> int:
        """Slots neither occupied nor reserved."""
        return len(self._free_slots) - self._num_reserved_slots

    @property
    def num_waiting(self) -> int:
        """Sequences that hold nothing yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences admitted and not finished."""
        return sum(sequence.phase is not Phase.FINISHED for sequence in self._admitted.values())

    @property
    def steps_in_flight(self) -> int:
        """Plans whose results were not read yet."""
        return len(self._unread)

    def snapshot(self) -> dict[str, object]:
        """Every sequence with its phase, and who holds the slots."""
        return {
            "phases": dict.fromkeys(self._waiting, Phase.WAITING)
            | {sequence_id: sequence.phase for sequence_id, sequence in self._admitted.items()}
            | dict.fromkeys(self._lent, Phase.FINISHED),
            "slots": tuple(None if sequence is None else sequence.spec.sequence_id for sequence in self._slots),
            "generations": tuple(self._generations),
            "num_reserved_slots": self._num_reserved_slots,
            "num_lent": len(self._lent),
            "steps_in_flight": len(self._unread),
        }

    # Steps

    def plan(self) -> Plan | None:
        """The next step; None if there is nothing to do before further results, sequences or room."""
        starts: list[SlotStart] = []
        decodes = self._plan_decodes(starts)
        chunks = self._plan_chunks(starts, self._config.max_batched_tokens - len(decodes))
        if not decodes and not chunks:
            return None
        plan = Plan(self._next_step_id, tuple(starts), tuple(decodes), tuple(chunks))
        self._next_step_id += 1
        self._unread.append(plan)
        return plan

    def complete(self, result: StepResult) -> list[Progress]:
        """Read the results of the oldest unread step. ValueError: they are not that step's, row by row."""
        if not self._unread or result.step_id != self._unread[0].step_id:
            raise ValueError(f"results of step {result.step_id} out of order")
        plan = self._unread[0]
        rows: tuple[DecodeRow | PrefillChunk, ...] = (*plan.decodes, *plan.chunks)
        if [row.slot for row in rows] != [answer.slot for answer in result.slots]:
            raise ValueError(f"results of step {result.step_id} are not those of its rows")
        self._unread.popleft()
        self._last_read_step_id = plan.step_id
        progress: list[Progress] = []
        for row, answer in zip(rows, result.slots, strict=True):
            sequence = self._slots[row.slot]
            # A slot changes hands only when no unread step has a row of its owner, so its owner is who the row was for.
            assert sequence is not None and sequence.generation == row.generation
            if answer.generation == sequence.generation:
                if sequence.phase is not Phase.FINISHED:
                    progress.append(self._advance(sequence, row, answer))
                elif isinstance(row, PrefillChunk) and not sequence.is_broken:
                    self._keep_computed(sequence, row, answer)
            if sequence.phase is Phase.FINISHED and sequence.last_step_id == plan.step_id:
                self._retire(sequence)
        return progress

    # Inside: planning

    def _plan_decodes(self, starts: list[SlotStart]) -> list[DecodeRow]:
        """One row for each sequence that decodes: never more than slots, which the budget always covers."""
        rows: list[DecodeRow] = []
        for sequence in list(self._decoding.values()):
            position = sequence.num_planned
            new_block_ids = self._launch(sequence, position + 1, starts)
            rows.append(DecodeRow(sequence.slot, sequence.generation, position, new_block_ids))
            sequence.num_samples_planned += 1
            if not sequence.may_sample_more:
                del self._decoding[sequence.spec.sequence_id]
        return rows

    def _plan_chunks(self, starts: list[SlotStart], budget_tokens: int) -> list[PrefillChunk]:
        """Chunks of running prompts, oldest first, then of newly admitted ones, until the budget is used up."""
        chunks: list[PrefillChunk] = []
        while budget_tokens > 0:
            sequence = next(iter(self._prefilling.values()), None) or self._admit()
            if sequence is None:
                break
            start = sequence.num_planned
            end = start + min(budget_tokens, sequence.num_prompt_unplanned)
            samples = end == len(sequence.spec.token_ids)
            new_block_ids = self._launch(sequence, end, starts)
            token_ids = sequence.spec.token_ids[start:end]
            chunks.append(PrefillChunk(sequence.slot, sequence.generation, start, token_ids, new_block_ids, samples))
            budget_tokens -= end - start
            if samples:  # else the budget is used up: one row per slot
                sequence.num_samples_planned = 1
                del self._prefilling[sequence.spec.sequence_id]
                if sequence.may_sample_more:
                    sequence.phase = Phase.RUNNING_DECODE
                    self._decoding[sequence.spec.sequence_id] = sequence
        return chunks

    def _admit(self) -> Sequence | None:
        """Give the head of the queue a slot, its cached prefix, and the promise of all the blocks that it can need."""
        if not self._waiting or self.num_free_slots < 1:
            return None
        spec = next(iter(self._waiting.values()))
        # At least the last token is computed: its logits are what the first sampled token is drawn from. Every token of a
        # prompt whose logprobs are wanted is: a cached block has KV, but no logits.
        max_matched = 0 if spec.sampling.prompt_logprobs else (len(spec.token_ids) - 1) // self._pool.block_size
        matched = self._cache.acquire_match(spec.block_keys, max_matched)
        num_missing = spec.num_blocks_at_limit(self._pool.block_size) - len(matched)
        if not self._pool.can_allocate(num_missing):
            self._pool.free(matched)
            return None
        self._pool.promise(num_missing)
        del self._waiting[spec.sequence_id]
        sequence = self._occupy_slot(spec, matched, num_missing)
        sequence.num_planned = sequence.num_computed = len(matched) * self._pool.block_size
        self._prefilling[spec.sequence_id] = sequence
        return sequence

    def _occupy_slot(self, spec: SequenceSpec, block_ids: list[int], num_promised: int) -> Sequence:
        slot = self._free_slots.pop()
        self._generations[slot] += 1
        sequence = Sequence(
            spec=spec,
            slot=slot,
            generation=self._generations[slot],
            token_ids=list(spec.token_ids),
            block_ids=block_ids,
            num_promised=num_promised,
            is_lending=spec.lends,
            last_key=self._key_seed,
        )
        self._slots[slot] = sequence
        self._admitted[spec.sequence_id] = sequence
        return sequence

    def _launch(self, sequence: Sequence, end: int, starts: list[SlotStart]) -> tuple[int, ...]:
        """Note that the plan being made computes the sequence up to position `end`; the blocks to tell the runner of."""
        if sequence.last_step_id == NEVER:
            starts.append(sequence.slot_start())
        num_new = blocks_for(end, self._pool.block_size) - len(sequence.block_ids)
        if num_new > 0:
            sequence.block_ids += self._pool.allocate(num_new, promised=True)
            sequence.num_promised -= num_new
        new_block_ids = tuple(sequence.block_ids[sequence.num_blocks_planned :])
        sequence.num_blocks_planned = len(sequence.block_ids)
        sequence.num_planned = end
        sequence.last_step_id = self._next_step_id
        return new_block_ids

    # Inside: reading

    def _advance(self, sequence: Sequence, row: DecodeRow | PrefillChunk, answer: SlotResult) -> Progress:
        sequence_id, token_id = sequence.spec.sequence_id, answer.token_id
        match row:
            case DecodeRow():
                sequence.num_computed, samples = row.position + 1, True
            case PrefillChunk():
                sequence.num_computed, samples = row.start + len(row.token_ids), row.samples
        if token_id == BROKEN_ROW:
            sequence.is_broken = True
            self._finish(sequence)
            return Progress(sequence_id, sequence.num_computed, None, "broken")
        if samples != (token_id >= 0):
            kind = "samples" if samples else "does not sample"
            raise ValueError(f"slot {row.slot} answered {token_id}: the row {kind}")
        self._publish(sequence)
        if not samples:
            return Progress(sequence_id, sequence.num_computed, None, None, None, answer.prompt_logprobs)
        sequence.token_ids.append(token_id)
        finish = sequence.finish_reason()
        if finish is not None:
            self._finish(sequence)
        told = (answer.logprobs, answer.prompt_logprobs, answer.branch_tokens)
        return Progress(sequence_id, sequence.num_computed, token_id, finish, *told)

    def _keep_computed(self, sequence: Sequence, row: PrefillChunk, answer: SlotResult) -> None:
        """An aborted prompt's chunk was launched already: who asks for the same prompt again need not compute it twice."""
        if answer.token_id != BROKEN_ROW:
            sequence.num_computed = row.start + len(row.token_ids)
            self._publish(sequence)

    def _publish(self, sequence: Sequence) -> None:
        """Offer the blocks that became full and final to the prefix cache; a twin published earlier stays the one found.

        Of matched and adopted blocks some have their keys already: offering them again changes nothing.
        """
        block_size, end = self._pool.block_size, sequence.num_computed
        if not self._config.cache_generated:
            end = min(end, len(sequence.spec.token_ids) - sequence.spec.num_generated)
        for index in range(sequence.num_published, end // block_size):
            sequence.last_key = sequence.next_key(block_size)
            sequence.num_published = index + 1
            self._pool.publish(sequence.block_ids[index], sequence.last_key)

    # Inside: ending

    def _finish(self, sequence: Sequence) -> None:
        """Nothing of it is planned any more; what it holds stays its own until _retire()."""
        sequence_id = sequence.spec.sequence_id
        sequence.phase = Phase.FINISHED
        self._prefilling.pop(sequence_id, None)
        self._decoding.pop(sequence_id, None)
        self._pool.unpromise(sequence.num_promised)
        sequence.num_promised = 0

    def _retire(self, sequence: Sequence) -> None:
        """No unread step has a row of it: its slot is free, and its blocks, unless it lends them."""
        sequence_id = sequence.spec.sequence_id
        del self._admitted[sequence_id]
        self._slots[sequence.slot] = None
        self._free_slots.append(sequence.slot)
        if sequence.is_lending:
            self._lent[sequence_id] = sequence.block_ids
        else:
            self._pool.free(sequence.block_ids)

    def _check(self, spec: SequenceSpec) -> None:
        if self.knows(spec.sequence_id):
            raise ValueError(f"sequence {spec.sequence_id} is here already")
        spec.check_fits(self._config.max_model_len, self._pool.block_size)
