"""All layers in one call: the bits of the layers one by one, of rows in any company, and memory that does not grow."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, get_native_id

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.cpu_kernels import CpuKernels
from kernels.interface import AttentionBatch, Kernels, ModelEnds, RowSpan, StackLayer, StepRows
from tests.kernels.back_ends import COMPILED, REFERENCE
from tests.thorough import examples

NUM_POSITIONS = 300  # three parts of 128, five tiles of 64
HIDDEN = 48
EPS = 1e-5
SYS_TGKILL = 234  # of x86-64: a signal for one thread


@dataclass(frozen=True)
class Shape:
    """What a family of models varies."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    norms_heads: bool
    has_bias: bool


SHAPES = (
    Shape(6, 2, 64, (None, None), norms_heads=False, has_bias=False),
    Shape(4, 4, 16, (70, None), norms_heads=True, has_bias=False),
    Shape(7, 1, 24, (None, 1), norms_heads=False, has_bias=True),
    Shape(9, 3, 96, (130, 64), norms_heads=True, has_bias=True),
    Shape(10, 2, 32, (None, 90), norms_heads=False, has_bias=False),  # more queries of a KV head than one pass takes
)


def made_layers(kernels: Kernels, shape: Shape, dtype: torch.dtype) -> list[StackLayer]:
    generator = torch.Generator().manual_seed(5)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).div(float(sizes[-1]) ** 0.5).to(dtype)

    def norm(width: int) -> Tensor:
        return (1 + 0.1 * torch.randn(width, generator=generator)).to(dtype)

    layers = []
    for window in shape.windows:
        qkv_width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        layers.append(
            StackLayer(
                norm(HIDDEN),
                kernels.pack_linear(draw(qkv_width, HIDDEN), draw(qkv_width) if shape.has_bias else None),
                kernels.pack_linear(draw(HIDDEN, shape.num_heads * shape.head_dim)),
                norm(HIDDEN),
                kernels.pack_gate_up(draw(2 * 80, HIDDEN), draw(2 * 80) if shape.has_bias else None),
                kernels.pack_linear(draw(HIDDEN, 80)),
                norm(shape.head_dim) if shape.norms_heads else None,
                norm(shape.head_dim) if shape.norms_heads else None,
                window,
            )
        )
    return layers


