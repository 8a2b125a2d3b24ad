"""A weight as the compiled library multiplies by it: in panels (kernels/cpu/panels.h), in full or in 8 bits."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from kernels.cpu_library import DTYPE_CODES, CLinear, Library, reference
from kernels.int8_weights import Int8Weight
from kernels.weight_memory import WeightMemory


class CpuLinear:
    """kernels.interface.Linear."""

    def __init__(
        self,
        library: Library,
        memory: WeightMemory,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        is_gated: bool = False,
        rounded: Int8Weight | None = None,
    ) -> None:
        """`rounded`: the same weight in 8 bits, which is what is kept of it then."""
        self._library = library
        self._dtype_code = DTYPE_CODES[weight.dtype]
        num_columns, in_features = weight.shape
        out_features = num_columns // 2 if is_gated else num_columns
        self.c: Final = CLinear(None, None, None, in_features, out_features, int(is_gated))
        self._bias = None if bias is None else _in_panels(bias.float(), is_gated)
        self._scales: Tensor | None = None
        if rounded is not None:
            weight = rounded.numbers
            self._scales = _in_panels(rounded.scales, is_gated)
            self.c.scales = self._scales.data_ptr()
        size = library.call.baton_packed_size(reference(self.c), self._dtype_code)
        self._packed = memory.take(size, weight.dtype)
        weight = weight.contiguous()
        library.call.baton_pack(reference(self.c), weight.data_ptr(), self._packed.data_ptr(), self._dtype_code)
        self.c.weight = self._packed.data_ptr()
        if self._bias is not None:
            self.c.bias = self._bias.data_ptr()

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Multiply [num_rows, in_features] into [num_rows, out_features]; gated ones give silu(gate) * up."""
        x = x.contiguous()
        if out is None:
            out = x.new_empty((x.shape[0], self.c.out_features))
        arguments = x.data_ptr(), x.shape[0], out.data_ptr(), torch.get_num_threads(), self._dtype_code
        self._library.call.baton_linear(reference(self.c), *arguments)
        return out


def _in_panels(numbers: Tensor, is_gated: bool) -> Tensor:
    """A number per column, fp32, in the order and with the padding of the weight's panels."""
    if is_gated:
        halves = torch.nn.functional.pad(numbers.view(2, -1), (0, -numbers.numel() // 2 % 16))
        return halves.view(2, -1, 16).transpose(0, 1).contiguous().view(-1)
    return torch.nn.functional.pad(numbers, (0, -numbers.numel() % 32))
