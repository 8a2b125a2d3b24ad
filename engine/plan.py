"""What the scheduler wants of one step, and what the runner answers: the seam between deciding and torch.

A plan names slots, never sequences: a slot is a row of the runner's persistent batch and belongs to one sequence at a time,
told apart by its generation number. Plans are executed strictly in order. A plan never carries the token that a decode row
starts from, because that token may not be known yet (steps overlap): the runner keeps each slot's last token itself.

For the same reason a scheduler that takes a slot away does not know its last token yet. It marks the slot; the runner answers
the mark in order, behind the answers of all earlier rows, and then the sequence's length is final.

What every step has for every slot, decode rows and answers, travels as parallel arrays; one row of them is made when asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

# What a slot's row can answer besides a token id (>= 0; 0 is a token like any other).
NO_TOKEN: Final = -1  # nothing sampled: mid-chunk
BROKEN_ROW: Final = -2  # no logit is a number: the KV behind the row, or the model on this prompt, is broken
STALLED_ROW: Final = -3  # what may follow took too long to find out: the grammar's doing, so that it would everywhere
BARRED_ROW: Final = -4  # the grammar lets nothing follow, or was lost: nothing is wrong with the KV
# What a slot's mark answers: its owner is out, and everything that it generated has been delivered before this.
PREEMPTED_TOKEN_ID: Final = -9


@dataclass(frozen=True, slots=True)
class Grammar:
    """The texts that a completion may be: what may follow is a function of this and of the completion's tokens alone."""

    kind: Literal["json_schema", "regex", "ebnf", "structural_tag"]
    text: str
    is_compact: bool  # JSON: no white space but one blank behind each comma and colon
    end_token_ids: tuple[int, ...]  # at least one: what may follow a whole text, and nothing else then


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a sequence's tokens are drawn: noise is a function of (seed, token index, token id) and nothing else."""

    temperature: float  # 0 is greedy
    seed: int  # 64 bits
    top_k: int = 0  # 0 is off
    top_p: float = 1.0  # 1 is off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # 1 is off
    min_tokens: int = 0  # completion tokens, from index 0 on, of which none is a stop token
    stop_token_ids: frozenset[int] = frozenset()  # what min_tokens bans; what ends a sequence is in its SequenceSpec
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit), each id once
    num_logprobs: int | None = None  # None: none; else each token's own, and of so many most likely ones
    prompt_logprobs: bool = False  # also of the prompt's tokens but the first; the prefix cache is not asked then
    grammar: Grammar | None = None  # None: any text

    @property
    def looks_back(self) -> bool:
        """Whether the completion so far changes what may be drawn."""
        return self.has_penalties or self.grammar is not None

    @property
    def has_penalties(self) -> bool:
        """Whether what was said before changes what is likely."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's own probabilities: before bias, penalties, temperature and truncation.

    They are float32 numbers, so that a wire message does not change them.
    """

    logprob: float  # of the token itself
    top: tuple[tuple[int, float], ...]  # (token id, logprob), most likely first, of equals the lowest id


class SlotStart(NamedTuple):
    """A slot's new owner; takes effect before the plan's rows."""

    slot: int
    generation: int  # of this slot, grows with every owner
    sampling: SamplingParams
    next_index: int  # index, in the completion, of the token that this sequence samples first
    last_token_id: int  # the token that a first decode row feeds; unused when a prefill chunk comes first
    # What is known at the start, given where it is needed: both for penalties, the prompt for its logprobs too, the completion
    # for a grammar.
    prompt_token_ids: tuple[int, ...] = ()
    generated_token_ids: tuple[int, ...] = ()
    # Of further branches, whose first tokens are drawn from the logits that this sequence's first one is drawn from.
    branch_seeds: tuple[int, ...] = ()


class PrefillChunk(NamedTuple):
    """Positions start .. start + len(token_ids) of one sequence, computed in this step."""

    slot: int
    generation: int
    start: int  # position of token_ids[0]
    token_ids: tuple[int, ...]
    new_block_ids: tuple[int, ...]  # appended to the slot's block table before the row runs
    samples: bool  # last chunk: sample the next token from its last position


class DecodeRow(NamedTuple):
    """One more token of one sequence: feeds the slot's last token at `position`, samples the next."""

    slot: int
    generation: int
    position: int
    new_block_ids: tuple[int, ...]  # appended to the slot's block table before the row runs


