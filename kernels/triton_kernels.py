"""The back end of a CUDA device: Triton kernels that keep the law of interface.py by construction.

    triton_attention.py                      attention over paged KV
    triton_step.py, triton_tiles.py          what one step of it needs; which rows go together
    triton_linear.py, triton_rows.py         products; norms, rotations, gates
    triton_stack.py, triton_graphs.py        all layers with what can be fused fused; decode steps as CUDA graphs
    triton_draws.py, triton_sampler.py       a step's draws
    triton_blocks.py                         whole blocks in and out of the pool
    triton_tuning.py, triton_table.json      shapes of tiles
    triton_agreement.py                      whether shapes that are used side by side give the same bits on this device
    triton_launch.py                         launches in a fraction of Triton's own time on the host

Every sum is taken in an order that the model's shape and the device's kind fix. Shapes of tiles, sources and compiler have a say in
it, so a digest of them is in the back end's name, and with it in the fingerprint. Without a device it runs in Triton's
interpreter, for tests: TRITON_INTERPRET=1 before triton is imported. Imports triton.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor
from triton.errors import TritonError
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.interface import AttentionBatch, LayerStack, Linear, ModelEnds, PlainDraws, StackLayer, StepAttention
from kernels.triton_agreement import agreeing_attention, agreeing_shapes
from kernels.triton_blocks import copy_blocks
from kernels.triton_draws import launch_draws
from kernels.triton_graphs import Capture, CudaCapture
from kernels.triton_launch import LANES, aligned, launch_norm, launcher
from kernels.triton_linear import linear
from kernels.triton_rows import rotate, silu_gate
from kernels.triton_stack import TritonStack
from kernels.triton_step import TritonAttention, on_device
from kernels.triton_tuning import (
    TABLE,
    AttentionTuning,
    LinearShapes,
    LinearTuning,
    Table,
    fitting_shape,
    next_power_of_two,
    read_table,
)

DTYPE_NAMES: Final = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_NUMBERS: Final = 1024  # of a program that copies or gates
# A C compiler that is not there or fails (it compiles what launches), CUDA's libraries not found, ptxas, resources.
COMPILER_FAILURES: Final = (subprocess.SubprocessError, AssertionError, TritonError)
_WORDS: Final = (torch.int64, torch.int32, torch.int16)  # what blocks are copied as: the widest that fits


class TritonLinear:
    """A weight as models store it."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        shapes: LinearShapes,
        num_processors: int,
        *,
        is_gated: bool = False,
    ) -> None:
        """`num_processors`: multiprocessors of the device, by which one of the shapes is chosen for a number of rows."""
        self._weight, self._bias = weight.contiguous(), bias
        self._out_features = len(weight) // 2 if is_gated else len(weight)
        self._is_gated = is_gated
        self._shapes, self._num_processors = shapes, num_processors
        self._products: dict[LinearTuning, _Product] = {}
        self._by_rows: dict[int, _Product] = {}

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Multiply [num_rows, in_features] into [num_rows, out_features]; gated ones give silu(gate) * up."""
        x = aligned(x)
        num_rows = len(x)
        if out is None:
            out = x.new_empty((num_rows, self._out_features))
        if num_rows:
            product = self._by_rows.get(num_rows)
            if product is None:
                product = self._by_rows[num_rows] = self._product(num_rows)
            product(x, out)
        return out

    def _product(self, num_rows: int) -> _Product:
        shape = fitting_shape(self._shapes, num_rows, self._out_features, self._num_processors)
        if shape not in self._products:
            self._products[shape] = _Product(self._weight, self._bias, shape, is_gated=self._is_gated)
        return self._products[shape]


class _Product:
    """A weight and one shape of tiles."""

    def __init__(self, weight: Tensor, bias: Tensor | None, shape: LinearTuning, *, is_gated: bool) -> None:
        self._rows, self._columns, self._depth = shape.rows, shape.columns, shape.depth
        # A descriptor's rows begin at multiples of 16 bytes.
        self._by_descriptor = (
            shape.by_descriptor and not (weight.stride(0) * weight.element_size() | weight.data_ptr()) % 16
        )
        self._weight = (
            TensorDescriptor.from_tensor(weight, [shape.columns, shape.depth]) if self._by_descriptor else weight
        )
        self._bias = weight if bias is None else bias
        self._left: TensorDescriptor | None = None
        self._launch = launcher(
            linear,
            ROWS=shape.rows,
            COLUMNS=shape.columns,
            DEPTH=shape.depth,
            HAS_BIAS=bias is not None,
            IS_GATED=is_gated,
            BY_DESCRIPTOR=self._by_descriptor,
            num_warps=shape.warps,
            num_stages=shape.stages,
        )

    def __call__(self, x: Tensor, out: Tensor) -> None:
        num_rows, in_features = x.shape
        out_features = out.shape[1]
        num_tiles = -(-num_rows // self._rows) * -(-out_features // self._columns)
        left = self._described(x) if self._by_descriptor else x
        self._launch((num_tiles,), left, self._weight, self._bias, out, num_rows, out_features, in_features)

    def _described(self, x: Tensor) -> TensorDescriptor:
        """The last one again, where it is of the same memory: to make one takes as long as to launch a kernel."""
        left = self._left
        if left is None or left.base.data_ptr() != x.data_ptr() or left.shape[0] != len(x):
            left = self._left = TensorDescriptor.from_tensor(x, [self._rows, self._depth])
        return left


def triton_kernels(device_type: str) -> TritonKernels:
    """The back end of the CUDA device that torch uses, or of the interpreter where Triton was told to interpret.

    Raises NoTuning, or RuntimeError, in one sentence, where there is neither.
    """
    if triton.knobs.runtime.interpret:
        return TritonKernels()
    if device_type != "cuda":
        raise RuntimeError("the Triton kernels need a CUDA device, or TRITON_INTERPRET=1 for tests")
    processors = torch.cuda.get_device_properties().multi_processor_count
    kernels = TritonKernels(
        capability=torch.cuda.get_device_capability(), capture=CudaCapture(), num_processors=processors
    )
    one = torch.ones((1, 16), device="cuda")
    try:
        kernels.rms_norm(
            one, one[0], 1.0
        ).cpu()  # finds out at once whether there is what Triton compiles launches with
    except COMPILER_FAILURES as error:
        raise RuntimeError(first_line(error)) from error
    return kernels


def first_line(error: Exception) -> str:
    """What an error says first; a compiler says pages."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


