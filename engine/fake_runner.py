"""A runner without a model, honest about KV: it answers right only if it reads the right tokens through the block tables.

Ships with the code, for simulations, protocol tests and scheduler tests. Not a mock: it executes every plan, keeps slots and
block tables as the real runner does, writes its "KV" into the pool's memory, and samples from what it reads back there. KV
that is missing, stale, in the wrong order or somebody else's therefore gives a wrong token, whoever moved the bytes.

    memory[block_id] = int32 x block_size (token id + 1 of each position; 0, never written, is no token) | the rest untouched

A token is a hash of (seed, index in the completion, all tokens before it), modulo the vocabulary; temperature 0 leaves the
seed out. expected_tokens() says the same without blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from engine.plan import NO_TOKEN, DecodeRow, Plan, PrefillChunk, SamplingParams, SlotResult, SlotStart, StepResult

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
    block_table: list[int]
    num_computed: int | None  # positions computed so far; None: the first row says


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
        if len({row.slot for row in rows}) != len(rows):
            raise FakeRunnerError(f"step {plan.step_id} has two rows for one slot")
        for start in plan.starts:
            self._start(start)
        decoded = [self._decode(row) for row in plan.decodes]
        prefilled = [self._prefill(chunk) for chunk in plan.chunks]
        return StepResult(plan.step_id, tuple(decoded + prefilled))

    def _start(self, start: SlotStart) -> None:
        previous = self._slots[start.slot]
        if previous is not None and start.generation <= previous.generation:
            raise FakeRunnerError(f"slot {start.slot} goes from generation {previous.generation} to {start.generation}")
        self._slots[start.slot] = _Slot(
            start.generation, start.sampling, start.next_index, start.last_token_id, block_table=[], num_computed=None
        )

    def _decode(self, row: DecodeRow) -> SlotResult:
        slot = self._slot_of(row)
        self._write(slot, row.position, (slot.last_token_id,), row.new_block_ids)
        return SlotResult(row.slot, row.generation, self._sample(slot, row.position + 1))

    def _prefill(self, chunk: PrefillChunk) -> SlotResult:
        slot = self._slot_of(chunk)
        self._write(slot, chunk.start, chunk.token_ids, chunk.new_block_ids)
        token_id = self._sample(slot, chunk.start + len(chunk.token_ids)) if chunk.samples else NO_TOKEN
        return SlotResult(chunk.slot, chunk.generation, token_id)

    def _slot_of(self, row: DecodeRow | PrefillChunk) -> _Slot:
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

    def _sample(self, slot: _Slot, num_tokens: int) -> int:
        """Draw the slot's next token from the first `num_tokens` positions, read back through its block table."""
        num_blocks = -(-num_tokens // self._block_size)
        token_ids = self._kv[slot.block_table[:num_blocks]].reshape(-1)[:num_tokens] - 1
        token_id = _draw(slot.sampling, slot.next_index, token_ids, self._vocab_size)
        slot.next_index += 1
        slot.last_token_id = token_id
        return token_id


def expected_tokens(
    prompt: Sequence[int], generated: Sequence[int], sampling: SamplingParams, num_tokens: int, vocab_size: int
) -> list[int]:
    """The next `num_tokens` completion tokens of a sequence that has `generated` already: the right answer, without blocks."""
    token_ids = [*prompt, *generated]
    for index in range(len(generated), len(generated) + num_tokens):
        token_ids.append(_draw(sampling, index, np.asarray(token_ids, dtype=np.int32), vocab_size))
    return token_ids[len(prompt) + len(generated) :]


def _draw(sampling: SamplingParams, index: int, token_ids: NDArray[np.int32], vocab_size: int) -> int:
    seed = 0 if sampling.temperature == 0 else sampling.seed
    digest = blake2b(token_ids.astype("<i4").tobytes(), digest_size=8)
    digest.update(seed.to_bytes(8, "little") + index.to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little") % vocab_size
