"""Executes plans on torch: the persistent batch of slots, one forward pass a step, one answer per row.

A slot keeps what a plan does not repeat: its owner's block table, the token that its next decode row feeds, where its random
stream stands, and, where its owner asked for penalties or its prompt's logprobs, the tokens that they are about. A step with
overlap is planned before the tokens of the step before are known; that is why the last token lives here. One thread calls
it, in the order of the plans.

On a device that computes by itself (CUDA) a step is launched and read later: where its rows ask for no more than a temperature
and a seed, their tokens are drawn there (engine/device_sampler.py), the next step's rows take them from there, and nothing
waits. Any other step is drawn on the host, behind all that was launched before it.

Not here: which rows run, which blocks they get, when a sequence ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import Batch, BatchBuffers, Chunk, FedRows, SlotTables
from engine.binding import Binder, Binding, end_of_row
from engine.device import HostCopies
from engine.device_sampler import plain_draws, rows_on_device, sample_on_device
from engine.draw import Draw, is_decided_by_logits
from engine.gumbel import MASK_64
from engine.kv_memory import KvSides
from engine.lockstep import Followers, RankStep
from engine.logprobs import LogitsError, token_logprobs
from engine.model import Model
from engine.plan import (
    BROKEN_ROW,
    NO_TOKEN,
    PREEMPTED_TOKEN_ID,
    BranchToken,
    DecodeRow,
    Decodes,
    Done,
    Launched,
    Plan,
    PrefillChunk,
    SamplingParams,
    SlotMark,
    SlotResult,
    SlotStart,
    StepResult,
    TokenLogprobs,
)
from engine.sampler import sample
from engine.step_memory import StepTensors
from engine.token_counts import TokenCounts
from engine.under_way import Drawn, UnderWay
from kernels.interface import DecodeRows, SlotNumbers
from kernels.upload import upload, upload_together

_NO_GENERATION = -1  # of a slot that nobody has owned yet


class PlanError(RuntimeError):
    """A plan does not fit the slots: a bug in the scheduler, never a user's doing."""


