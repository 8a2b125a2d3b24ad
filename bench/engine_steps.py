"""Steps of one engine as a node's runner executes them, what they must read and compute, and where their time goes.

A decode step is repeated at the same positions, so that its context stays what it was; its KV is random numbers. Not here: the
limits of the machine (limits.py), tables and files (engine.py).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.limits import seconds_of
from engine.draw import Draw
from engine.kv_memory import TORCH_DTYPES, KvMemory, KvSides
from engine.model import Model
from engine.model_config import ModelConfig
from engine.plan import DecodeRow, Decodes, Plan, PrefillChunk, SamplingParams, SlotStart
from engine.runner import TorchRunner
from engine.sampler import sample
from kernels.cpu_kernels import CpuModel
from kernels.interface import AttentionBatch, DecodeRows, Linear, SlotNumbers, StepRows

_GENERATION: Final = 1  # every runner is new
_STEPS_TIMED: Final = 5


class Case(NamedTuple):
    """One kind of step: `batch` decode rows whose contexts have `context` positions, or one chunk behind `context` positions."""

    batch: int
    context: int
    chunk: int = 0  # tokens; 0: a decode step

    @property
    def name(self) -> str:
        """For tables."""
        if self.chunk:
            return f"chunk of {self.chunk} behind {self.context}"
        return f"decode {self.batch} x {self.context}"

    @property
    def num_positions(self) -> int:
        """KV positions that the case needs."""
        return self.context + self.chunk if self.chunk else self.batch * self.context

    def blocks_each(self, block_size: int) -> int:
        """KV blocks of each of its sequences."""
        return -(-(self.context + max(1, self.chunk)) // block_size)

    def num_blocks(self, block_size: int) -> int:
        """KV blocks that the case needs."""
        return max(1, self.batch) * self.blocks_each(block_size)


class StepTimes(NamedTuple):
    """Seconds of a step."""

    step_s: float  # as a node runs it
    alone_s: float  # read before the next one is launched; on a CPU the same


@dataclass(frozen=True, slots=True)
class Work:
    """What a step cannot do without, each byte read once."""

    num_bytes: int  # of weights, and of KV seen
    num_operations: int  # of linears and attention


def work_of(case: Case, config: ModelConfig, itemsize: int, weight_itemsize: int | None = None) -> Work:
    """Count it. itemsize: bytes of a number of KV, and of a weight where they are not told."""
    weight_itemsize = itemsize if weight_itemsize is None else weight_itemsize
    heads_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * heads_width + 2 * kv_width + 3 * config.intermediate_size)
    head = config.vocab_size * config.hidden_size
    rows = case.chunk or case.batch
    logit_rows = 1 if case.chunk else case.batch
    if case.chunk:
        seen = case.chunk * case.context + case.chunk * (case.chunk + 1) // 2
        read = case.context + case.chunk
    else:
        seen = read = case.batch * case.context
    num_bytes = (
        weight_itemsize * (config.num_layers * layer + head) + itemsize * config.num_layers * 2 * read * kv_width
    )
    linears = 2 * (rows * config.num_layers * layer + logit_rows * head)
    return Work(num_bytes, linears + 4 * config.num_layers * seen * heads_width)


class _TimedLinear:
    def __init__(self, linear: Linear) -> None:
        self._linear = linear
        self.seconds = 0.0
        self.result = torch.empty(0)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        begin = time.perf_counter()
        self.result = self._linear(x, out)
        self.seconds += time.perf_counter() - begin
        return self.result


class _KeepsLogits:
    def __init__(self, model: CpuModel) -> None:
        self._model = model
        self.result: Tensor | None = None  # what the sampler has to draw from

    def logits(
        self, rows: StepRows, cos: Tensor, sin: Tensor, kv: Tensor, batch: AttentionBatch, logits: Tensor
    ) -> None:
        self.result = logits
        self._model.logits(rows, cos, sin, kv, batch, logits)

    def decode(
        self, numbers: SlotNumbers, rows: DecodeRows, cos: Tensor, sin: Tensor, kv: Tensor, logits: Tensor
    ) -> NDArray[np.int64] | None:
        token_ids = self._model.decode(numbers, rows, cos, sin, kv, logits)
        self.result = logits if token_ids is None else None
        return token_ids


class Steps:
    """One case, ready to run again and again."""

    def __init__(
        self, case: Case, model: Model, memory: KvSides, temperature: float, *, is_asynchronous: bool | None = None
    ) -> None:
        """`is_asynchronous`: see TorchRunner."""
        self.case = case
        self._is_asynchronous = is_asynchronous
        self._model = model
        self._memory = memory
        self._sampling = [SamplingParams(temperature, seed) for seed in range(max(1, case.batch))]
        self._runner = self._new_runner(model)

    def run(self) -> None:
        """One step, its sampling included."""
        self._runner.run(self._plan(()))

    def times(self) -> StepTimes:
        """Of some steps, the median."""
        step_s = statistics.median(seconds_of(self.run) for _ in range(_STEPS_TIMED))
        return StepTimes(step_s, step_s)

    def parts(self, num_steps: int) -> dict[str, float]:
        """Seconds of one step by what they went for, the mean of some."""
        head, whole = _TimedLinear(self._model.ends.head), self._model.whole
        kept = _KeepsLogits(whole) if isinstance(whole, CpuModel) else None
        runner = self._new_runner(replace(self._model, ends=self._model.ends._replace(head=head), whole=kept))
        before = whole.seconds if isinstance(whole, CpuModel) else {}
        head.seconds = 0.0
        begin = time.perf_counter()
        for _ in range(num_steps):
            runner.run(self._plan(()))
        total = time.perf_counter() - begin
        draws = [Draw(sampling, 0) for sampling in self._sampling]
        begin = time.perf_counter()
        logits = head.result if kept is None else kept.result
        if logits is not None:
            for _ in range(num_steps):
                sample(logits, draws, self._model.kernels)
        parts = {"sampler": time.perf_counter() - begin, "head": head.seconds}
        if isinstance(whole, CpuModel):
            parts |= {name: seconds - before[name] for name, seconds in whole.seconds.items()}
            parts["sampler"] += parts.pop("draw")
        parts["rest"] = total - sum(parts.values())
        return {name: seconds / num_steps for name, seconds in parts.items()}

    def _new_runner(self, model: Model) -> TorchRunner:
        """A runner whose slots hold the case's sequences."""
        case, block_size = self.case, self._memory.block_size
        per_sequence, num_slots = case.blocks_each(block_size), max(1, case.batch)
        runner = TorchRunner(
            model, self._memory, num_slots, per_sequence * block_size, is_asynchronous=self._is_asynchronous
        )
        self._tables = _tables(self._memory.num_blocks, num_slots, per_sequence)
        starts = tuple(SlotStart(slot, _GENERATION, sampling, 0, 1) for slot, sampling in enumerate(self._sampling))
        runner.run(self._plan(starts, self._tables))
        return runner

    def _plan(self, starts: Sequence[SlotStart], tables: Sequence[tuple[int, ...]] = ()) -> Plan:
        case, generation = self.case, _GENERATION
        if case.chunk:
            ids = tuple(index % 256 for index in range(case.chunk))  # which every model has
            blocks = tables[0] if tables else ()
            chunk = PrefillChunk(0, generation, case.context, ids, blocks, True)
            return Plan(0, tuple(starts), chunks=(chunk,))
        rows = (
            DecodeRow(slot, generation, case.context - 1, tables[slot] if tables else ()) for slot in range(case.batch)
        )
        return Plan(0, tuple(starts), Decodes.of(*rows))


def _tables(num_blocks: int, num_sequences: int, per_sequence: int) -> list[tuple[int, ...]]:
    """Blocks for each sequence, scattered as after some hours of serving."""
    order = np.random.default_rng(0).permutation(num_blocks)[: num_sequences * per_sequence]
    return [tuple(row) for row in order.reshape(num_sequences, per_sequence).tolist()]


def random_memory(model: Model, block_size: int, cases: Sequence[Case]) -> KvMemory:
    """KV for the largest case, of plausible numbers."""
    num_blocks = max(case.num_blocks(block_size) for case in cases)
    memory = KvMemory(model.config, block_size, num_blocks, model.dtype)
    numbers = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)).to(TORCH_DTYPES[model.dtype])
    flat = memory.tensor.view(-1)
    for begin in range(0, flat.numel(), numbers.numel()):
        flat[begin : begin + numbers.numel()] = numbers[: flat.numel() - begin]
    return memory
