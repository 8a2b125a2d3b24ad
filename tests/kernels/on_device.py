"""A back end of a device behind host memory, so that tests which know of no device run on one: everything goes there and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.interface import (
    AttentionBatch,
    Contenders,
    DecodeStep,
    Kernels,
    LayerStack,
    Linear,
    ModelEnds,
    NearHead,
    PlainDraws,
    Shares,
    StackLayer,
    StepAttention,
)


class OnDevice:
    """kernels.interface.Kernels: another one's, with a copy on the way in and one on the way out."""

    def __init__(self, kernels: Kernels, device: torch.device) -> None:
        self._kernels, self._device = kernels, device
        self.name, self.keeps_row_bits = kernels.name, kernels.keeps_row_bits

    def _there(self, x: Tensor | None) -> Tensor:
        assert x is not None
        return torch.empty_like(x, device=self._device).copy_(x)

    def _maybe(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else self._there(x)

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return _Linear(self._kernels.pack_linear(self._there(weight), self._maybe(bias)), self._device)

    def pack_gate_up(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return _Linear(self._kernels.pack_gate_up(self._there(weight), self._maybe(bias)), self._device)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        return self._kernels.rms_norm(self._there(x), self._there(weight), eps).cpu()

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self._kernels.rotate(x.to(self._device), self._there(cos), self._there(sin)).cpu()

    def silu_gate(self, gate_up: Tensor) -> Tensor:
        return self._kernels.silu_gate(self._there(gate_up)).cpu()

    def step_attention(self, kv: Tensor, batch: AttentionBatch, num_heads: int) -> StepAttention:
        there = self._there(kv)
        return _Attention(self._kernels.step_attention(there, batch, num_heads), there, kv)

    def stack(self, layers: Sequence[StackLayer], num_heads: int, norm_eps: float) -> LayerStack | None:
        there = [StackLayer(*map(self._part, layer)) for layer in layers]
        stack = self._kernels.stack(there, num_heads, norm_eps)
        return None if stack is None else _Stack(stack, self._device)

    def _part(self, part: Any) -> Any:
        if isinstance(part, _Linear):
            return part.there
        return self._there(part) if isinstance(part, Tensor) else part

    def whole(self, ends: ModelEnds, layers: Sequence[StackLayer], num_heads: int, norm_eps: float) -> None:
        """Layers are what is tested there."""

    def near_head(self, weight: Tensor) -> NearHead | None:
        return self._kernels.near_head(weight)

    def contenders(
        self, logits: Tensor, temperatures: NDArray[np.float32], streams: NDArray[np.uint64]
    ) -> Contenders | None:
        return self._kernels.contenders(logits, temperatures, streams)

    def shares(
        self,
        logits: Tensor,
        temperatures: NDArray[np.float32],
        greatest: NDArray[np.float32],
        token_ids: NDArray[np.int32],
    ) -> Shares | None:
        return self._kernels.shares(logits, temperatures, greatest, token_ids)

    def draw(self, logits: Tensor, draws: PlainDraws, last: Tensor) -> Tensor | None:
        there = self._there(last)
        drawn = self._kernels.draw(self._there(logits), draws, there)
        last.copy_(there)
        return None if drawn is None else drawn.cpu()

    def gather_blocks(self, kv: Tensor, block_ids: Tensor) -> Tensor:
        return self._kernels.gather_blocks(self._there(kv), self._there(block_ids)).cpu()

    def scatter_blocks(self, kv: Tensor, block_ids: Tensor, chosen: Tensor) -> None:
        there = self._there(kv)
        self._kernels.scatter_blocks(there, self._there(block_ids), self._there(chosen))
        kv.copy_(there)


class _Linear:
    def __init__(self, linear: Linear, device: torch.device) -> None:
        self.there = linear
        self._device = device

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self.there(x.to(self._device)).cpu()


class _Attention:
    def __init__(self, attention: StepAttention, there: Tensor, here: Tensor) -> None:
        self._attention, self._there, self._here = attention, there, here

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self._attention.write(layer, keys.to(self._there.device), values.to(self._there.device))
        self._here.copy_(self._there)

    def attend(self, layer: int, queries: Tensor, window: int | None = None) -> Tensor:
        return self._attention.attend(layer, queries.to(self._there.device), window).cpu()


class _Stack:
    def __init__(self, stack: LayerStack, device: torch.device) -> None:
        self._stack, self._device = stack, device

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, batch: AttentionBatch) -> Tensor:
        there = kv.to(self._device)
        cos, sin = cos.to(self._device), sin.to(self._device)
        found = self._stack(hidden.to(self._device), cos, sin, there, batch).cpu()
        kv.copy_(there)
        return found

    def steps_to_capture(self, max_rows: int, max_positions: int, kv: Tensor) -> list[DecodeStep]:
        return self._stack.steps_to_capture(max_rows, max_positions, kv)
