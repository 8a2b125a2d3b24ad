"""A row's bits depend on its own tokens only: random batches, cuts, neighbours, blocks, threads; compared bit by bit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.batch import Batch, Segment, build_batch
from engine.kv_memory import KvMemory
from engine.model import Model, load_model
from engine.probe import find_inexactness
from kernels.choice import has_numba
from kernels.interface import AttentionBatch, DecodeStep, Kernels, PlainDraws
from kernels.torch_reference import TorchKernels
from tests.engine_torch.conftest import VOCAB_SIZE, ModelDirs
from tests.kernels.back_ends import BACK_ENDS
from tests.thorough import examples, only_thorough

MAX_TOKENS = 150
NUMBA_NAME = ("numba",) if has_numba() else ()
DTYPES = ["fp32", "bf16"]


@dataclass(frozen=True, slots=True)
class Scenario:
    """Sequences and the steps that compute them."""

    lengths: list[int]
    block_size: int
    steps: list[list[tuple[int, int]]]  # per step (sequence, rows), each sequence at most once
    num_threads: int
    block_order: list[int]


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    lengths = draw(st.lists(st.integers(1, MAX_TOKENS), min_size=1, max_size=3))
    block_size = draw(st.sampled_from([8, 16, 24, 128]))
    left = dict(enumerate(lengths))
    steps = []
    while left:
        members = draw(st.permutations(sorted(left)))
        members = members[: draw(st.integers(1, len(members)))]
        step = []
        for sequence in members:
            count = min(left[sequence], draw(st.sampled_from([1, 2, 17, 63, 64, 65, 128])))
            step.append((sequence, count))
            left[sequence] -= count
            if not left[sequence]:
                del left[sequence]
        steps.append(step)
    num_blocks = sum(-(-length // block_size) for length in lengths)
    num_threads = draw(st.sampled_from([1, 2]))
    return Scenario(lengths, block_size, steps, num_threads, draw(st.permutations(range(num_blocks))))


@cache
def tokens(sequence: int) -> list[int]:
    generator = torch.Generator().manual_seed(sequence)
    return torch.randint(0, VOCAB_SIZE, (MAX_TOKENS,), generator=generator).tolist()


_alone: dict[tuple[int, int], tuple[Model, Tensor]] = {}  # the model too: an id is unique only while it lives


def alone(model: Model, sequence: int) -> Tensor:
    """All logits of a sequence computed by itself, whole, on one thread: what every other way must equal."""
    key = (id(model), sequence)
    if key not in _alone:
        torch.set_num_threads(1)
        kv = KvMemory(model.config, 16, -(-MAX_TOKENS // 16), model.dtype)
        segment = Segment(tokens(sequence), 0, range(kv.num_blocks), MAX_TOKENS)
        _alone[key] = model, model.forward(build_batch([segment], 16), kv.tensor)
    return _alone[key][1]


@pytest.fixture(
    scope="module",
    params=[
        *(
            (k, s, d, "auto")
            for k in ("cpu", "torch", *NUMBA_NAME)
            for s in ("group4", "group1", "group7")
            for d in DTYPES
        ),
        *((k, "group7", d, "int8") for k in ("cpu", "torch") for d in DTYPES),
    ],
    ids=str,
)
def model(request: pytest.FixtureRequest, model_dirs: ModelDirs) -> Model:
    kernels_name, shape, dtype, weight_dtype = request.param
    return load_model(model_dirs(shape, dtype), "auto", kernels_name, weight_dtype=weight_dtype)


@pytest.mark.covers("M06")
@settings(max_examples=examples(12, 3), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(scenario=scenarios())
def test_logits_have_the_same_bits_in_any_batch_cut_phase_and_thread_count(model: Model, scenario: Scenario) -> None:
    kv = KvMemory(model.config, scenario.block_size, len(scenario.block_order), model.dtype)
    kv.tensor.fill_(float("nan"))  # what a block held before must not matter either
    free = iter(scenario.block_order)
    tables = [[next(free) for _ in range(-(-length // scenario.block_size))] for length in scenario.lengths]
    done = [0] * len(tables)
    for step in scenario.steps:
        torch.set_num_threads(scenario.num_threads)
        segments = []
        for sequence, count in step:
            start = done[sequence]
            segments.append(Segment(tokens(sequence)[start : start + count], start, tables[sequence], count))
        logits = model.forward(build_batch(segments, scenario.block_size), kv.tensor)
        row = 0
        for sequence, count in step:
            start = done[sequence]
            note(f"sequence {sequence} rows {start}..{start + count} on {scenario.num_threads} threads")
            expected = alone(model, sequence)[start : start + count]
            assert torch.equal(logits[row : row + count], expected)
            done[sequence] += count
            row += count


@pytest.mark.covers("M06")
def test_asking_for_fewer_logits_changes_none(model: Model) -> None:
    kv = KvMemory(model.config, 16, 10, model.dtype)
    segment = Segment(tokens(0), 0, range(10), 1)
    last = model.forward(build_batch([segment], 16), kv.tensor)
    assert torch.equal(last, alone(model, 0)[-1:])


@pytest.mark.covers("M06")
def test_the_probe_finds_this_machine_bit_exact(model: Model) -> None:
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        assert find_inexactness(model) is None


@pytest.mark.covers("M06")
@pytest.mark.parametrize("num_rows", [1, 3])
def test_the_probe_asks_for_repeated_decode_steps(model: Model, num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A back end may record what a step launches: here it does, and what it repeats computes nothing."""
    plain = replace(model.first_layers(1), whole=None, stack=None)
    recorded: set[int] = set()

    class Stack:
        def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, batch: AttentionBatch) -> Tensor:
            is_decode = (batch.spans[:, 1] == 1).all() and len(batch.spans) == num_rows
            if is_decode and num_rows in recorded:
                return hidden
            recorded.update([num_rows] if is_decode else [])
            nothing = torch.zeros(0, dtype=torch.int64)
            return plain._layer_by_layer(hidden, cos, sin, kv, Batch(nothing, nothing, nothing, batch))

        def steps_to_capture(self, max_rows: int, max_positions: int, kv: Tensor) -> list[DecodeStep]:
            return []

    monkeypatch.setattr(Model, "first_layers", lambda model, count: replace(plain, stack=Stack()))
    found = find_inexactness(model)
    assert found is not None and "other bits" in found and recorded == {num_rows}


