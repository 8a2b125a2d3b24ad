"""Keeps the ranks of a node in step: rank 0 says what is next, the others compute it with their part of the weights.

    rank 0     TorchRunner ── RankStep ──► pipes         forward ◄── activations ──►        sample, answer
    others                                   └─► follow: forward ◄── activations ──► (engine/ranks.py)

What goes through the pipes is a batch as rank 0 has laid it out, not a plan: slots, tokens, sampling are rank 0's alone, so there
is nothing that two ranks could have different ideas of. A few numbers a row, from one process to its own children: eight bytes
each, in this machine's order, and trusted. A pipe that ends is the end, and so is one that stays full: a step may be more than
a pipe holds, and a rank that hangs takes no more of it. Not here: processes (node/ranks.py).
"""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from datetime import timedelta
from typing import IO, Final, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import Batch
from engine.kv_memory import KvSides
from engine.model import Model
from engine.ranks import PATIENCE, Ranks
from engine.step_memory import StepTensors
from kernels.interface import AttentionBatch

_NUMBER: Final = np.dtype(np.int64)
_NUM_SIZES: Final = 7


class RankStep(NamedTuple):
    """What all ranks do next. The block ids: of a device with memory of its own, which each rank copies its heads from and to."""

    batch: Batch | None  # None: nothing to compute
    arrived: Sequence[int] = ()  # to the device, before the rows run
    leaving: Sequence[int] = ()  # to the host, before the rows run
    written: Sequence[int] = ()  # to the host, behind them

    @property
    def is_met(self) -> bool:
        """Whether rank 0 tells the step only when every rank's blocks are on the host."""
        return bool(self.leaving or self.written)


class Followers(Protocol):
    """The other ranks, as rank 0 has them."""

    def begin(self, step: RankStep) -> None:
        """Have them do this. OSError: one has gone, or hangs."""

    def meet(self) -> None:
        """Wait for them; see RankStep.is_met. RuntimeError: one has gone."""


class PipedFollowers:
    """Followers at the other ends of pipes."""

    def __init__(self, pipes: Sequence[IO[bytes]], ranks: Ranks, patience: timedelta = PATIENCE) -> None:
        """`pipes`: past their buffers, whose locks would be held by who waits here while somebody else closes them."""
        self._pipes = pipes
        self._ranks = ranks
        self._patience = patience
        for pipe in pipes:
            os.set_blocking(pipe.fileno(), False)

    def begin(self, step: RankStep) -> None:
        """See Followers. TimeoutError: one takes nothing."""
        data = encoded(step)
        for pipe in self._pipes:
            self._write(pipe, memoryview(data))

    def _write(self, pipe: IO[bytes], data: memoryview) -> None:
        while data:
            try:
                data = data[os.write(pipe.fileno(), data) :]
            except BlockingIOError:
                room = select.poll()
                room.register(pipe.fileno(), select.POLLOUT)
                if not room.poll(self._patience / timedelta(milliseconds=1)):
                    seconds = self._patience.total_seconds()
                    raise TimeoutError(f"a rank has taken nothing of a step for {seconds:g} s") from None

    def meet(self) -> None:
        """See Followers."""
        self._ranks.meet()


def follow(model: Model, kv: KvSides, steps: IO[bytes], ranks: Ranks) -> None:
    """Be one of the others, until the pipe ends. Raises what the model and the ranks raise."""
    memory = StepTensors()
    while (step := read_step(steps)) is not None:
        if step.arrived:
            kv.to_device(step.arrived)
        if step.leaving:
            kv.from_device(step.leaving)
        if step.batch is not None:
            model.forward(step.batch, kv.tensor, memory)
        if step.written:
            kv.from_device(step.written)
        if step.is_met:
            ranks.meet()


def encoded(step: RankStep) -> bytes:
    """The step as numbers: seven sizes, then what they are sizes of."""
    blocks = [np.array(ids, _NUMBER) for ids in (step.arrived, step.leaving, step.written)]
    arrays = _arrays(step.batch) if step.batch is not None else [np.empty(0, _NUMBER)] * 6
    *rows, spans, tables = arrays
    sizes = [len(rows[0]), len(rows[3]), len(spans) // 3, len(tables), *map(len, blocks)]
    return np.concatenate([np.array(sizes), *arrays, *blocks], dtype=_NUMBER, casting="same_kind").tobytes()


def _arrays(batch: Batch) -> list[NDArray[np.int64]]:
    attention = batch.attention
    tensors = (batch.token_ids, batch.positions, attention.write_positions, batch.logit_rows)
    numbers: list[NDArray[np.int64]] = [tensor.numpy() for tensor in tensors]
    return [*numbers, attention.spans.ravel().astype(np.int64), attention.block_tables.numpy().ravel()]


def read_step(stream: IO[bytes]) -> RankStep | None:
    """The next step; None where the pipe has ended, which is in order between two steps only: EOFError within one."""
    head = stream.read(_NUM_SIZES * _NUMBER.itemsize)
    if not head:
        return None
    sizes = np.frombuffer(head, _NUMBER).tolist() if len(head) == _NUM_SIZES * _NUMBER.itemsize else []
    if not sizes:
        raise EOFError("rank 0 has gone in the middle of a step")
    num_rows, num_logits, num_spans, num_in_tables, *nums_blocks = sizes
    lengths = [num_rows, num_rows, num_rows, num_logits, 3 * num_spans, num_in_tables, *nums_blocks]
    data = bytearray(stream.read(sum(lengths) * _NUMBER.itemsize))
    if len(data) < sum(lengths) * _NUMBER.itemsize:
        raise EOFError("rank 0 has gone in the middle of a step")
    *arrays, arrived, leaving, written = np.split(np.frombuffer(data, _NUMBER), np.cumsum(lengths)[:-1])
    batch = _batch(arrays, num_spans) if num_rows else None
    return RankStep(batch, arrived.tolist(), leaving.tolist(), written.tolist())


def _batch(arrays: Sequence[NDArray[np.int64]], num_spans: int) -> Batch:
    *rows, spans, tables = arrays
    token_ids, positions, write_positions, logit_rows = map(torch.from_numpy, rows)
    block_tables: Tensor = torch.from_numpy(tables).view(num_spans, -1)
    attention = AttentionBatch(spans.astype(np.int32).reshape(-1, 3), block_tables, write_positions)
    return Batch(token_ids, positions, logit_rows, attention)
