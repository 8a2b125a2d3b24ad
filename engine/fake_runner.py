"""A runner without a model, honest about KV: it answers right only if it reads the right tokens through the block tables.

Ships with the code, for simulations, protocol tests and scheduler tests. Not a mock: it executes every plan, keeps slots and
block tables as the real runner does, writes its "KV" into the pool's memory, and samples from what it reads back there. KV
that is missing, stale, in the wrong order or somebody else's therefore gives a wrong token, whoever moved the bytes.

    memory[block_id] = int32 x block_size (token id + 1 of each position; 0, never written, is no token) | the rest untouched

A token is a hash of (seed, index in the completion, all tokens before it), modulo the vocabulary; temperature 0 leaves the
seed out. With penalties the tokens that the slot was told of and those sampled since are hashed too, so a slot with another
one's counts, or one that goes on without its own, says something else. Before min_tokens a stop token's place is taken by the
next id. expected_tokens() says the same without blocks. A token's logprobs follow from its id and its position alone:
expected_logprobs(). Of the other sampling parameters nothing changes an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from engine.plan import (
    NO_TOKEN,
    PREEMPTED_TOKEN_ID,
    BranchToken,
    DecodeRow,
    Plan,
    PrefillChunk,
    SamplingParams,
    SlotMark,
    SlotResult,
    SlotStart,
    StepResult,
    TokenLogprobs,
)

BYTES_PER_TOKEN = 4


class FakeRunnerError(Exception):
    """A plan breaks the rules of engine.plan: a bug in the scheduler."""


@dataclass(slots=True)
class _Slot:
    """One row of the persistent batch."""

    generation: int
    sampling: SamplingParams
    next_index: int
    last_token_id: int
    prompt_token_ids: tuple[int, ...]
    said: list[int]  # with penalties: prompt and completion as the slot was told of them, and what it sampled since
    block_table: list[int]
    num_computed: int | None  # positions computed so far; None: the first row says
    branch_seeds: tuple[int, ...]


class FakeRunner:
    """Executes plans over fake KV. Implements engine.plan.Runner."""

    def __init__(self, memory: NDArray[np.uint8], block_size: int, vocab_size: int, num_slots: int) -> None:
        """`memory`: [num_blocks, block_bytes] uint8, block_bytes >= 4 * block_size, shared with whoever moves blocks."""
        if memory.ndim != 2 or memory.dtype != np.uint8 or memory.shape[1] < BYTES_PER_TOKEN * block_size:
            raise ValueError(f"memory {memory.dtype} {memory.shape} does not hold blocks of {block_size} tokens")
        self._kv = memory[:, : BYTES_PER_TOKEN * block_size].view("<i4")  # [num_blocks, block_size], token id + 1
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._slots: list[_Slot | None] = [None] * num_slots
        self._next_step_id = 0

    def run(self, plan: Plan) -> StepResult:
        """Compute the step: write each row's tokens, then sample where the row asks for it."""
        if plan.step_id != self._next_step_id:
            raise FakeRunnerError(f"step {plan.step_id} where {self._next_step_id} comes next")
        self._next_step_id += 1
        rows: tuple[DecodeRow | PrefillChunk, ...] = (*plan.decodes, *plan.chunks)
        if len({row.slot for row in (*rows, *plan.marks)}) != len(rows) + len(plan.marks):
            raise FakeRunnerError(f"step {plan.step_id} has two rows or marks for one slot")
        for start in plan.starts:
            self._start(start)
        decoded = [self._decode(row) for row in plan.decodes]
        prefilled = [self._prefill(chunk) for chunk in plan.chunks]
        marked = [self._leave(mark) for mark in plan.marks]
        return StepResult.of(plan.step_id, decoded + prefilled + marked)

    def _start(self, start: SlotStart) -> None:
        previous = self._slots[start.slot]
        if previous is not None and start.generation <= previous.generation:
            raise FakeRunnerError(f"slot {start.slot} goes from generation {previous.generation} to {start.generation}")
        self._slots[start.slot] = _Slot(
            generation=start.generation,
            sampling=start.sampling,
            next_index=start.next_index,
            last_token_id=start.last_token_id,
            prompt_token_ids=start.prompt_token_ids,
            said=[*start.prompt_token_ids, *start.generated_token_ids] if start.sampling.has_penalties else [],
            block_table=[],
            num_computed=None,
            branch_seeds=start.branch_seeds,
        )

    def _leave(self, mark: SlotMark) -> SlotResult:
        """Nothing of its owner is under way here: steps run one after the other."""
        self._slot_of(mark)
        self._slots[mark.slot] = None
        return SlotResult(mark.slot, mark.generation, PREEMPTED_TOKEN_ID)

    def _decode(self, row: DecodeRow) -> SlotResult:
        slot = self._slot_of(row)
        self._write(slot, row.position, (slot.last_token_id,), row.new_block_ids)
        token_id = self._sample(slot, row.position + 1)
        return SlotResult(row.slot, row.generation, token_id, self._logprobs(slot, token_id, row.position + 1))

    def _prefill(self, chunk: PrefillChunk) -> SlotResult:
        slot = self._slot_of(chunk)
        self._write(slot, chunk.start, chunk.token_ids, chunk.new_block_ids)
        end = chunk.start + len(chunk.token_ids)
        branch_tokens = self._sample_branches(slot, end) if chunk.samples else ()
        token_id = self._sample(slot, end) if chunk.samples else NO_TOKEN
        of_prompt: tuple[TokenLogprobs, ...] = ()
        if slot.sampling.prompt_logprobs:
            num_top = slot.sampling.num_logprobs or 0
            next_ids = enumerate(slot.prompt_token_ids[chunk.start + 1 : end + 1], chunk.start + 1)
            of_prompt = tuple(expected_logprobs(each, at, num_top, self._vocab_size) for at, each in next_ids)
        logprobs = self._logprobs(slot, token_id, end)
        return SlotResult(chunk.slot, chunk.generation, token_id, logprobs, of_prompt, branch_tokens)

    def _logprobs(self, slot: _Slot, token_id: int, position: int) -> TokenLogprobs | None:
        num_top = slot.sampling.num_logprobs
        if num_top is None or token_id == NO_TOKEN:
            return None
        return expected_logprobs(token_id, position, num_top, self._vocab_size)

    def _slot_of(self, row: DecodeRow | PrefillChunk | SlotMark) -> _Slot:
        slot = self._slots[row.slot]
        if slot is None or slot.generation != row.generation:
            raise FakeRunnerError(f"slot {row.slot} is not in generation {row.generation}")
        return slot

    def _write(self, slot: _Slot, start: int, token_ids: Sequence[int], new_block_ids: tuple[int, ...]) -> None:
        """Compute positions start .. start + len(token_ids), which continue what the slot's earlier rows computed."""
        slot.block_table += new_block_ids
        if slot.num_computed not in (None, start):
            raise FakeRunnerError(f"a row starts at {start}, but {slot.num_computed} positions are computed")
        slot.num_computed = end = start + len(token_ids)
        if start >= end or end > len(slot.block_table) * self._block_size:
            raise FakeRunnerError(f"positions {start}..{end} in {len(slot.block_table)} blocks")
        positions = np.arange(start, end)
        blocks = np.asarray(slot.block_table)[positions // self._block_size]
        self._kv[blocks, positions % self._block_size] = np.asarray(token_ids, dtype=np.int32) + 1

    def _read(self, slot: _Slot, num_tokens: int) -> NDArray[np.int32]:
        num_blocks = -(-num_tokens // self._block_size)
        token_ids: NDArray[np.int32] = self._kv[slot.block_table[:num_blocks]].reshape(-1)[:num_tokens] - 1
        return token_ids

    def _sample_branches(self, slot: _Slot, num_tokens: int) -> tuple[BranchToken, ...]:
        """Draw the first tokens of the slot's further branches."""
        token_ids, tokens = self._read(slot, num_tokens), []
        for seed in slot.branch_seeds:
            sampling = replace(slot.sampling, seed=seed)
            token_id = _draw(sampling, slot.next_index, token_ids, slot.said, self._vocab_size)
            tokens.append(BranchToken(token_id, self._logprobs(slot, token_id, num_tokens)))
        return tuple(tokens)

    def _sample(self, slot: _Slot, num_tokens: int) -> int:
        """Draw the slot's next token from the first `num_tokens` positions, read back through its block table."""
        token_ids = self._read(slot, num_tokens)
        token_id = _draw(slot.sampling, slot.next_index, token_ids, slot.said, self._vocab_size)
        if slot.sampling.has_penalties:
            slot.said.append(token_id)
        slot.next_index += 1
        slot.last_token_id = token_id
        return token_id


def expected_tokens(
    prompt: Sequence[int], generated: Sequence[int], sampling: SamplingParams, num_tokens: int, vocab_size: int
) -> list[int]:
    """The next `num_tokens` completion tokens of a sequence that has `generated` already: the right answer, without blocks."""
    token_ids = [*prompt, *generated]
    for index in range(len(generated), len(generated) + num_tokens):
        said = token_ids if sampling.has_penalties else ()
        token_ids.append(_draw(sampling, index, np.asarray(token_ids, dtype=np.int32), said, vocab_size))
    return token_ids[len(prompt) + len(generated) :]


def expected_logprobs(token_id: int, position: int, num_top: int, vocab_size: int) -> TokenLogprobs:
    """What the runner says of a token at this position of prompt and completion together."""
    own = -((5 * token_id + 3 * position) % 64) / 8
    top = tuple(((token_id + rank) % vocab_size, own - rank) for rank in range(min(num_top, vocab_size)))
    return TokenLogprobs(own, top)


def _draw(
    sampling: SamplingParams, index: int, token_ids: NDArray[np.int32], said: Sequence[int], vocab_size: int
) -> int:
    seed = 0 if sampling.temperature == 0 else sampling.seed
    digest = blake2b(token_ids.astype("<i4").tobytes(), digest_size=8)
    digest.update(seed.to_bytes(8, "little") + index.to_bytes(8, "little"))
    digest.update(np.asarray(said, dtype="<i4").tobytes())
    token_id = int.from_bytes(digest.digest(), "little") % vocab_size
    if index < sampling.min_tokens and len(sampling.stop_token_ids) < vocab_size:
        while token_id in sampling.stop_token_ids:
            token_id = (token_id + 1) % vocab_size
    return token_id
