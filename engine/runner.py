"""Executes plans on torch: the persistent batch of slots, one forward pass a step, one answer per row.

A slot keeps what a plan does not repeat: its owner's block table, the token that its next decode row feeds, where its random
stream stands, and, where its owner asked for penalties or its prompt's logprobs, the tokens that they are about. A step with
overlap is planned before the tokens of the step before are known; that is why the last token lives here. One thread calls
`run`, in the order of the plans.

Not here: which rows run, which blocks they get, when a sequence ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, islice

import numpy as np
from torch import Tensor

from engine.batch import Segment, build_batch
from engine.kv_memory import KvMemory
from engine.logprobs import LogitsError, token_logprobs
from engine.model import Model
from engine.plan import (
    BROKEN_ROW,
    NO_TOKEN,
    BranchToken,
    DecodeRow,
    Plan,
    PrefillChunk,
    SamplingParams,
    SlotResult,
    SlotStart,
    StepResult,
    TokenLogprobs,
)
from engine.sampler import Draw, sample
from engine.token_counts import TokenCounts

_NO_GENERATION = -1  # of a slot that nobody has owned yet


class PlanError(RuntimeError):
    """A plan does not fit the slots: a bug in the scheduler, never a user's doing."""


class TorchRunner:
    """engine.plan.Runner over a model and its KV memory."""

    def __init__(self, model: Model, kv_memory: KvMemory, num_slots: int, max_model_len: int) -> None:
        self._model = model
        self._kv = kv_memory.tensor
        self._block_size = kv_memory.block_size
        self._num_blocks = kv_memory.num_blocks
        max_blocks = -(-max_model_len // kv_memory.block_size)
        self._block_table = np.zeros((num_slots, max_blocks), np.int64)
        self._num_table_blocks = np.zeros(num_slots, np.int64)
        self._generation = np.full(num_slots, _NO_GENERATION, np.int64)
        self._last_token_id = np.zeros(num_slots, np.int64)
        self._next_index = np.zeros(num_slots, np.int64)  # of the token sampled next, in its completion
        self._sampling = [SamplingParams(0.0, 0)] * num_slots
        self._counts: list[TokenCounts | None] = [None] * num_slots  # None: no penalties
        self._prompt: list[tuple[int, ...]] = [()] * num_slots  # where its logprobs are wanted
        self._branch_seeds: list[tuple[int, ...]] = [()] * num_slots  # until their first tokens are drawn

    def run(self, plan: Plan) -> StepResult:
        """Compute one step. Raises PlanError if it does not fit the slots."""
        for start in plan.starts:
            self._start(start)
        rows: tuple[DecodeRow | PrefillChunk, ...] = (*plan.decodes, *plan.chunks)
        if not rows:
            return StepResult(plan.step_id, ())
        segments = [self._segment(row) for row in rows]
        logits = self._model.forward(build_batch(segments, self._block_size), self._kv)
        ends = list(accumulate(segment.num_logits for segment in segments))
        last_rows = {row.slot: end - 1 for row, end in zip(rows, ends, strict=True) if _samples(row)}
        sampled = self._sample(logits, last_rows)
        results = [
            self._result(row, logits[end - segment.num_logits : end], sampled.get(row.slot, [NO_TOKEN]))
            for row, segment, end in zip(rows, segments, ends, strict=True)
        ]
        return StepResult(plan.step_id, tuple(results))

    def _sample(self, logits: Tensor, row_of_slot: dict[int, int]) -> dict[int, list[int]]:
        """Draw these slots' next tokens from these rows of [num_rows, vocab_size], and note them.

        Behind a slot's own token come those of its further branches, whose seeds are used up by this.
        """
        rows: list[int] = []
        draws: list[Draw] = []
        for slot, row in row_of_slot.items():
            draw = Draw(self._sampling[slot], int(self._next_index[slot]), self._counts[slot])
            draws.append(draw)
            draws += [draw._replace(sampling=replace(draw.sampling, seed=seed)) for seed in self._branch_seeds[slot]]
            rows += [row] * (len(draws) - len(rows))
        drawn = iter(sample(logits if rows == list(range(len(logits))) else logits[rows], draws, self._model.kernels))
        token_ids = {slot: list(islice(drawn, 1 + len(self._branch_seeds[slot]))) for slot in row_of_slot}
        for slot, (token_id, *_) in token_ids.items():
            # A broken row's next one was planned already: feed it anything.
            self._last_token_id[slot] = max(token_id, 0)
            self._next_index[slot] += 1
            self._branch_seeds[slot] = ()
            counts = self._counts[slot]
            if counts is not None and token_id != BROKEN_ROW:
                counts.add(token_id)
        return token_ids

    def _result(self, row: DecodeRow | PrefillChunk, logits: Tensor, token_ids: list[int]) -> SlotResult:
        """What a row answers. `logits`: [num_logits, vocab_size], those that its segment asked for."""
        num_logprobs, token_id = self._sampling[row.slot].num_logprobs, token_ids[0]
        logprobs: Sequence[TokenLogprobs | None] = [None] * len(token_ids)
        try:
            of_prompt = self._prompt_logprobs(row, logits)
            if num_logprobs is not None and token_id >= 0:
                logprobs = token_logprobs(logits[-1:].expand(len(token_ids), -1), token_ids, num_logprobs)
        except LogitsError:
            return SlotResult(row.slot, row.generation, BROKEN_ROW)
        branch_tokens = tuple(map(BranchToken, token_ids[1:], logprobs[1:]))
        return SlotResult(row.slot, row.generation, token_id, logprobs[0], of_prompt, branch_tokens)

    def _prompt_logprobs(self, row: DecodeRow | PrefillChunk, logits: Tensor) -> tuple[TokenLogprobs, ...]:
        """Of the prompt's tokens that follow the chunk's positions, where they are wanted."""
        if not isinstance(row, PrefillChunk) or not self._prompt[row.slot]:
            return ()
        next_ids = self._prompt[row.slot][row.start + 1 : row.start + 1 + len(row.token_ids)]
        return token_logprobs(logits[: len(next_ids)], next_ids, self._sampling[row.slot].num_logprobs or 0)

    def _start(self, start: SlotStart) -> None:
        """Give the slot to its new owner; nothing of the last one is left."""
        slot = start.slot
        if start.generation <= self._generation[slot]:
            raise PlanError(f"slot {slot}: generation {start.generation} does not follow {self._generation[slot]}")
        self._generation[slot] = start.generation
        self._num_table_blocks[slot] = 0
        self._last_token_id[slot] = start.last_token_id
        self._next_index[slot] = start.next_index
        self._sampling[slot] = start.sampling
        has_penalties = start.sampling.has_penalties
        counts = TokenCounts(start.prompt_token_ids, start.generated_token_ids) if has_penalties else None
        self._counts[slot] = counts
        self._prompt[slot] = start.prompt_token_ids if start.sampling.prompt_logprobs else ()
        self._branch_seeds[slot] = start.branch_seeds

    def _segment(self, row: DecodeRow | PrefillChunk) -> Segment:
        """Take a row's new blocks into its slot's table and lay the row out."""
        slot = row.slot
        if row.generation != self._generation[slot]:
            raise PlanError(f"slot {slot} is at generation {self._generation[slot]}, the plan means {row.generation}")
        if not all(0 <= block_id < self._num_blocks for block_id in row.new_block_ids):
            raise PlanError(f"slot {slot}: block ids {row.new_block_ids} are not all in a pool of {self._num_blocks}")
        begin = int(self._num_table_blocks[slot])
        end = begin + len(row.new_block_ids)
        if end > self._block_table.shape[1]:
            raise PlanError(f"slot {slot}: {end} blocks are more than max_model_len has")
        self._block_table[slot, begin:end] = row.new_block_ids
        self._num_table_blocks[slot] = end
        table = self._block_table[slot, :end]
        if isinstance(row, DecodeRow):
            return Segment((int(self._last_token_id[slot]),), row.position, table, 1)
        # Of a prompt whose logprobs are wanted every row has a next token to tell of, but for the tokens of earlier attempts.
        is_told = row.start + 1 < len(self._prompt[slot])
        return Segment(row.token_ids, row.start, table, len(row.token_ids) if is_told else int(row.samples))


def _samples(row: DecodeRow | PrefillChunk) -> bool:
    return isinstance(row, DecodeRow) or row.samples