def test_what_a_back_end_records_is_run_before_anybody_waits_for_it(model: Model) -> None:
    ran: list[tuple[int, set[int]]] = []
    steps = [DecodeStep(3, 40), DecodeStep(1, 15), DecodeStep(2, 0)]

    class Stack:
        def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, batch: AttentionBatch) -> Tensor:
            assert batch.block_tables.shape[1] * 16 > int(batch.spans[:, 2].max())
            ran.append((len(hidden), set(batch.spans[:, 2].tolist())))
            return hidden

        def steps_to_capture(self, max_rows: int, max_positions: int, kv: Tensor) -> list[DecodeStep]:
            assert (max_rows, max_positions) == (5, 41)
            return steps

    class DrawingKernels(TorchKernels):
        def draw(self, logits: Tensor, draws: PlainDraws, last: Tensor) -> None:
            drawn.append((len(logits), draws.temperatures.tolist(), last.tolist()))

    drawn: list[tuple[int, list[float], list[int]]] = []
    kv = KvMemory(model.config, 16, 2, model.dtype)
    replace(model, whole=None, stack=Stack(), kernels=DrawingKernels()).capture(kv.tensor, 5, 41)
    assert ran == [(each.num_rows, {each.position}) for each in steps]
    assert drawn == [(1, [1.0], [0])]  # by chance: that is all that there is to compile
    model.capture(kv.tensor, 5, 41)  # and one that records nothing has nothing to run


@pytest.mark.covers("M06")
@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [(each, d) for each in BACK_ENDS for d in (torch.float32, torch.bfloat16, torch.float16)],
    ids=lambda value: getattr(value, "name", str(value)),
)
@pytest.mark.parametrize(
    ("width_in", "width_out", "has_bias"),
    [
        (100, 60, True),
        (128, 192, False),
        (1024, 512, False),
        (1024, 512, True),
        (4864, 128, False),
        pytest.param(4864, 128, True, marks=only_thorough),
        (8192, 256, False),
        pytest.param(8192, 256, True, marks=only_thorough),
    ],
)
def test_a_packed_linear_gives_a_row_the_same_bits_among_any_number(
    kernels: Kernels, dtype: torch.dtype, width_in: int, width_out: int, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(width_in)
    weight = torch.randn(width_out, width_in, generator=generator).to(dtype)
    linear = kernels.pack_linear(weight, torch.randn(width_out, generator=generator).to(dtype) if has_bias else None)
    x = torch.randn(600, width_in, generator=generator).to(dtype)
    whole = linear(x)
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for count in (1, 2, 3, 7, 16, 17, 33, 64, 255, 600):
            for start in {0, 600 - count}:
                assert torch.equal(linear(x[start : start + count]), whole[start : start + count])
