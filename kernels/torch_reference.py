"""The reference back end: plain torch operations on the CPU, chosen so that a row's bits depend on its own tokens only.

Which operations keep that law was measured (torch 2.13, fp32 and bf16, 1 to 16 threads; tests/engine_torch repeats it):

    kept      oneDNN linears on packed weights, with and without a bias, from 2 rows up; batched matmul with a fixed shape
              per element from 2 elements up, each of whole 16 bytes; sums and means over a contiguous last dimension; exp,
              rsqrt, + - * / and casts
    broken    F.linear, matmul and SDPA in fp32 (the kernel is chosen by the number of rows); a packed linear with a single
              row (a matrix-vector kernel), and one of bf16 on a CPU with AMX (its blocks are cut by the number of rows);
              sigmoid and silu (vector body and scalar tail of the loop differ in the last bit)

So single rows are doubled before a matrix product, and silu is composed from exp. Attention is in torch_attention.py.
Where bf16 is rounded follows transformers, whose logits are the oracle.
Fast kernels are another back end's business; this one must be right. It takes fresh memory for every result.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cpu_build import cpu_flags, cpu_kind
from kernels.int8_weights import INT8_SUFFIX, quantized
from kernels.interface import AttentionBatch, Linear, ModelEnds, PlainDraws, StackLayer, StepAttention
from kernels.torch_attention import TiledAttention


class PackedLinear:
    """A oneDNN-packed weight: the same arithmetic for any number of rows from 2 up."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self._bias = bias

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Multiply [num_rows, in_features] into [num_rows, out_features]."""
        num_rows = x.shape[0]
        if num_rows == 1:
            x = torch.cat((x, x))
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return product[:num_rows]


class WidenedLinear:
    """A linear computed in fp32 and rounded once, behind scale and bias: right, and neither small nor fast.

    For weights in 8 bits (kernels/int8_weights.py), and for what oneDNN does not pack, or multiplies by the number of rows: bf16
    without AVX-512 and with AMX, fp16 on most CPUs.
    """

    def __init__(self, linear: Linear, bias: Tensor | None, scales: Tensor | None = None) -> None:
        """`linear`: in fp32, without a bias."""
        self._linear = linear
        self._scales = scales
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Multiply [num_rows, in_features] into [num_rows, out_features]."""
        product = self._linear(x.float())
        if self._scales is not None:
            product.mul_(self._scales)
        return (product if self._bias is None else product.add_(self._bias)).to(x.dtype)


class PlainLinear:
    """The product of another device's library, or of a torch without oneDNN: by the number of rows, so its bits are no promise."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Multiply [num_rows, in_features] into [num_rows, out_features]."""
        return torch.nn.functional.linear(x, self._weight, self._bias)


class GatedLinear:
    """A linear whose two halves are a gate and what it lets through."""

    def __init__(self, linear: Linear, kernels: TorchKernels) -> None:
        self._linear = linear
        self._kernels = kernels

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Multiply, then silu(gate) * up."""
        return self._kernels.silu_gate(self._linear(x))


@functools.cache
def products_kind() -> str:
    """What oneDNN's choice of a product, and so its bits, depends on: torch's version, and the CPU."""
    return f"{torch.__version__}-{cpu_kind(Path('/proc/cpuinfo').read_text(encoding='utf-8'))}"


class TorchBlockCopies:
    """kernels.interface.BlockCopies."""

    def gather_blocks(self, kv: Tensor, block_ids: Tensor) -> Tensor:
        """Copy whole blocks of the pool next to each other."""
        return kv.index_select(0, block_ids)

    def scatter_blocks(self, kv: Tensor, block_ids: Tensor, chosen: Tensor) -> None:
        """Copy whole blocks to their places in the pool."""
        kv.index_copy_(0, block_ids, chosen)


class TorchKernels(TorchBlockCopies):
    """kernels.interface.Kernels in plain torch, on a CPU or on a device that torch knows."""

    def __init__(self, device_type: str = "cpu", *, is_int8: bool = False) -> None:
        """`is_int8`: whether linears round their weights to 8 bits; on a CPU only."""
        is_on_cpu = device_type == "cpu"
        self._is_int8 = is_int8
        self.keeps_row_bits = is_on_cpu and can_pack(torch.float32)  # as measured
        self.name = f"torch-{products_kind() if is_on_cpu else device_type}{INT8_SUFFIX if is_int8 else ''}"

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Pack [out_features, in_features] for oneDNN, in fp32 where that is what keeps a row's bits."""
        linear = PackedLinear if self.keeps_row_bits else PlainLinear
        if self._is_int8:
            numbers, scales = quantized(weight)
            return WidenedLinear(linear(numbers.float()), bias, scales)
        if linear is PlainLinear or (can_pack(weight.dtype) and not goes_by_rows(weight.dtype)):
            return linear(weight, bias)
        return WidenedLinear(linear(weight.float()), bias)

    def pack_gate_up(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Pack as any linear; the gate is applied behind it."""
        return GatedLinear(self.pack_linear(weight, bias), self)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        """Normalise in fp32 and round before the weight, as the models were trained."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * scale).to(x.dtype) * weight

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate in x's dtype, rounding where transformers rounds: element i pairs with i + head_dim / 2."""
        first, second = x.chunk(2, -1)
        cos, sin = cos[:, None, :].to(x.dtype), sin[:, None, :].to(x.dtype)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def silu_gate(self, gate_up: Tensor) -> Tensor:
        """Compute silu in fp32, round, multiply. Below about -88 exp(-gate) is infinite and the quotient the right zero."""
        gate, up = gate_up.chunk(2, -1)
        wide = gate.float().contiguous()
        return (wide / ((-wide).exp_() + 1)).to(gate_up.dtype) * up

    def step_attention(self, kv: Tensor, batch: AttentionBatch, num_heads: int) -> StepAttention:
        """Prepare the tiles of one step."""
        return TiledAttention(kv, batch, num_heads)

    def stack(self, layers: Sequence[StackLayer], num_heads: int, norm_eps: float) -> None:
        """Nothing to gain here."""

    def whole(self, ends: ModelEnds, layers: Sequence[StackLayer], num_heads: int, norm_eps: float) -> None:
        """Nor here."""

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

    def draw(self, logits: Tensor, draws: PlainDraws, last: Tensor) -> None:
        """And draws, too."""


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN has packed linears of this dtype on this CPU (bf16 and fp16 need AVX-512's or their like)."""
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


@functools.cache
def goes_by_rows(dtype: torch.dtype) -> bool:
    """Whether a packed linear of it may sum a row in another order among other numbers of rows: where AMX has tiles of it."""
    tiles = {torch.bfloat16: "amx_bf16", torch.float16: "amx_fp16"}.get(dtype)
    return tiles in cpu_flags(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