class TritonKernels:
    """kernels.interface.Kernels on one kind of device."""

    def __init__(
        self,
        table: Table | None = None,
        capability: tuple[int, int] | None = None,
        capture: Capture | None = None,
        num_processors: int | None = None,
    ) -> None:
        """`capability`: of the CUDA device; None: the interpreter. `capture`: what makes graphs of decode steps, if anything.

        num_processors: the device's multiprocessors; None: there is no device that could be asked anything.
        Raises NoTuning for a device that is too old.
        """
        self._table = read_table() if table is None else table
        self._device = self._table.device(capability)
        self._capture, self._num_processors = capture, num_processors
        self._shapes: dict[tuple[torch.dtype, bool], LinearShapes] = {}
        self._attention: dict[tuple[torch.dtype, int, int], AttentionTuning] = {}
        place = "interpreter" if capability is None else f"sm{capability[0]}{capability[1]}"
        self.name: Final = f"triton-{place}-{_digest()}"
        self.keeps_row_bits = True  # by construction, unless the device says otherwise when it is asked

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Keep [out_features, in_features] as it is."""
        return self._packed(weight, bias, is_gated=False)

    def pack_gate_up(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Keep it as it is; both products of a number are taken by one program, which gates them."""
        return self._packed(weight, bias, is_gated=True)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        """Normalise in fp32 and round before the weight."""
        x = aligned(x)
        out = torch.empty_like(x) if out is None else out
        launch_norm(x, None, weight, eps, out)
        return out

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate in x's dtype: element i pairs with i + head_dim / 2."""
        num_rows, num_heads, head_dim = x.shape
        if x.stride()[1:] != (head_dim, 1):
            x = x.contiguous()
        out = x.new_empty(x.shape)
        num_lanes, half = num_rows * num_heads, head_dim // 2
        launch = launcher(rotate, HALF=half, COLUMNS=next_power_of_two(half), LANES=LANES)
        grid = (-(-num_lanes // LANES),)
        launch(grid, x, cos.contiguous(), sin.contiguous(), out, num_lanes, x.stride(0), num_heads)
        return out

    def silu_gate(self, gate_up: Tensor) -> Tensor:
        """Compute silu in fp32, round, multiply."""
        gate_up = gate_up.contiguous()
        out = gate_up.new_empty((len(gate_up), gate_up.shape[1] // 2))
        grid = (-(-out.numel() // _NUMBERS),)
        launcher(silu_gate, NUMBERS=_NUMBERS)(grid, gate_up, out, out.numel(), out.shape[1])
        return out

    def step_attention(self, kv: Tensor, batch: AttentionBatch, num_heads: int) -> StepAttention:
        """Prepare one step."""
        tuning = self._attention_tuning(kv, num_heads)
        return TritonAttention(kv, on_device(batch, kv.device, tuning, num_heads // kv.shape[-2]), num_heads, tuning)

    def stack(self, layers: Sequence[StackLayer], num_heads: int, norm_eps: float) -> LayerStack:
        """All layers of a step, with what can be fused."""
        return TritonStack(layers, num_heads, norm_eps, self._attention_tuning, self._capture)

    def whole(self, ends: ModelEnds, layers: Sequence[StackLayer], num_heads: int, norm_eps: float) -> None:
        """What is outside the layers is little beside launching them."""

    def near_head(self, weight: Tensor) -> None:
        """Nor is there another head."""

    def contenders(self, logits: Tensor, temperatures: NDArray[np.float32], streams: NDArray[np.uint64]) -> None:
        """The sampler looks at every token itself."""

    def shares(
        self,
        logits: Tensor,
        temperatures: NDArray[np.float32],
        greatest: NDArray[np.float32],
        token_ids: NDArray[np.int32],
    ) -> None:
        """And truncates by itself."""

    def draw(self, logits: Tensor, draws: PlainDraws, last: Tensor) -> Tensor:
        """Launch what draws a step's tokens."""
        return launch_draws(logits, draws, last)

    def gather_blocks(self, kv: Tensor, block_ids: Tensor) -> Tensor:
        """Copy whole blocks of the pool next to each other."""
        chosen = kv.new_empty((len(block_ids), *kv.shape[1:]))
        _copy(kv, block_ids, chosen, is_gather=True)
        return chosen

    def scatter_blocks(self, kv: Tensor, block_ids: Tensor, chosen: Tensor) -> None:
        """Copy whole blocks to their places in the pool."""
        _copy(kv, block_ids, chosen.contiguous(), is_gather=False)

    def _packed(self, weight: Tensor, bias: Tensor | None, *, is_gated: bool) -> TritonLinear:
        key = (weight.dtype, is_gated)
        if key not in self._shapes:
            shapes = self._table.linear(self._device, DTYPE_NAMES[weight.dtype], is_gated=is_gated)
            if self._num_processors is not None:
                shapes = agreeing_shapes(
                    shapes, partial(_multiplied, is_gated=is_gated), weight.dtype, weight.device, is_gated=is_gated
                )
            self._shapes[key] = shapes
        return TritonLinear(weight, bias, self._shapes[key], self._num_processors or 1, is_gated=is_gated)

    def _attention_tuning(self, kv: Tensor, num_heads: int) -> AttentionTuning:
        """For KV of this dtype and head size, whose heads so many queries' heads share."""
        head_dim, group_size = kv.shape[-1], num_heads // kv.shape[-2]
        key = (kv.dtype, head_dim, group_size)
        if key not in self._attention:
            tuning = self._table.attention(self._device, DTYPE_NAMES[kv.dtype], head_dim)
            if self._num_processors is not None:
                agreed = agreeing_attention(tuning, _attended, kv.dtype, kv.device, head_dim, group_size)
                self.keeps_row_bits &= agreed is not None
                tuning = agreed or tuning
            self._attention[key] = tuning
        return self._attention[key]


def _multiplied(shape: LinearTuning, x: Tensor, weight: Tensor, *, is_gated: bool = False) -> Tensor:
    out = x.new_empty((len(x), len(weight) // (1 + is_gated)))
    _Product(weight, None, shape, is_gated=is_gated)(x, out)
    return out


def _attended(tuning: AttentionTuning, kv: Tensor, batch: AttentionBatch, queries: Tensor) -> Tensor:
    num_heads = queries.shape[1]
    step = TritonAttention(kv, on_device(batch, kv.device, tuning, num_heads // kv.shape[-2]), num_heads, tuning)
    return step.attend(0, queries)


def _copy(kv: Tensor, block_ids: Tensor, chosen: Tensor, *, is_gather: bool) -> None:
    block_bytes = kv[0].numel() * kv.element_size()
    word = next(word for word in _WORDS if block_bytes % word.itemsize == 0)
    num_words = block_bytes // word.itemsize
    grid = (len(block_ids), -(-num_words // _NUMBERS))
    if len(block_ids):
        pool, together = (blocks.view(len(blocks), -1).view(word) for blocks in (kv, chosen))
        launch = launcher(copy_blocks, WORDS=_NUMBERS, IS_GATHER=is_gather)
        launch(grid, pool, block_ids, together, num_words)


def _digest() -> str:
    """What tells results of these sources, tile shapes and this compiler from those of others."""
    digest = hashlib.sha256(triton.__version__.encode())
    for path in sorted(Path(__file__).resolve().parent.glob("triton_*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update(TABLE.read_bytes())
    return digest.hexdigest()[:8]
