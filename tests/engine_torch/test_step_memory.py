"""A step in steady state lies where earlier ones lay, and costs no more memory for more rows or longer contexts than they say."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.batch import Batch, BatchBuffers, Chunk, FedRows, Segment, SlotTables, build_batch
from engine.kv_memory import KvMemory
from engine.model import Model, load_model
from engine.plan import DecodeRow, Decodes, Plan, PrefillChunk, SamplingParams, SlotStart
from engine.runner import TorchRunner
from kernels.cpu_kernels import CpuKernels, CpuModel
from tests.engine_torch.conftest import ModelDirs
from tests.kernels_choice import KERNELS
from tests.thorough import examples

BLOCK_SIZE = 16
MAX_MODEL_LEN = 640
BLOCKS_EACH = MAX_MODEL_LEN // BLOCK_SIZE
NUM_SLOTS = 16
GREEDY = SamplingParams(0.0, 0)
MIXED = (GREEDY, SamplingParams(0.8, 5))  # of steps in one call, where a back end has those
SCORED = SamplingParams(0.8, 5, num_logprobs=0)  # of no such step
KINDS = pytest.mark.parametrize("sampling", [MIXED, (SCORED,)], ids=["in one call", "with logprobs"])

pytestmark = pytest.mark.covers("M07")


def tensors(batch: Batch) -> tuple[Tensor, ...]:
    own = batch.attention
    return batch.token_ids, batch.positions, batch.logit_rows, torch.from_numpy(own.spans), *own[1:]


@settings(max_examples=examples(60, 3), deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.lists(st.integers(0, 79), max_size=7),  # a decode row at each of these positions
            st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=3),  # chunks: first position, rows
        ).filter(lambda step: bool(step[0] or step[1])),
        min_size=2,
        max_size=6,
    ),
    block_size=st.sampled_from([1, 4, 16]),
)
def test_batches_in_used_memory_are_those_in_fresh_memory(
    steps: list[tuple[list[int], list[tuple[int, int]]]], block_size: int
) -> None:
    """And stay so while the next one is laid out."""
    max_blocks = 80 // block_size
    rng = np.random.default_rng(len(steps))
    tables = SlotTables(rng.permutation(10 * max_blocks).reshape(10, max_blocks), np.full(10, max_blocks))
    buffers = BatchBuffers(block_size)
    laid_out: list[tuple[Batch, list[Tensor]]] = []
    for positions, spans in steps:
        slots = rng.permutation(10)[: len(positions) + len(spans)]
        decodes = FedRows(slots[: len(positions)], np.array(positions, np.int64), rng.integers(0, 99, len(positions)))
        chunks = [
            Chunk(int(slot), first, tuple(range(first, first + count)), index % (count + 1))
            for index, (slot, (first, count)) in enumerate(zip(slots[len(positions) :], spans, strict=True))
        ]
        segments = [Segment((int(t),), int(p), list(tables.block_ids[s]), 1) for s, p, t in zip(*decodes, strict=True)]
        segments += [
            Segment(c.token_ids, c.first_position, list(tables.block_ids[c.slot]), c.num_logits) for c in chunks
        ]
        fresh = list(tensors(build_batch(segments, block_size)))
        width = -(-max([*(p + 1 for p in positions), *(first + count for first, count in spans)]) // block_size)
        fresh[3 + 1] = fresh[3 + 1][:, :width]  # columns that a fresh table has beyond that are never looked at
        laid_out.append((buffers.lay_out(tables, decodes, chunks), fresh))
        for batch, expected in laid_out[-2:]:
            assert all(map(torch.equal, tensors(batch), expected))


def test_a_decode_row_past_its_blocks_is_refused() -> None:
    tables = SlotTables(np.zeros((3, 4), np.int64), np.array([1, 2, 4]))
    decodes = FedRows(np.array([2, 0, 1]), np.array([63, 15, 32]), np.zeros(3, np.int64))
    with pytest.raises(ValueError, match="position 32 is past the 2 blocks of its sequence"):
        BatchBuffers(16).lay_out(tables, decodes, [])


class Decoding:
    """Sequences that all decode, one token a step, from `position` on."""

    def __init__(self, model: Model, num_rows: int, position: int, sampling: Sequence[SamplingParams] = MIXED) -> None:
        memory = KvMemory(model.config, BLOCK_SIZE, NUM_SLOTS * BLOCKS_EACH, model.dtype)
        self._runner = TorchRunner(model, memory, NUM_SLOTS, MAX_MODEL_LEN)
        self._num_rows, self._position = num_rows, position
        starts = tuple(SlotStart(slot, 1, sampling[slot % len(sampling)], 0, 7) for slot in range(num_rows))
        chunks = tuple(
            PrefillChunk(
                slot, 1, 0, (slot,) * 3, tuple(range(slot * BLOCKS_EACH, (slot + 1) * BLOCKS_EACH)), samples=False
            )
            for slot in range(num_rows)
        )
        self._runner.run(Plan(0, starts, chunks=chunks))

    def step(self) -> None:
        rows = Decodes.of(*(DecodeRow(slot, 1, self._position, ()) for slot in range(self._num_rows)))
        self._runner.run(Plan(0, decodes=rows))
        self._position += 1


@pytest.fixture(scope="module")
def model(model_dirs: ModelDirs) -> Model:
    return load_model(model_dirs("group4", "bf16"), "auto", KERNELS)


def test_a_hundred_steps_lie_where_the_first_ones_lay(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Model.forward
    seen: list[tuple[int, ...]] = []

    def spy(self: Model, batch: Batch, kv: Tensor, memory: object = None) -> Tensor:
        logits = forward(self, batch, kv, memory)  # type: ignore[arg-type]
        if isinstance(self.kernels, CpuKernels):
            seen.append((logits.data_ptr(), *(each.data_ptr() for each in tensors(batch))))
        else:  # torch takes fresh memory for results
            seen.append(tuple(each.data_ptr() for each in tensors(batch)))
        return logits

    monkeypatch.setattr(Model, "forward", spy)
    decoding = Decoding(model, 8, 100, [SCORED])
    seen.clear()
    for _ in range(100):
        decoding.step()
    assert len(seen) == 100
    # From position 128 on the tables are one block wider than any before: they have moved once, and no more.
    assert len({*seen[30:]}) == 2  # by turns
    assert len({*seen}) <= 4


def allocated_by_torch(decoding: Decoding) -> int:
    """Bytes that torch takes from its allocator in one step, whether or not it gives them back."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        decoding.step()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events = profile.profiler.kineto_results.events()
    return sum(max(0, event.nbytes()) for event in events if event.name() == "[memory]")