class TorchRunner:
    """engine.plan.Runner over a model and its KV memory."""

    def __init__(
        self,
        model: Model,
        kv_memory: KvSides,
        num_slots: int,
        max_model_len: int,
        *,
        is_asynchronous: bool | None = None,
        followers: Followers | None = None,
        grammars: Binder | None = None,
    ) -> None:
        """`is_asynchronous`: whether the device computes by itself; None: where it is not a CPU. True on a CPU is for tests.

        `followers`: the node's other ranks, which are told what this one computes, and never ahead of it. `grammars`: of the
        model's directory; without them nobody may ask for one.
        """
        self._model = model
        self._followers = followers
        device = kv_memory.tensor.device
        is_like_cuda = device.type != "cpu" and followers is None
        self._is_asynchronous = is_like_cuda if is_asynchronous is None else is_asynchronous
        self._last_on_device = torch.zeros(num_slots, dtype=torch.int64, device=device)  # read where it is asynchronous
        self._kv = kv_memory
        self._num_blocks = kv_memory.num_blocks
        max_blocks = -(-max_model_len // kv_memory.block_size)
        self._numbers = SlotNumbers.of(num_slots, max_blocks)
        self._tables = SlotTables(self._numbers.block_ids, self._numbers.num_blocks)
        self._buffers = BatchBuffers(kv_memory.block_size)
        self._memory = StepTensors(max_logits=num_slots)
        self._generation = np.full(num_slots, _NO_GENERATION, np.int64)
        self._sampling = [SamplingParams(0.0, 0)] * num_slots
        self._counts: list[TokenCounts | None] = [None] * num_slots  # None: no penalties
        self._grammars = grammars
        self._constraints: list[Binding | None] = [None] * num_slots  # None: any text
        self._prompt: list[tuple[int, ...]] = [()] * num_slots  # where its logprobs are wanted
        self._branch_seeds: list[tuple[int, ...]] = [()] * num_slots  # until their first tokens are drawn
        self._is_told_more = np.zeros(num_slots, np.bool_)  # of whom an answer may be more than a token id
        # Who wants a token, which logits, temperature and seed decide, at every step of its life.
        self._is_plain = np.zeros(num_slots, np.bool_)
        self._draws_at_once = model.whole is not None and not self._is_asynchronous and followers is None

    def run(self, plan: Plan) -> StepResult:
        """Compute one step. Raises PlanError if it does not fit the slots."""
        return self.launch(plan).read()

    def launch(self, plan: Plan, on_ready: Callable[[], None] = lambda: None) -> Launched:
        """See Launcher. Raises PlanError if it does not fit the slots."""
        if plan.arrived_block_ids:
            self._kv.to_device(plan.arrived_block_ids)
        if plan.leaving_block_ids:
            self._kv.from_device(plan.leaving_block_ids)
        for start in plan.starts:
            self._start(start)
        if not (len(plan.decodes) or plan.chunks):
            self._meet(self._lead(plan, None))
            return Done(StepResult.of(plan.step_id, list(map(self._leave, plan.marks))))
        self._take_blocks(plan.decodes, plan.chunks)
        is_of_decodes = not (plan.chunks or plan.marks)
        if self._draws_at_once and is_of_decodes and self._is_plain[plan.decodes.slots].all():
            on_ready()
            return Done(self._decode(plan))
        chunks = [self._chunk(row) for row in plan.chunks]
        slots = plan.decodes.slots
        decodes = FedRows(slots, plan.decodes.positions, self._numbers.token_ids[slots])
        batch = self._buffers.lay_out(self._tables, decodes, chunks)
        if self._is_asynchronous:
            batch = self._on_device(batch, slots)
        written = self._blocks_of(chunks) if self._kv.is_mirrored else []
        led = self._lead(plan, batch, written)
        on_ready()
        logits = self._model.forward(batch, self._kv.tensor, self._memory)
        rows = _Rows.of(plan, chunks)
        drawn = self._draw_on_device(logits, rows.sampling, rows.num_logits) if self._is_asynchronous else None
        gathered = self._kv.begin_to_host(written) if written else None
        if drawn is not None:
            copies = HostCopies(drawn, *(() if gathered is None else (gathered,)))
            marked = list(map(self._leave, plan.marks))
            return UnderWay(plan, [*rows.sampling], marked, copies, written, self._kv)
        self._meet(led)
        result = self._read(plan, rows, logits)
        return Done(result) if gathered is None else Drawn(result, written, gathered.cpu(), self._kv)

    def _decode(self, plan: Plan) -> StepResult:
        """A step that is laid out, computed and drawn in one call; its draws come here where that cannot decide them."""
        rows = DecodeRows(plan.decodes.slots, plan.decodes.positions)
        drawn = self._model.decode(self._numbers, rows, self._kv.tensor, self._memory)
        if isinstance(drawn, Tensor):
            return self._read(plan, _Rows.of(plan, ()), drawn)
        return StepResult(plan.step_id, rows.slots, plan.decodes.generations, drawn, {})

    def _is_a_token_each(self, plan: Plan) -> bool:
        """Whether there are decode rows only, and nobody who is told more than a token, as nearly always."""
        return not (plan.chunks or plan.marks or self._is_told_more[plan.decodes.slots].any())

    def _read(self, plan: Plan, rows: _Rows, logits: Tensor) -> StepResult:
        """Draw, and answer every row and mark."""
        logits = logits.cpu()  # the sampler's side; on a CPU no copy
        sampled = self._sample(logits, rows.sampling)
        slots = plan.decodes.slots
        if self._is_a_token_each(plan):
            token_ids = np.array([token_ids[0] for token_ids in sampled.values()], np.int64)
            return StepResult(plan.step_id, slots, plan.decodes.generations, token_ids, {})
        results = [
            self._result(row, logits, span, sampled.get(row.slot, [NO_TOKEN]))
            for row, span in zip((*plan.decodes, *plan.chunks), rows.spans(), strict=True)
        ]
        return StepResult.of(plan.step_id, (*results, *map(self._leave, plan.marks)))

    def _lead(self, plan: Plan, batch: Batch | None, written: Sequence[int] = ()) -> RankStep | None:
        """Tell the other ranks, where there are any, what there is for them to do."""
        if self._followers is None:
            return None
        arrived, leaving = (plan.arrived_block_ids, plan.leaving_block_ids) if self._kv.is_mirrored else ((), ())
        step = RankStep(batch, arrived, leaving, written)
        if batch is not None or arrived or leaving:
            self._followers.begin(step)
        return step

    def _meet(self, step: RankStep | None) -> None:
        """What a step's result says of blocks on the host must be true of all ranks' heads."""
        if self._followers is not None and step is not None and step.is_met:
            self._followers.meet()

    def _on_device(self, batch: Batch, decode_slots: NDArray[np.int64]) -> Batch:
        """The rows where they are computed, decode rows' tokens from where the steps before put them."""
        known = [batch.token_ids, batch.positions, batch.logit_rows, torch.from_numpy(decode_slots)]
        told, positions, logit_rows, slots = upload_together(known, self._last_on_device.device)
        token_ids = torch.cat((self._last_on_device[slots], told[len(slots) :]))
        return batch._replace(token_ids=token_ids, positions=positions, logit_rows=logit_rows)

    def _draw_on_device(self, logits: Tensor, row_of_slot: dict[int, int], num_logits: int) -> Tensor | None:
        """Draw and note these slots' next tokens without waiting: [num_slots] int64; None if some row asks for more."""
        slots = np.array([*row_of_slot], np.int64)
        is_plain = self._is_plain[slots].all() or all(map(self._is_drawn_there, slots, self._draws(slots.tolist())))
        if len(slots) != num_logits or not is_plain:
            return None
        logits = rows_on_device(logits, [*row_of_slot.values()])
        drawn = self._model.kernels.draw(logits, plain_draws(self._numbers, slots), self._last_on_device)
        if drawn is None:
            drawn = sample_on_device(logits, self._draws(slots.tolist()))
            self._last_on_device[upload(torch.from_numpy(slots), drawn.device)] = drawn.clamp(min=0)
        self._numbers.next_indices[slots] += 1
        return drawn

    def _draws(self, slots: list[int]) -> list[Draw]:
        counts = [self._counts[slot] for slot in slots]
        constraints = [self._constraints[slot] for slot in slots]
        allowed = [None if each is None else each.allowed() for each in constraints]
        sampling = [self._sampling[slot] for slot in slots]
        return list(map(Draw, sampling, self._numbers.next_indices[slots].tolist(), counts, allowed))

    def _is_drawn_there(self, slot: int, draw: Draw) -> bool:
        """Whether its answer is one token id that can be drawn on the device."""
        is_told_more = draw.sampling.num_logprobs is not None or self._prompt[slot] or self._branch_seeds[slot]
        return not is_told_more and is_decided_by_logits(draw)

    def _leave(self, mark: SlotMark) -> SlotResult:
        """Its owner's last row ran in an earlier step: nothing is under way."""
        slot = mark.slot
        if mark.generation != (held := self._generation[slot]):
            raise PlanError(f"slot {slot} is at generation {held}, the plan marks {mark.generation}")
        self._tables.num_blocks[slot] = 0
        self._counts[slot] = None
        self._unbind(slot)
        return SlotResult(slot, mark.generation, PREEMPTED_TOKEN_ID)

    def _sample(self, logits: Tensor, row_of_slot: dict[int, int]) -> dict[int, list[int]]:
        """Draw these slots' next tokens from these rows of [num_rows, vocab_size], and note them.

        Behind a slot's own token come those of its further branches, whose seeds are used up by this.
        """
        slots = [*row_of_slot]
        draws = self._draws(slots)
        rows = [*row_of_slot.values()]
        branches = [(at, seed) for at, slot in enumerate(slots) for seed in self._branch_seeds[slot]]
        for at, seed in branches:
            draws.append(draws[at]._replace(sampling=replace(draws[at].sampling, seed=seed)))
            rows.append(rows[at])
        drawn = sample(logits if rows == [*range(len(logits))] else logits[rows], draws, self._model.kernels)
        token_ids = {slot: [token_id] for slot, token_id in zip(slots, drawn, strict=False)}
        for (at, _), token_id in zip(branches, drawn[len(slots) :], strict=True):
            token_ids[slots[at]].append(token_id)
            self._branch_seeds[slots[at]] = ()
        # A broken row's next one was planned already: feed it anything.
        self._note(slots, np.maximum(drawn[: len(slots)], 0))
        self._numbers.next_indices[slots] += 1
        for slot, draw, token_id in zip(slots, draws, drawn, strict=False):
            for past in (self._counts[slot], self._constraints[slot]):
                if past is not None and token_id != BROKEN_ROW:
                    past.add(token_id)
            if token_id == BROKEN_ROW and (bound := self._constraints[slot]) is not None:
                token_ids[slot][0] = end_of_row(bound, draw.allowed)
        return token_ids

    def _note(self, slots: Sequence[int], token_ids: Sequence[int] | NDArray[np.int64]) -> None:
        """What the slots' next decode rows feed."""
        self._numbers.token_ids[slots] = token_ids
        if self._is_asynchronous:
            noted = torch.from_numpy(self._numbers.token_ids[slots]), torch.tensor(slots, dtype=torch.int64)
            fed, at = upload_together(noted, self._last_on_device.device)
            self._last_on_device[at] = fed

    def _result(
        self, row: DecodeRow | PrefillChunk, step_logits: Tensor, span: tuple[int, int], token_ids: list[int]
    ) -> SlotResult:
        """What a row answers. `span`: which of the step's logits, [num_logits, vocab_size], are its own."""
        num_logprobs, token_id = self._sampling[row.slot].num_logprobs, token_ids[0]
        if num_logprobs is None and not self._prompt[row.slot] and len(token_ids) == 1:
            return SlotResult(row.slot, row.generation, token_id)
        logits = step_logits[span[0] : span[1]]
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
        self._tables.num_blocks[slot] = 0
        self._note([slot], [start.last_token_id])
        self._numbers.next_indices[slot] = start.next_index
        self._sampling[slot] = start.sampling
        is_counted = start.sampling.has_penalties
        self._counts[slot] = TokenCounts(start.prompt_token_ids, start.generated_token_ids) if is_counted else None
        self._constraints[slot] = self._constraint(start)
        self._prompt[slot] = start.prompt_token_ids if start.sampling.prompt_logprobs else ()
        self._branch_seeds[slot] = start.branch_seeds
        is_scored = start.sampling.num_logprobs is not None
        self._is_told_more[slot] = is_scored or start.sampling.prompt_logprobs or bool(start.branch_seeds)
        is_decided = is_decided_by_logits(Draw(start.sampling, start.next_index))
        self._is_plain[slot] = is_decided and not (start.sampling.looks_back or self._is_told_more[slot])
        self._numbers.seeds[slot] = start.sampling.seed & MASK_64
        self._numbers.temperatures[slot] = start.sampling.temperature

    def _unbind(self, slot: int) -> None:
        if (bound := self._constraints[slot]) is not None:
            bound.close()
            self._constraints[slot] = None

    def _constraint(self, start: SlotStart) -> Binding | None:
        grammar = start.sampling.grammar
        self._unbind(start.slot)
        if grammar is None:
            return None
        if self._grammars is None:
            raise PlanError(f"slot {start.slot}: a grammar, and this runner has none")
        return self._grammars.constraint(grammar, start.generated_token_ids)

    def _take_blocks(self, decodes: Decodes, chunks: Sequence[PrefillChunk]) -> None:
        """Take the rows' new blocks into their slots' tables."""
        slots, generations = decodes.slots, decodes.generations
        if chunks:
            slots = np.concatenate((slots, np.array([chunk.slot for chunk in chunks], np.int64)))
            generations = np.concatenate((generations, np.array([chunk.generation for chunk in chunks], np.int64)))
        if (is_wrong := self._generation[slots] != generations).any():
            at = int(is_wrong.argmax())
            held, meant = self._generation[slots[at]], generations[at]
            raise PlanError(f"slot {slots[at]} is at generation {held}, the plan means {meant}")
        for slot, block_ids in decodes.new_block_ids.items():
            self._append_blocks(slot, block_ids)
        for chunk in chunks:
            self._append_blocks(chunk.slot, chunk.new_block_ids)

    def _append_blocks(self, slot: int, block_ids: Sequence[int]) -> None:
        if not all(0 <= block_id < self._num_blocks for block_id in block_ids):
            raise PlanError(f"slot {slot}: block ids {block_ids} are not all in a pool of {self._num_blocks}")
        begin = int(self._tables.num_blocks[slot])
        end = begin + len(block_ids)
        if end > self._tables.block_ids.shape[1]:
            raise PlanError(f"slot {slot}: {end} blocks are more than max_model_len has")
        self._tables.block_ids[slot, begin:end] = block_ids
        self._tables.num_blocks[slot] = end

    def _blocks_of(self, chunks: Sequence[Chunk]) -> list[int]:
        """The blocks that chunks wrote into."""
        block_size, block_ids = self._kv.block_size, list[int]()
        for chunk in chunks:
            last_position = chunk.first_position + len(chunk.token_ids) - 1
            blocks = slice(chunk.first_position // block_size, last_position // block_size + 1)
            block_ids += self._tables.block_ids[chunk.slot, blocks].tolist()
        return block_ids

    def _chunk(self, row: PrefillChunk) -> Chunk:
        # Of a prompt whose logprobs are wanted every row has a next token to tell of, but for the tokens of earlier attempts.
        is_told = row.start + 1 < len(self._prompt[row.slot])
        return Chunk(row.slot, row.start, row.token_ids, len(row.token_ids) if is_told else int(row.samples))


class _Rows(NamedTuple):
    """Whose logits are whose, in a step."""

    sampling: dict[int, int]  # slot -> the row of the step's logits from which its next token is drawn
    num_decodes: int
    of_chunks: list[int]  # how many logits each has

    @classmethod
    def of(cls, plan: Plan, chunks: Sequence[Chunk]) -> _Rows:
        """A decode row has one, and samples."""
        slots = plan.decodes.slots.tolist()
        rows = cls(dict(zip(slots, range(len(slots)), strict=True)), len(slots), [each.num_logits for each in chunks])
        if chunks:
            ends = (end for _, end in rows.spans()[len(slots) :])
            rows.sampling.update({row.slot: end - 1 for row, end in zip(plan.chunks, ends, strict=True) if row.samples})
        return rows

    @property
    def num_logits(self) -> int:
        """Of the step."""
        return self.num_decodes + sum(self.of_chunks)

    def spans(self) -> list[tuple[int, int]]:
        """Of each row of the plan, decodes first: where its logits begin, and the first that is not its own."""
        ends = list(accumulate([1] * self.num_decodes + self.of_chunks))
        return list(zip([0, *ends], ends, strict=False))
