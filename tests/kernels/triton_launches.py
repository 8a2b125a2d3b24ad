"""Compiles what the Triton back end launches, for devices that are not there: from source to machine code, with ptxas.

The launches are recorded from the back end itself, over tensors of the host: what is compiled is what a device would be asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.interface import PlainDraws, StackLayer
from kernels.triton_kernels import DTYPE_NAMES, TritonKernels
from kernels.triton_launch import forget_launchers
from kernels.triton_tuning import OneShape, read_table
from tests.kernels.test_stack import EPS, HIDDEN, Sequences, Shape, angles, made_layers

_POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


class Launch(NamedTuple):
    """One kernel with the types of its arguments, and what it is compiled with."""

    kernel: JITFunction[Any]
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    divisible: frozenset[str]  # arguments that are multiples of 16
    options: tuple[tuple[str, Any], ...]


class _Nothing:
    """A compiled kernel that does nothing."""

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *_: None


_NOTHING = _Nothing()


@contextmanager
def recorded(launches: list[Launch]) -> Iterator[None]:
    """Note launches instead of making them."""
    run = JITFunction.run

    def note(self: JITFunction[Any], *arguments: Any, grid: Sequence[int], warmup: bool, **named: Any) -> Any:
        assert all(size > 0 for size in grid)
        values = dict(zip(self.arg_names, arguments, strict=False)) | named
        constants = {p.name: values[p.name] for p in self.params if p.is_constexpr}
        options = tuple((name, values[name]) for name in _OPTIONS if name in values)
        assert set(values) == {*self.arg_names, *(name for name, _ in options)}
        fixed = {p.name for p in self.params if p.do_not_specialize}
        types, divisible = [], set()
        for name in self.arg_names:
            value = values[name]
            types.append((name, "constexpr" if name in constants else _type(value)))
            number = value.data_ptr() if isinstance(value, Tensor) else value
            if name not in constants and name not in fixed and isinstance(number, int) and number % 16 == 0:
                divisible.add(name)
        launch = Launch(self, tuple(types), tuple(constants.items()), frozenset(divisible), options)
        if launch not in launches:
            launches.append(launch)
        return _NOTHING

    JITFunction.run = note
    forget_launchers()  # they remember what they were given
    try:
        yield
    finally:
        JITFunction.run = run
        forget_launchers()


def _type(value: object) -> str:
    if isinstance(value, Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{_POINTERS[value.base.dtype][1:]}{list(value.block_shape)}>"
    return "fp32" if isinstance(value, float) else "i32"


def compiled(launch: Launch, capability: int) -> Any:
    """Machine code and what Triton says of it. Raises what Triton raises where it does not compile."""
    names = [name for name, _ in launch.signature]
    constants = {(names.index(name),): value for name, value in launch.constants}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in launch.divisible}
    source = ASTSource(launch.kernel, dict(launch.signature), constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(launch.options))


def launches_of(capability: int, dtype: torch.dtype, head_dim: int) -> list[Launch]:
    """All that a model with this head size asks for: a chunk and decode rows, with biases, head norms and a window."""
    kernels = TritonKernels(capability=(capability // 10, capability % 10))
    shape = Shape(8, 2, head_dim, (None, 70), norms_heads=True, has_bias=True)
    launches: list[Launch] = []
    with recorded(launches):
        layers: list[StackLayer] = made_layers(kernels, shape, dtype)
        stack = kernels.stack(layers, shape.num_heads, EPS)
        own = Sequences(shape, dtype, 3, 16)
        batch, positions = own.batch([(0, 200, 1), (1, 3, 1), (2, 0, 200)])
        hidden = torch.zeros((len(positions), HIDDEN), dtype=dtype)
        stack(hidden, *angles(positions, head_dim), own.kv, batch)
        kernels.rotate(torch.zeros((3, 4, head_dim), dtype=dtype), *angles(torch.arange(3), head_dim))
        kernels.silu_gate(torch.zeros((3, 64), dtype=dtype))
        _launch_all_shapes(capability, dtype)
        chosen = kernels.gather_blocks(own.kv, torch.arange(3))
        kernels.scatter_blocks(own.kv, torch.arange(3), chosen)
        draws = PlainDraws(np.ones(3), np.zeros(3, np.uint64), np.arange(3), -2)
        kernels.draw(torch.zeros((3, 128_256), dtype=dtype), draws, torch.zeros(4, dtype=torch.int64))
    return launches


def _launch_all_shapes(capability: int, dtype: torch.dtype) -> None:
    """Every shape of the table, plain and gated, whatever the number of rows."""
    table, place = read_table(), (capability // 10, capability % 10)
    weight, x = torch.zeros((256, 192), dtype=dtype), torch.zeros((3, 192), dtype=dtype)
    for is_gated in (False, True):
        for shape in table.linear(table.device(place), DTYPE_NAMES[dtype], is_gated=is_gated):
            kernels = TritonKernels(OneShape(table, None, shape), place)
            (kernels.pack_gate_up if is_gated else kernels.pack_linear)(weight)(x)