@pytest.mark.skipif(KERNELS != "cpu", reason="the compiled kernels alone have such steps")
def test_a_hundred_steps_in_one_call_take_no_more_memory_than_the_first_ones(model: Model) -> None:
    if not isinstance(model.whole, CpuModel):
        pytest.skip("no compiled kernels here (kernels/cpu)")
    decoding = Decoding(model, 8, 100)
    taken = []
    for _ in range(100):
        decoding.step()
        taken.append(model.whole.workspace_bytes)
    assert len({*taken[30:]}) == 1  # from position 128 on tables are a block wider than any before
    assert len({*taken}) <= 3


@pytest.mark.skipif(KERNELS != "cpu", reason="torch takes fresh memory for every result; the compiled kernels do not")
def test_a_step_takes_nothing_from_torch_that_grows_with_rows_or_context(model: Model) -> None:
    if not isinstance(model.kernels, CpuKernels):
        pytest.skip("no compiled kernels here (kernels/cpu)")
    taken = {}
    for num_rows, position in ((2, 20), (2, 600), (16, 20), (16, 600)):
        decoding = Decoding(model, num_rows, position, [GREEDY])
        for _ in range(3):
            decoding.step()
        taken[num_rows, position] = allocated_by_torch(decoding)
    assert len({*taken.values()}) == 1, taken


def held() -> int:
    """Bytes that Python and numpy hold."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.fixture
def traced() -> Iterator[None]:
    """Have numpy's and Python's allocations counted."""
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("traced")
@KINDS
def test_steps_leave_nothing_behind(model: Model, sampling: Sequence[SamplingParams]) -> None:
    decoding = Decoding(model, 16, 40, sampling)
    for _ in range(100):  # until Python's and numpy's own lists of free objects are full
        decoding.step()
    before = held()
    for _ in range(200):
        decoding.step()
    growth = (held() - before) / 200
    assert growth < 16 * 16, f"{growth} bytes more with each step of 16 rows: a number for each row would be 28"


@pytest.mark.usefixtures("traced")
@pytest.mark.skipif(
    KERNELS != "cpu", reason="torch's attention lays its tiles out anew; the compiled kernels need none"
)
@KINDS
def test_the_peak_of_a_step_does_not_follow_the_context(model: Model, sampling: Sequence[SamplingParams]) -> None:
    if not isinstance(model.kernels, CpuKernels):
        pytest.skip("no compiled kernels here (kernels/cpu)")
    peaks = []
    for position in (66, 400):  # and 25 more: a power of two of table entries has room for them
        decoding = Decoding(model, 16, position, sampling)
        for _ in range(20):
            decoding.step()
        before = held()
        tracemalloc.reset_peak()
        for _ in range(5):
            decoding.step()
        peaks.append(tracemalloc.get_traced_memory()[1] - before)
    assert abs(peaks[1] - peaks[0]) < 4096
    assert peaks[1] < 16 * 8192  # a few kilobytes a row: what the sampler looks at, and the answer itself
