"""What only the Triton kernels promise: the law of interface.py by construction, what is fused, blocks in and out of the pool.

Runs where back_ends.py finds Triton: on a CUDA device, or interpreted, which test_triton.py starts.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.choice import has_triton
from kernels.interface import Kernels, LayerStack, StackLayer
from tests.kernels.back_ends import IS_INTERPRETED, REFERENCE, TRITON, a_few, few
from tests.kernels.test_primitives import drawn
from tests.kernels.test_stack import EPS, Sequences, Shape, angles, inputs, made_layers, one_by_one

if has_triton():
    from kernels.triton_kernels import TritonKernels

LONG = 48 if IS_INTERPRETED else 290  # positions; a part of the interpreter's table is 32
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = (
    Shape(4, 2, 16, (None, 20), norms_heads=False, has_bias=False),
    Shape(7, 1, 24, (None,), norms_heads=True, has_bias=True),
    Shape(2, 2, 32, (35,), norms_heads=False, has_bias=True),
)
Step = list[tuple[int, int, int]]  # sequence, first position, number of rows

pytestmark = [
    pytest.mark.covers("M04", "M05"),
    pytest.mark.parametrize("kernels", TRITON, ids=lambda kernels: kernels.name),
]


def stack_of(kernels: Kernels, layers: list[StackLayer], shape: Shape) -> LayerStack:
    stack = kernels.stack(layers, shape.num_heads, EPS)
    assert stack is not None
    return stack


def rows_of(step: Step, dtype: torch.dtype) -> Tensor:
    return torch.cat([inputs(sequence, dtype)[first : first + count] for sequence, first, count in step])


def run(stack: LayerStack, own: Sequences, step: Step, dtype: torch.dtype) -> Tensor:
    batch, positions = own.batch(step)
    return stack(rows_of(step, dtype), *angles(positions, own.shape.head_dim), own.kv, batch).clone()


@pytest.mark.parametrize(
    ("shape", "dtype"),
    a_few(
        [
            (SHAPES[1], torch.bfloat16),
            (SHAPES[2], torch.float16),
            (SHAPES[0], torch.bfloat16),
            (SHAPES[1], torch.float32),
        ]
    ),
    ids=str,
)
def test_all_layers_have_the_bits_of_one_primitive_after_the_other_and_the_values_of_the_reference(
    kernels: Kernels, dtype: torch.dtype, shape: Shape
) -> None:
    layers, referred = made_layers(kernels, shape, dtype), made_layers(REFERENCE, shape, dtype)
    stack = stack_of(kernels, layers, shape)
    fused, plain, reference = (Sequences(shape, dtype, 2, 16) for _ in range(3))
    plain.tables, reference.tables = fused.tables, fused.tables
    # A prompt longer than a part and a decode row; decode rows; a short chunk.
    steps: list[Step] = [[(0, 0, 35), (1, 0, 1)], [(1, 1, 1), (0, 35, 1)], [(0, 36, 2), (1, 2, 5)]]
    for step in steps:
        found = run(stack, fused, step, dtype)
        assert torch.equal(found, one_by_one(kernels, layers, plain, step, rows_of(step, dtype)))
        expected = one_by_one(REFERENCE, referred, reference, step, rows_of(step, dtype))
        bound = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype] * expected.float().abs().max()
        torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=bound.item())
    assert torch.equal(fused.kv.nan_to_num(), plain.kv.nan_to_num())


_alone: dict[tuple[int, Shape, torch.dtype], Tensor] = {}


def alone(stack: LayerStack, sequence: int, shape: Shape, dtype: torch.dtype) -> Tensor:
    """A sequence computed whole and by itself: what every other way must equal."""
    key = (sequence, shape, dtype)
    if key not in _alone:
        own = Sequences(shape, dtype, 1, 16)
        batch, positions = own.batch([(0, 0, LONG)])
        rows = inputs(sequence, dtype)[:LONG]
        _alone[key] = stack(rows, *angles(positions, shape.head_dim), own.kv, batch).clone()
    return _alone[key]


@pytest.mark.covers("M06")
@settings(max_examples=few(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape_and_dtype=st.sampled_from([(SHAPES[1], torch.bfloat16), (SHAPES[0], torch.float32)]),
    block_size=st.sampled_from([1, 16, 48]),
    cuts=st.lists(st.tuples(st.integers(0, 1), st.sampled_from([1, 1, 2, 5, 17, 33])), min_size=3, max_size=8),
)
def test_a_row_has_the_same_bits_in_any_company_cut_and_phase(
    kernels: Kernels, shape_and_dtype: tuple[Shape, torch.dtype], block_size: int, cuts: list[tuple[int, int]]
) -> None:
    shape, dtype = shape_and_dtype
    stack = stack_of(kernels, made_layers(kernels, shape, dtype), shape)
    shared = Sequences(shape, dtype, 2, block_size)
    done = [0, 0]
    while cuts:
        step: Step = []
        while cuts and cuts[0][0] not in [sequence for sequence, _, _ in step]:
            sequence, count = cuts.pop(0)
            count = min(count, LONG - done[sequence])
            if count:
                step.append((sequence, done[sequence], count))
                done[sequence] += count
        if step:
            found = run(stack, shared, step, dtype)
            expected = [alone(stack, sequence, shape, dtype)[first : first + count] for sequence, first, count in step]
            assert torch.equal(found, torch.cat(expected))


@pytest.mark.covers("M06", "M07")
def test_decode_steps_by_graphs_have_the_bits_of_steps_as_they_are(kernels: Kernels) -> None:
    """Where there is no device a graph runs what it has seen once more, over the same memory."""
    shape, dtype = SHAPES[0], torch.float32
    if not isinstance(kernels, TritonKernels):
        pytest.skip("on a device the back end captures by itself")
    graphed = TritonKernels(capture=lambda compute: compute)
    plain, by_graphs = Sequences(shape, dtype, 3, 16), Sequences(shape, dtype, 3, 16)
    by_graphs.tables = plain.tables
    stacks = [stack_of(each, made_layers(each, shape, dtype), shape) for each in (kernels, graphed)]
    prompts: Step = [(0, 0, 3), (1, 0, 30), (2, 0, 1)]
    decodes: list[Step] = [[(0, 3, 1), (1, 30, 1), (2, 1, 1)], [(1, 31, 1), (2, 2, 1), (0, 4, 1)], [(1, 32, 1)]]
    for step in (prompts, *decodes):
        expected = run(stacks[0], plain, step, dtype)
        assert torch.equal(run(stacks[1], by_graphs, step, dtype), expected)
    assert torch.equal(by_graphs.kv.nan_to_num(), plain.kv.nan_to_num())


@pytest.mark.covers("M06")
@pytest.mark.parametrize(
    ("dtype", "width_in", "width_out"),
    [(torch.float32, 100, 60), (torch.bfloat16, 48, 192), (torch.float16, 576, 20)],
    ids=str,
)
def test_a_linear_gives_a_row_the_same_bits_among_any_number(
    kernels: Kernels, dtype: torch.dtype, width_in: int, width_out: int
) -> None:
    linear = kernels.pack_linear(drawn(1, dtype, width_out, width_in), drawn(2, dtype, width_out))
    x = drawn(3, dtype, 70, width_in)
    whole = linear(x)
    for count in (1, 2, 7, 33, 64):
        for start in (0, 70 - count):
            assert torch.equal(linear(x[start : start + count]), whole[start : start + count])


@pytest.mark.covers("M06")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [24, 576, 1000])
def test_a_norm_gives_a_row_the_same_bits_among_any_number(kernels: Kernels, dtype: torch.dtype, width: int) -> None:
    x, weight = drawn(1, dtype, 40, width), drawn(2, dtype, width)
    whole = kernels.rms_norm(x, weight, 1e-5)
    for count in (1, 17):
        for start in (0, 3):
            assert torch.equal(kernels.rms_norm(x[start : start + count], weight, 1e-5), whole[start : start + count])


@pytest.mark.parametrize(
    ("dtype", "plane", "broken"),
    [
        (torch.float32, 0, torch.nan),
        (torch.float32, 1, torch.inf),
        (torch.bfloat16, 0, torch.inf),
        (torch.bfloat16, 1, torch.nan),
        (torch.float16, 1, torch.inf),
    ],
    ids=str,
)
def test_numbers_that_are_none_break_their_own_row_and_no_other(
    kernels: Kernels, dtype: torch.dtype, plane: int, broken: float
) -> None:
    shape = Shape(2, 1, 16, (None,), norms_heads=False, has_bias=False)
    own = Sequences(shape, dtype, 3, 16)
    own.kv.copy_(drawn(1, dtype, *own.kv.shape))
    # Block 0 is what a table says where it is not looked at: here it holds what is broken below, behind all that is seen.
    own.tables[own.tables == 0] = own.tables[1, 6]
    own.tables[1, 6] = 0
    batch, _ = own.batch([(0, 99, 1), (1, 99, 1), (2, 99, 1)])
    queries = torch.ones((3, 2, 16), dtype=dtype)
    right = kernels.step_attention(own.kv, batch, 2).attend(0, queries)
    kept = own.kv.clone()
    own.kv[own.tables[1, 3], 0, plane, 2] = broken
    found = kernels.step_attention(own.kv, batch, 2).attend(0, queries)
    assert not found[1].isfinite().all()
    assert torch.equal(found[[0, 2]], right[[0, 2]])
    own.kv.copy_(kept)
    own.kv[own.tables[1, 6], 0, plane, 4] = broken  # position 100: behind what the row sees
    assert torch.equal(kernels.step_attention(own.kv, batch, 2).attend(0, queries), right)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_lies_halfway_between_two_numbers_rounds_to_the_even_one(kernels: Kernels, dtype: torch.dtype) -> None:
    """Of bf16, 1 + 2 ** -8 goes down and 1 + 3 * 2 ** -8 up: Triton's interpreter by itself would cut both off."""
    x = torch.tensor([[1.0], [1 + 2**-7]]).to(dtype)
    weight, bias = torch.ones((1, 1), dtype=dtype), torch.tensor([2**-8], dtype=dtype)
    assert torch.equal(kernels.pack_linear(weight, bias)(x), (x.float() + bias.float()).to(dtype))


@settings(max_examples=few(40), deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 20), st.integers(1, 3), st.sampled_from([2, 16, 130])),
    data=st.data(),
)
def test_blocks_come_together_and_go_apart(
    kernels: Kernels, dtype: torch.dtype, sizes: tuple[int, int, int, int], data: st.DataObject
) -> None:
    num_layers, block_size, num_kv_heads, head_dim = sizes
    kv = drawn(1, dtype, 9, num_layers, 2, block_size, num_kv_heads, head_dim)
    block_ids = torch.tensor(data.draw(st.lists(st.integers(0, 8), unique=True)), dtype=torch.int64)
    together = kernels.gather_blocks(kv, block_ids)
    assert torch.equal(together, kv[block_ids])
    to = torch.tensor(data.draw(st.permutations(range(9))), dtype=torch.int64)[: len(block_ids)]
    expected = kv.clone()
    expected[to] = together
    kernels.scatter_blocks(kv, to, together)
    assert torch.equal(kv, expected)