def _columns(
    triples: Sequence[tuple[int, int, int]],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    first, second, third = np.array(triples, np.int64).reshape(-1, 3).T.copy()
    return first, second, third


@dataclass(frozen=True, slots=True, eq=False)
class Decodes:
    """A step's decode rows; each array is [num_rows] int64, and nobody changes it."""

    slots: NDArray[np.int64]
    generations: NDArray[np.int64]
    positions: NDArray[np.int64]
    new_block_ids: Mapping[int, tuple[int, ...]]  # by slot, of those that get any

    @classmethod
    def of(cls, *rows: DecodeRow) -> Decodes:
        """These rows."""
        slots, generations, positions = _columns([row[:3] for row in rows])
        return cls(slots, generations, positions, {row.slot: row.new_block_ids for row in rows if row.new_block_ids})

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, index: int) -> DecodeRow:
        slot = int(self.slots[index])
        blocks = self.new_block_ids.get(slot, ())
        return DecodeRow(slot, int(self.generations[index]), int(self.positions[index]), blocks)

    def __iter__(self) -> Iterator[DecodeRow]:
        slots = self.slots.tolist()
        blocks = (self.new_block_ids.get(slot, ()) for slot in slots)
        return map(DecodeRow, slots, self.generations.tolist(), self.positions.tolist(), blocks)


NO_DECODES: Final = Decodes.of()


@dataclass(frozen=True, slots=True)
class SlotMark:
    """The slot is taken away from its owner: no row of this generation follows."""

    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. At most one row or mark per slot; one with marks alone is run and answered like any other."""

    step_id: int
    starts: tuple[SlotStart, ...] = ()
    decodes: Decodes = NO_DECODES
    chunks: tuple[PrefillChunk, ...] = ()
    marks: tuple[SlotMark, ...] = ()
    # Blocks whose KV came over the wire and that no earlier plan told of: a runner whose device has memory of its own copies
    # them there before the rows run.
    arrived_block_ids: tuple[int, ...] = ()
    # Blocks that a transfer is to read, all that they hold computed by earlier steps: such a runner copies them to where
    # transfers read, before it tells this step's result. A step may have nothing else.
    leaving_block_ids: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Token positions that the step computes."""
        return len(self.decodes) + sum(len(chunk.token_ids) for chunk in self.chunks)


class BranchToken(NamedTuple):
    """The first token of a further branch."""

    token_id: int
    logprobs: TokenLogprobs | None


class SlotResult(NamedTuple):
    """What one row or mark of the plan gave."""

    slot: int
    generation: int
    token_id: int  # of a row: >= 0, NO_TOKEN, or an end without a token; of a mark: PREEMPTED_TOKEN_ID
    logprobs: TokenLogprobs | None = None  # of token_id, where asked for
    # Where asked for, of the prompt's tokens behind the chunk's positions: start + 1, start + 2, … up to the prompt's last.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    branch_tokens: tuple[BranchToken, ...] = ()  # with the slot's first token: one per branch seed

    @property
    def has_more(self) -> bool:
        """Whether it is more than a token id."""
        return self.logprobs is not None or bool(self.prompt_logprobs or self.branch_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """One answer per row and mark of the plan with the same step_id: decodes, chunks, marks, each in the plan's order."""

    step_id: int
    slots: NDArray[np.int64]  # [num_answers], as the next two
    generations: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    with_more: Mapping[int, SlotResult]  # by index, the answers that are more than a token id

    @classmethod
    def of(cls, step_id: int, answers: Sequence[SlotResult]) -> StepResult:
        """These answers."""
        with_more = {index: answer for index, answer in enumerate(answers) if answer.has_more}
        slots, generations, token_ids = _columns([answer[:3] for answer in answers])
        return cls(step_id, slots, generations, token_ids, with_more)

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, index: int) -> SlotResult:
        if index in self.with_more:
            return self.with_more[index]
        return SlotResult(int(self.slots[index]), int(self.generations[index]), int(self.token_ids[index]))

    def __iter__(self) -> Iterator[SlotResult]:
        return map(self.__getitem__, range(len(self)))


class Runner(Protocol):
    """Executes plans, one after the other."""

    def run(self, plan: Plan) -> StepResult:
        """Compute the step and wait for its tokens. Called from one thread only."""


class Launched(Protocol):
    """A step that a device may still be computing."""

    def is_done(self) -> bool:
        """Whether `read` would not wait."""

    def read(self) -> StepResult:
        """Its tokens; waits for them. Called once, in the order of the plans."""


class Launcher(Protocol):
    """A runner whose device may be slower than it: a step can be launched before the one before it has been read."""

    def launch(self, plan: Plan, on_ready: Callable[[], None]) -> Launched:
        """Begin the step. Called from one thread only, as everything that this returns.

        `on_ready` is called at most once, when all that is left is computing, which keeps no interpreter busy.
        """


@dataclass(frozen=True, slots=True)
class Done:
    """A step that was computed while it was launched; see Launched."""

    result: StepResult

    def is_done(self) -> bool:
        """Always."""
        return True

    def read(self) -> StepResult:
        """Waits for nothing."""
        return self.result
