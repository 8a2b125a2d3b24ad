"""Decode steps by graphs: which graph, how a step is padded to it, what is captured when. What records them needs a GPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels.interface import AttentionBatch
from kernels.triton_graphs import MAX_ROWS, DecodeGraphs, DecodeInputs, graph_key, graph_steps, pad, padded_rows

PART, BLOCK_SIZE, HIDDEN = 32, 8, 4
pytestmark = pytest.mark.covers("M05", "M07")


def spans_of(positions: list[int]) -> np.ndarray:
    return np.array([(row, 1, position) for row, position in enumerate(positions)], np.int32).reshape(-1, 3)


def test_sizes_are_few_and_waste_little() -> None:
    sizes = {padded_rows(num_rows) for num_rows in range(1, MAX_ROWS + 1)}
    assert len(sizes) <= 40
    for num_rows in range(1, MAX_ROWS + 1):
        padded = padded_rows(num_rows)
        assert num_rows <= padded <= max(2 * num_rows, 8)
        assert padded - num_rows < max(8, num_rows / 4)
        assert padded_rows(padded) == padded


@given(st.lists(st.integers(0, 4000), min_size=1, max_size=40), st.integers(1, 3))
def test_a_key_is_large_enough_for_every_row_and_one_for_each_size(positions: list[int], address: int) -> None:
    key = graph_key(spans_of(positions), PART, address)
    assert key is not None
    assert key.num_rows >= len(positions)
    assert key.num_parts * PART > max(positions)
    assert key.num_parts & (key.num_parts - 1) == 0
    assert key.kv_address == address
    assert graph_key(spans_of([max(positions)] * len(positions)), PART, address) == key


def test_chunks_and_what_is_too_large_have_none() -> None:
    assert graph_key(np.zeros((0, 3), np.int32), PART, 1) is None
    assert graph_key(np.array([[0, 1, 5], [1, 2, 0]], np.int32), PART, 1) is None
    assert graph_key(spans_of([1] * MAX_ROWS), PART, 1) is not None
    assert graph_key(spans_of([1] * (MAX_ROWS + 1)), PART, 1) is None


@given(st.integers(1, MAX_ROWS + 50), st.integers(1, 3000), st.data())
def test_the_steps_captured_at_start_are_one_of_each_key_that_later_steps_have(
    max_rows: int, max_positions: int, data: st.DataObject
) -> None:
    steps = graph_steps(max_rows, max_positions, PART)
    assert all(step.num_rows <= max_rows and 0 <= step.position < max_positions for step in steps)
    keys = [graph_key(spans_of([step.position] * step.num_rows), PART, 1) for step in steps]
    assert len(set(keys)) == len(keys)
    sizes = [key.num_rows * key.num_parts for key in keys if key is not None]
    assert len(sizes) == len(keys) and sizes == sorted(sizes, reverse=True)
    positions = st.integers(0, max_positions - 1)
    later = data.draw(st.lists(positions, min_size=1, max_size=min(max_rows, MAX_ROWS)))
    assert graph_key(spans_of(later), PART, 1) in keys


@given(st.lists(st.integers(0, 4000), min_size=1, max_size=40))
def test_padding_repeats_the_row_that_sees_least(positions: list[int]) -> None:
    num_rows = padded_rows(len(positions))
    padding = pad(spans_of(positions), num_rows)
    assert padding.chosen[: len(positions)].tolist() == list(range(len(positions)))
    assert all(positions[row] == min(positions) for row in padding.chosen[len(positions) :])
    spans, rows, counts, firsts, slots = padding.tiles.T
    assert spans.tolist() == rows.tolist() == slots.tolist() == list(range(num_rows))
    assert (counts == 1).all()
    assert firsts.tolist() == [positions[row] for row in padding.chosen]


def decode(inputs: DecodeInputs, kv: Tensor) -> Tensor:
    """A step whose rows tell all that they were given, and of its blocks only those that they may look at."""
    for row, (span, first_row, count, position, slot) in enumerate(inputs.tiles.tolist()):
        assert (first_row, count, slot) == (row, 1, span)
        blocks = inputs.tables[span, : position // BLOCK_SIZE + 1]
        assert position < inputs.num_parts * PART
        told = position + 1e3 * float(blocks.sum()) + 1e6 * int(inputs.write_positions[row]) + float(kv[0].sum())
        inputs.hidden[row] += told + inputs.cos[row].sum() - inputs.sin[row].sum()
    return inputs.hidden


class Recorder:
    """Captures like a device: nothing is computed while it records."""

    def __init__(self) -> None:
        self.num_captures = 0
        self.num_replays = 0

    def __call__(self, compute: Callable[[], object]) -> Callable[[], object]:
        self.num_captures += 1

        def replay() -> object:
            self.num_replays += 1
            return compute()

        return replay


def step(positions: list[int], seed: int) -> tuple[Tensor, Tensor, Tensor, AttentionBatch]:
    generator = torch.Generator().manual_seed(seed)
    num_rows, width = len(positions), max(positions) // BLOCK_SIZE + 1
    tables = torch.randint(0, 50, (num_rows, width), generator=generator)
    writes = torch.randint(0, 400, (num_rows,), generator=generator)
    hidden = torch.randn((num_rows, HIDDEN), dtype=torch.float64, generator=generator)
    cos, sin = torch.randn((2, num_rows, 3), generator=generator)
    return hidden, cos, sin, AttentionBatch(spans_of(positions), tables, writes)


def plainly(hidden: Tensor, cos: Tensor, sin: Tensor, batch: AttentionBatch, kv: Tensor) -> Tensor:
    tiles = torch.from_numpy(pad(batch.spans, len(hidden)).tiles)
    inputs = (hidden.clone(), cos, sin, tiles, batch.block_tables.to(torch.int32), batch.write_positions)
    return decode(DecodeInputs(*inputs, num_parts=1000), kv)


@given(st.lists(st.lists(st.integers(0, 200), min_size=1, max_size=12), min_size=1, max_size=12))
def test_steps_by_graphs_are_the_steps_and_each_size_is_captured_once(steps: list[list[int]]) -> None:
    recorder = Recorder()
    graphs = DecodeGraphs(decode, recorder)
    kv = torch.zeros(2, 1, 2, BLOCK_SIZE, 1, 1)
    keys = set()
    for seed, positions in enumerate(steps):
        hidden, cos, sin, batch = step(positions, seed)
        found = graphs.run(hidden, cos, sin, kv, batch, PART)
        assert found is not None
        assert torch.equal(found, plainly(hidden, cos, sin, batch, kv))
        keys.add(graph_key(batch.spans, PART, kv.data_ptr()))
        assert recorder.num_captures == len(keys)
        assert recorder.num_replays == seed + 1 - len(keys)


def test_another_kv_is_captured_anew_and_prompts_are_left_alone() -> None:
    recorder = Recorder()
    graphs = DecodeGraphs(decode, recorder)
    hidden, cos, sin, batch = step([3, 9], 1)
    both = [torch.full((2, 1, 2, BLOCK_SIZE, 1, 1), value) for value in (1.0, 2.0)]
    for kv in both:
        for _ in range(2):
            found = graphs.run(hidden, cos, sin, kv, batch, PART)
            assert found is not None
            assert torch.equal(found, plainly(hidden, cos, sin, batch, kv))
    assert (recorder.num_captures, recorder.num_replays) == (2, 2)
    chunk = batch._replace(spans=np.array([[0, 2, 0]], np.int32))
    assert graphs.run(hidden, cos, sin, both[0], chunk, PART) is None