class Sequences:
    """KV of some sequences, and steps over them."""

    def __init__(self, shape: Shape, dtype: torch.dtype, num_sequences: int, block_size: int) -> None:
        self.shape, self.block_size = shape, block_size
        self.blocks_each = -(-NUM_POSITIONS // block_size)
        num_blocks = num_sequences * self.blocks_each
        sizes = (num_blocks, len(shape.windows), 2, block_size, shape.num_kv_heads, shape.head_dim)
        self.kv = torch.full(sizes, torch.nan).to(dtype)
        self.tables = torch.randperm(num_blocks).view(num_sequences, self.blocks_each)

    def batch(self, step: list[tuple[int, int, int]]) -> tuple[AttentionBatch, Tensor]:
        """Lay (sequence, first position, rows) out; also each row's position."""
        spans, writes, positions, row = [], [], [], 0
        for sequence, first, count in step:
            spans.append(RowSpan(row, count, first))
            at = torch.arange(first, first + count)
            writes.append(self.tables[sequence, at // self.block_size] * self.block_size + at % self.block_size)
            positions.append(at)
            row += count
        tables = self.tables[[sequence for sequence, _, _ in step]]
        return AttentionBatch(np.array(spans, np.int32), tables, torch.cat(writes)), torch.cat(positions)


def angles(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    turns = positions[:, None] * (0.5 ** torch.arange(head_dim // 2))
    return turns.cos(), turns.sin()


def inputs(sequence: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(NUM_POSITIONS, HIDDEN, generator=torch.Generator().manual_seed(sequence)).to(dtype)


def one_by_one(
    kernels: Kernels, layers: list[StackLayer], own: Sequences, step: list[tuple[int, int, int]], hidden: Tensor
) -> Tensor:
    """What engine/model.py does with a back end that has no stack."""
    shape = own.shape
    batch, positions = own.batch(step)
    cos, sin = angles(positions, shape.head_dim)
    attention = kernels.step_attention(own.kv, batch, shape.num_heads)
    num_rotating = shape.num_heads + shape.num_kv_heads
    for index, layer in enumerate(layers):
        heads = layer.qkv(kernels.rms_norm(hidden, layer.attention_norm, EPS))
        heads = heads.view(len(hidden), num_rotating + shape.num_kv_heads, shape.head_dim)
        rotating = heads[:, :num_rotating]
        if layer.query_norm is not None and layer.key_norm is not None:
            queries = rotating[:, : shape.num_heads].reshape(-1, shape.head_dim)
            keys = rotating[:, shape.num_heads :].reshape(-1, shape.head_dim)
            queries, keys = (
                kernels.rms_norm(rows, weight, EPS).view(len(hidden), -1, shape.head_dim)
                for rows, weight in ((queries, layer.query_norm), (keys, layer.key_norm))
            )
            rotating = torch.cat((queries, keys), 1)
        rotated = kernels.rotate(rotating, cos, sin)
        attention.write(index, rotated[:, shape.num_heads :], heads[:, num_rotating:])
        attended = attention.attend(index, rotated[:, : shape.num_heads].contiguous(), layer.window)
        hidden = hidden + layer.attention_out(attended.flatten(1))
        hidden = hidden + layer.down(layer.gate_up(kernels.rms_norm(hidden, layer.mlp_norm, EPS)))
    return hidden


@pytest.mark.covers("M04")
@pytest.mark.parametrize("kernels", COMPILED, ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_layers_in_one_call_have_the_bits_of_one_by_one_and_the_values_of_the_reference(
    kernels: CpuKernels, dtype: torch.dtype, shape: Shape
) -> None:
    layers, referred = made_layers(kernels, shape, dtype), made_layers(REFERENCE, shape, dtype)
    stack = kernels.stack(layers, shape.num_heads, EPS)
    fused, plain, reference = (Sequences(shape, dtype, 2, 16) for _ in range(3))
    plain.tables, reference.tables = fused.tables, fused.tables
    rows = [inputs(sequence, dtype) for sequence in range(2)]
    for step in ([(0, 0, 200), (1, 0, 3)], [(1, 3, 1), (0, 200, 1)], [(0, 201, 90), (1, 4, 66)]):
        hidden = torch.cat([rows[sequence][first : first + count] for sequence, first, count in step])
        batch, positions = fused.batch(step)
        found = stack(hidden.clone(), *angles(positions, shape.head_dim), fused.kv, batch)
        assert torch.equal(found, one_by_one(kernels, layers, plain, step, hidden.clone()))
        expected = one_by_one(REFERENCE, referred, reference, step, hidden.clone())
        bound = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype] * expected.float().abs().max()
        torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=bound.item())
    assert torch.equal(fused.kv.nan_to_num(), plain.kv.nan_to_num())


@pytest.mark.covers("M06")
@pytest.mark.parametrize("kernels", COMPILED, ids=lambda kernels: kernels.name)
@settings(max_examples=examples(30, 3), deadline=None)
@given(
    shape=st.sampled_from(SHAPES),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    block_size=st.sampled_from([1, 16, 48, 100]),
    cuts=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from([1, 2, 4, 5, 33, 64, 100, 130])), min_size=3, max_size=12
    ),
    num_threads=st.sampled_from([1, 2]),
)
def test_a_row_has_the_same_bits_in_any_company_cut_phase_and_thread_count(
    kernels: CpuKernels,
    shape: Shape,
    dtype: torch.dtype,
    block_size: int,
    cuts: list[tuple[int, int]],
    num_threads: int,
) -> None:
    stack = kernels.stack(made_layers(kernels, shape, dtype), shape.num_heads, EPS)
    torch.set_num_threads(1)
    alone = []
    for sequence in range(3):
        own = Sequences(shape, dtype, 1, 16)
        batch, positions = own.batch([(0, 0, NUM_POSITIONS)])
        alone.append(stack(inputs(sequence, dtype), *angles(positions, shape.head_dim), own.kv, batch))
    torch.set_num_threads(num_threads)
    shared = Sequences(shape, dtype, 3, block_size)
    done = [0, 0, 0]
    while cuts:
        step: list[tuple[int, int, int]] = []
        while cuts and cuts[0][0] not in [sequence for sequence, _, _ in step]:
            sequence, count = cuts.pop(0)
            count = min(count, NUM_POSITIONS - done[sequence])
            if count:
                step.append((sequence, done[sequence], count))
                done[sequence] += count
        if not step:
            continue
        batch, positions = shared.batch(step)
        hidden = torch.cat([inputs(sequence, dtype)[first : first + count] for sequence, first, count in step])
        found = stack(hidden, *angles(positions, shape.head_dim), shared.kv, batch)
        expected = torch.cat([alone[sequence][first : first + count] for sequence, first, count in step])
        assert torch.equal(found, expected)


@pytest.mark.covers("M06")
@pytest.mark.parametrize("kernels", COMPILED, ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [4, 9])  # shared out by parts of the context; by rows and heads
def test_a_row_without_numbers_breaks_none_before_it(kernels: CpuKernels, dtype: torch.dtype, num_rows: int) -> None:
    shape = SHAPES[0]
    stack = kernels.stack(made_layers(kernels, shape, dtype), shape.num_heads, EPS)
    found = []
    for number in (1.0, torch.nan):
        own = Sequences(shape, dtype, 1, 16)
        batch, positions = own.batch([(0, 0, num_rows)])
        hidden = inputs(0, dtype)[:num_rows].clone()
        hidden[3] *= number  # positions 2 and 3 are multiplied as a pair
        found.append(stack(hidden, *angles(positions, shape.head_dim), own.kv, batch))
    assert torch.equal(found[1][:3], found[0][:3])
    assert found[1][3:].isnan().all()


@pytest.mark.covers("M07")
def test_steps_like_earlier_ones_use_the_memory_that_is_there() -> None:
    kernels, shape = COMPILED[0], SHAPES[0]
    stack = kernels.stack(made_layers(kernels, shape, torch.bfloat16), shape.num_heads, EPS)
    own = Sequences(shape, torch.bfloat16, 4, 16)

    def run(step: list[tuple[int, int, int]]) -> int:
        batch, positions = own.batch(step)
        hidden = torch.zeros(len(positions), HIDDEN, dtype=torch.bfloat16)
        stack(hidden, *angles(positions, shape.head_dim), own.kv, batch)
        return stack.workspace_bytes

    run([(0, 0, 200)])
    largest = run([(index, 290, 1) for index in range(4)])
    for position in range(200, 290):
        assert run([(index, position, 1) for index in range(4)]) == largest
    assert run([(1, 0, 200)]) == largest


def threads_called(name: str) -> Iterator[Path]:
    """By their /proc; others, an earlier test's, may begin and end meanwhile."""
    for thread in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            if (thread / "comm").read_text() == f"{name}\n":
                yield thread


@contextmanager
def losing_their_cores(threads: set[Path]) -> Iterator[None]:
    """These threads of this process, by their /proc, stop for a while again and again, wherever they are just then."""
    library, over = ctypes.CDLL(None), Event()
    number = int(signal.SIGRTMAX)
    # The handler sleeps for as many microseconds as its argument, the signal's number, says: 64. It stays: a signal may come late.
    library.signal(number, library.usleep)

    def disturb() -> None:
        while not over.wait(0.0002):
            for thread in threads:
                assert library.syscall(SYS_TGKILL, os.getpid(), int(thread.name), number) == 0

    with ThreadPoolExecutor(1) as pool:
        disturbance = pool.submit(disturb)
        try:
            yield
        finally:
            over.set()
            disturbance.result()


@pytest.mark.covers("M06")
@pytest.mark.parametrize("num_rows", [1, 90])  # pieces that others may take over; such that nobody may
def test_threads_that_lose_their_core_change_no_bit_and_what_they_were_at_is_done_by_others(num_rows: int) -> None:
    kernels, shape, dtype = COMPILED[0], SHAPES[0], torch.bfloat16
    stack = kernels.stack(made_layers(kernels, shape, dtype), shape.num_heads, EPS)
    own = Sequences(shape, dtype, 1, 16)
    batch, positions = own.batch([(0, 0, num_rows)])
    cos, sin = angles(positions, shape.head_dim)
    torch.set_num_threads(1)
    expected = stack(inputs(0, dtype)[:num_rows].clone(), cos, sin, own.kv, batch)

    def has_the_bits() -> bool:
        return torch.equal(stack(inputs(0, dtype)[:num_rows].clone(), cos, sin, own.kv, batch), expected)

    def run() -> None:
        Path("/proc/thread-self/comm").write_text("losing")  # so are those called that it starts, and no others
        torch.set_num_threads(4)  # of this thread
        assert has_the_bits()
        own_threads = set(threads_called("losing")) - {Path(f"/proc/self/task/{get_native_id()}")}
        assert len(own_threads) == 3  # and this one, which is here already
        before, deadline = kernels.num_taken_over, time.monotonic() + 60
        with losing_their_cores(own_threads):
            for _ in range(100):
                assert has_the_bits()
            while num_rows == 1 and kernels.num_taken_over < before + 20:
                assert time.monotonic() < deadline, "no thread ever took a piece over"
                assert has_the_bits()

    with ThreadPoolExecutor(1) as pool:  # a thread's OpenMP threads are its own
        pool.submit(run).result()


VOCAB_SIZE = 70


def made_ends(kernels: Kernels, dtype: torch.dtype) -> ModelEnds:
    generator = torch.Generator().manual_seed(6)
    embedding = torch.randn(VOCAB_SIZE, HIDDEN, generator=generator).to(dtype)
    head = kernels.pack_linear(torch.randn(VOCAB_SIZE, HIDDEN, generator=generator).div(7).to(dtype))
    return ModelEnds(embedding, (1 + 0.1 * torch.randn(HIDDEN, generator=generator)).to(dtype), head)


@pytest.mark.covers("M04", "M06")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("num_rows", [1, 4, 90])  # each thread norms all rows, or its own
def test_a_whole_model_has_the_bits_of_its_layers_and_ends(dtype: torch.dtype, num_threads: int, num_rows: int) -> None:
    kernels, shape = COMPILED[0], SHAPES[0]
    layers, ends = made_layers(kernels, shape, dtype), made_ends(kernels, dtype)
    together, apart = (Sequences(shape, dtype, 2, 16) for _ in range(2))
    apart.tables = together.tables
    batch, positions = together.batch([(0, 0, num_rows), (1, 0, 2)])
    token_ids = torch.randint(VOCAB_SIZE, (len(positions),))
    logit_rows = torch.tensor([num_rows - 1, num_rows + 1])
    every_cos, every_sin = angles(torch.arange(NUM_POSITIONS), shape.head_dim)
    logits = torch.empty(2, VOCAB_SIZE, dtype=dtype)
    torch.set_num_threads(num_threads)
    rows = StepRows(token_ids, positions, logit_rows)
    kernels.whole(ends, layers, shape.num_heads, EPS).logits(rows, every_cos, every_sin, together.kv, batch, logits)
    torch.set_num_threads(1)
    stack = kernels.stack(layers, shape.num_heads, EPS)
    cos, sin = angles(positions, shape.head_dim)
    hidden = stack(ends.embedding[token_ids], cos, sin, apart.kv, apart.batch([(0, 0, num_rows), (1, 0, 2)])[0])
    assert torch.equal(logits, ends.head(kernels.rms_norm(hidden[logit_rows], ends.final_norm, EPS)))
    assert torch.equal(together.kv.nan_to_num(), apart.kv.nan_to_num())


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE])
def test_a_token_that_the_vocabulary_lacks_is_refused_before_anything_is_written(token_id: int) -> None:
    kernels, shape = COMPILED[0], SHAPES[0]
    whole = kernels.whole(
        made_ends(kernels, torch.float32), made_layers(kernels, shape, torch.float32), shape.num_heads, EPS
    )
    own = Sequences(shape, torch.float32, 1, 16)
    batch, positions = own.batch([(0, 0, 2)])
    rows = StepRows(torch.tensor([0, token_id]), positions, torch.tensor([1]))
    with pytest.raises(IndexError, match="vocabulary"):
        whole.logits(rows, *angles(positions, shape.head_dim), own.kv, batch, torch.empty(1, VOCAB_SIZE))
    assert own.kv.isnan().all()
