"""Executes plans on torch: the persistent batch of slots, one forward pass a step, one answer per row.

A slot keeps what a plan does not repeat: its owner's block table, the token that its next decode row feeds, and where its
random stream stands. A step with overlap is planned before the tokens of the step before are known; that is why the last
token lives here. One thread calls `run`, in the order of the plans.

Not here: which rows run, which blocks they get, when a sequence ends.
"""

from __future__ import annotations

import numpy as np

from engine.batch import Segment, build_batch
from engine.kv_memory import KvMemory
from engine.model import Model
from engine.plan import NO_TOKEN, DecodeRow, Plan, PrefillChunk, SlotResult, SlotStart, StepResult
from engine.sampler import Draw, sample

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
        self._seed = np.zeros(num_slots, np.uint64)
        self._temperature = np.zeros(num_slots, np.float64)

    def run(self, plan: Plan) -> StepResult:
        """Compute one step. Raises PlanError if it does not fit the slots."""
        for start in plan.starts:
            self._start(start)
        rows: tuple[DecodeRow | PrefillChunk, ...] = (*plan.decodes, *plan.chunks)
        if not rows:
            return StepResult(plan.step_id, ())
        batch = build_batch([self._segment(row) for row in rows], self._block_size)
        logits = self._model.forward(batch, self._kv)
        sampling = [row for row in rows if _samples(row)]
        token_ids = sample(logits, [self._draw(row.slot) for row in sampling])
        sampled = dict(zip((row.slot for row in sampling), token_ids, strict=True))
        slots = np.fromiter(sampled, np.int64)
        self._last_token_id[slots] = np.maximum(
            token_ids, 0
        )  # a broken row's next one was planned already: feed it anything
        self._next_index[slots] += 1
        results = (SlotResult(row.slot, row.generation, sampled.get(row.slot, NO_TOKEN)) for row in rows)
        return StepResult(plan.step_id, tuple(results))

    def _start(self, start: SlotStart) -> None:
        """Give the slot to its new owner; nothing of the last one is left."""
        slot = start.slot
        if start.generation <= self._generation[slot]:
            raise PlanError(f"slot {slot}: generation {start.generation} does not follow {self._generation[slot]}")
        self._generation[slot] = start.generation
        self._num_table_blocks[slot] = 0
        self._last_token_id[slot] = start.last_token_id
        self._next_index[slot] = start.next_index
        self._seed[slot] = start.sampling.seed & (1 << 64) - 1
        self._temperature[slot] = start.sampling.temperature

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
        return Segment(row.token_ids, row.start, table, int(row.samples))

    def _draw(self, slot: int) -> Draw:
        return Draw(float(self._temperature[slot]), int(self._seed[slot]), int(self._next_index[slot]))


def _samples(row: DecodeRow | PrefillChunk) -> bool:
    return isinstance(row, DecodeRow) or row.samples
