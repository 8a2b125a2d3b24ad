"""What the scheduler knows about one sequence. No queues, no pool, no decisions.

Three numbers say how far a sequence is, because steps overlap (position = index into prompt and completion together). The
last two, and the phase, change in every step for all that run: they lie in arrays (engine/slots.py).

    token_ids   0 ........................................... len - 1     known: given at the start, or read
    computed    [ KV final, its steps were read )  num_computed
    planned     [ ................ + KV that unread steps are writing )  num_planned

so num_computed <= num_planned, and num_planned runs ahead of the known tokens while a sampled token is still unread. The last
token sampled is never fed: a sequence at its limit has KV for one position less than it has tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum, auto
from itertools import chain

from engine.plan import BranchToken, SamplingParams, SlotStart, TokenLogprobs
from proto.block_key import next_key

NEVER = -1  # step id of a sequence that no step was launched with


class Phase(IntEnum):
    """How far a sequence is, as plans go: steps that are launched count as done. Numbers, because they lie in an array."""

    WAITING = auto()  # holds nothing
    RUNNING_PREFILL = auto()
    RUNNING_DECODE = auto()  # every token known at the start is planned; each further row feeds a sampled one
    PREEMPTING = auto()  # its slot is marked: no further row, and its length is final when the mark is answered
    PAUSED = auto()  # the mark was answered; its blocks are kept, until it is resumed or dropped
    FINISHED = auto()  # no further row; slot and blocks go when the last step launched with it was read


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """What is asked for."""

    sequence_id: Hashable
    token_ids: tuple[int, ...]  # all tokens known at the start: the prompt, then completion tokens of earlier attempts
    num_generated: int  # how many of them are completion tokens
    sampling: SamplingParams
    max_new_tokens: int  # how many more may be sampled here, at least 1
    stop_token_ids: frozenset[int]
    block_keys: tuple[bytes, ...]  # of the full blocks of token_ids; behind the last one given nothing is matched
    lends: bool = False  # blocks stay referenced after the end until release(): a sender reads them
    # Of further branches that draw their first token, and only that, beside this one's.
    branch_seeds: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        num_tokens = len(self.token_ids)
        if num_tokens < 1 or self.max_new_tokens < 1 or not 0 <= self.num_generated <= num_tokens:
            raise ValueError(
                f"sequence {self.sequence_id}: {num_tokens} tokens, {self.num_generated} of them generated, "
                f"and at most {self.max_new_tokens} more"
            )

    def check_fits(self, max_model_len: int, block_size: int) -> None:
        """Raise ValueError for what no engine of these sizes can run."""
        num_tokens = len(self.token_ids)
        if num_tokens + self.max_new_tokens > max_model_len:
            raise ValueError(
                f"sequence {self.sequence_id}: {num_tokens} tokens and {self.max_new_tokens} more, "
                f"longer than max_model_len = {max_model_len}"
            )
        if len(self.block_keys) > num_tokens // block_size:
            raise ValueError(f"sequence {self.sequence_id}: {len(self.block_keys)} block keys for {num_tokens} tokens")

    def num_blocks_at_limit(self, block_size: int) -> int:
        """Blocks that the sequence holds if it runs to its limit."""
        return blocks_for(len(self.token_ids) + self.max_new_tokens - 1, block_size)


@dataclass(slots=True)
class Progress:
    """What a read step gave one sequence. Not frozen: making one would take four times as long."""

    sequence_id: Hashable
    num_computed: int  # leading tokens whose KV is final in its blocks
    token_id: int | None  # newly sampled
    # "stop": a stop token was sampled, `token_id` is it; "length"; None: it goes on.
    # "broken", "stalled", "barred", "preempted", "paused": no token
    finish: str | None
    logprobs: TokenLogprobs | None = None  # of token_id, where asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # where asked for, of the prompt's next tokens; token 0 has none
    branch_tokens: tuple[BranchToken, ...] = ()  # with the first token, one per branch seed
    num_cached: int = 0  # with the first token: leading tokens whose KV the prefix cache had


@dataclass(slots=True)
class Progresses:
    """What a read step gave: one token more, and nothing else, to nearly all sequences, so that those are told in columns.

    Each sequence of a step is in one of the two; iterated over, all are a Progress.
    """

    sequence_ids: list[Hashable]  # [num_plain], as the next two: decode rows that gave a token that ends nothing
    num_computed: list[int]
    token_ids: list[int]
    others: list[Progress]

    def plain(self) -> Iterator[tuple[Hashable, int, int]]:
        """Sequence, number of its computed tokens, token."""
        return zip(self.sequence_ids, self.num_computed, self.token_ids, strict=True)

    def __len__(self) -> int:
        return len(self.token_ids) + len(self.others)

    def __iter__(self) -> Iterator[Progress]:
        return chain((Progress(*each, None) for each in self.plain()), self.others)


@dataclass(slots=True)
class Sequence:
    """An admitted sequence: from the moment it has a slot until that slot is free again. The scheduler owns and changes it."""

    spec: SequenceSpec
    slot: int
    generation: int  # of the slot
    # Four bytes each: as objects of their own they would be most of what a step touches. While it has a slot, those that it has
    # said of the block which it fills may lie there alone: Slots.catch_up().
    token_ids: array[int]
    block_ids: list[int]  # the block table, one reference each
    num_promised: int  # blocks that the pool still keeps for its growth
    is_lending: bool  # its blocks are only dropped after release()
    key_seed: bytes  # what the key of the first block is made from
    arrival: int = 0  # who came later is younger; a preempted sequence keeps its own
    keys: list[bytes] = field(default_factory=list)  # of the leading full blocks, offered to the prefix cache
    num_matched: int = 0  # leading blocks that the prefix cache had when it was admitted: not for it to offer
    num_blocks_planned: int = 0  # leading blocks of the table that the runner was told of
    # While it moves: a link reads its blocks, so that they stay, whatever becomes of it, until release().
    is_read: bool = False
    num_shown: int = 0  # leading blocks that plans had put where links read (Plan.leaving_block_ids)
    num_readable: int = 0  # the same, by all steps that were read
    is_pausing: bool = False  # its mark is one of pause(), not of giving way
    keeps_slot: bool = False  # PAUSED by pause(): a slot is reserved for it
    is_complete: bool = False  # it has said its last token
    is_broken: bool = False  # a row gave no token, and never will: what later steps computed is of no use

    @property
    def owner(self) -> tuple[int, int]:
        """Slot and generation: never the same again."""
        return self.slot, self.generation

    @property
    def num_sampled(self) -> int:
        """Tokens sampled here and read."""
        return len(self.token_ids) - len(self.spec.token_ids)

    @property
    def num_generated(self) -> int:
        """Completion tokens known, those of earlier attempts included."""
        return self.spec.num_generated + self.num_sampled

    @property
    def num_remaining(self) -> int:
        """Completion tokens that may still come."""
        return self.spec.max_new_tokens - self.num_sampled

    def slot_start(self) -> SlotStart:
        """What the runner is told of the slot's new owner."""
        spec = self.spec
        num_prompt = len(spec.token_ids) - spec.num_generated
        has_penalties = spec.sampling.has_penalties
        return SlotStart(
            slot=self.slot,
            generation=self.generation,
            sampling=spec.sampling,
            next_index=spec.num_generated,
            last_token_id=spec.token_ids[-1],
            prompt_token_ids=spec.token_ids[:num_prompt] if has_penalties or spec.sampling.prompt_logprobs else (),
            generated_token_ids=spec.token_ids[num_prompt:] if spec.sampling.looks_back else (),
            branch_seeds=spec.branch_seeds,
        )

    def next_key(self, block_size: int) -> bytes:
        """The key of the block behind those that have one, all of whose tokens are known, where the spec has none for it."""
        index = len(self.keys)
        previous = self.keys[-1] if self.keys else self.key_seed
        return next_key(previous, self.token_ids[index * block_size : (index + 1) * block_size])

    def resumed(self, of_blocks: tuple[bytes, ...]) -> SequenceSpec:
        """What is asked for once more: to go on behind all tokens known. Its first token, and its prompt's logprobs, are told.

        `of_blocks`: keys of leading full blocks of them.
        """
        return replace(
            self.spec,
            token_ids=tuple(self.token_ids),
            num_generated=self.num_generated,
            sampling=replace(self.spec.sampling, prompt_logprobs=False) if self.num_sampled else self.spec.sampling,
            max_new_tokens=self.num_remaining,
            block_keys=of_blocks,
            branch_seeds=() if self.num_sampled else self.spec.branch_seeds,
        )

    def finish_reason(self) -> str | None:
        """Why the last read token ends the sequence, if it does."""
        if self.num_sampled and self.token_ids[-1] in self.spec.stop_token_ids:
            return "stop"
        return "length" if self.num_sampled == self.spec.max_new_tokens else None


def blocks_for(num_positions: int, block_size: int) -> int:
    """Blocks that hold so many token positions."""
    return -(-num_positions // block_size)
