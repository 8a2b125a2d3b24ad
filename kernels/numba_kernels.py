"""The second choice where nothing was compiled from C++: attention by numba, everything else by torch.

    python -m kernels.numba_kernels        what `make setup` runs there: has numba compile, so that no node does

Imports numba, which is not there by default. It keeps the law of interface.py as torch_reference.py does for what torch computes,
and by construction for attention (numba_functions.py). Machine code is this CPU's, and so is the name of the back end.
"""

from __future__ import annotations

import math
import sys
from typing import Any, Final

import numba
import numpy as np
import torch
from llvmlite import binding
from numpy.typing import NDArray
from torch import Tensor

from kernels.int8_weights import INT8_SUFFIX
from kernels.interface import AttentionBatch, StepAttention
from kernels.numba_functions import PARTS, attend
from kernels.torch_attention import TiledAttention
from kernels.torch_reference import TorchKernels, products_kind

NO_WINDOW: Final = 1 << 62
_STORED_AS: Final = {torch.bfloat16: np.uint16, torch.float16: np.int16}


class NumbaAttention(TiledAttention):
    """kernels.interface.StepAttention; KV is written as the reference writes it."""

    def __init__(self, kv: Tensor, batch: AttentionBatch, num_heads: int) -> None:
        super().__init__(kv, batch, num_heads)
        # To the memory's end: others' heads may lie between a position and the next.
        flat = kv.as_strided((kv.untyped_storage().nbytes() // kv.itemsize - kv.storage_offset(),), (1,))
        self._stored: NDArray[Any] = (
            flat.view(torch.int16).numpy().view(_STORED_AS[kv.dtype]) if kv.dtype in _STORED_AS else flat.numpy()
        )
        self._position_size = kv.stride(3)
        first_rows, counts, first_positions = batch.spans.T.astype(np.int64)
        self._rows = np.empty((int(counts.sum()), 2), np.int64)
        self._rows[:, 0] = np.repeat(np.arange(len(counts)), counts)
        self._rows[:, 1] = np.arange(len(self._rows)) + np.repeat(first_positions - first_rows, counts)
        self._tables = np.ascontiguousarray(batch.block_tables.numpy())
        self._num_threads = min(torch.get_num_threads(), int(numba.config.NUMBA_NUM_THREADS))
        longest = int(self._rows[:, 1].max()) + 1
        self._scores = np.empty((self._num_threads, self._group_size, longest + PARTS), np.float32)

    def attend(self, layer: int, queries: Tensor, window: int | None = None) -> Tensor:
        """Attend over the last `window` positions up to each row's own, or all."""
        shape = (len(queries), self._num_kv_heads, self._group_size, self._head_dim)
        scaled = (queries.float() * (1 / math.sqrt(self._head_dim))).view(shape).numpy()
        mixed = np.empty(shape, np.float32)
        numba.set_num_threads(self._num_threads)
        window = NO_WINDOW if window is None else window
        sizes = (layer, self._num_layers, self._block_size, window, self._position_size)
        attend(scaled, (self._stored, self._tables, self._rows), sizes, self._scores, mixed)
        return torch.from_numpy(mixed).view(queries.shape).to(queries.dtype)


class NumbaKernels(TorchKernels):
    """kernels.interface.Kernels: torch's, but for attention."""

    def __init__(self, *, is_int8: bool = False) -> None:
        """`is_int8`: as TorchKernels."""
        super().__init__(is_int8=is_int8)
        self.name = f"numba-{binding.get_host_cpu_name()}-{products_kind()}{INT8_SUFFIX if is_int8 else ''}"

    def step_attention(self, kv: Tensor, batch: AttentionBatch, num_heads: int) -> StepAttention:
        """Prepare one step."""
        return NumbaAttention(kv, batch, num_heads)


def main() -> int:
    """Have everything compiled; says in one line for which CPU."""
    kernels = NumbaKernels()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        kv = torch.zeros((1, 1, 2, 1, 1, 8), dtype=dtype)
        one_row = AttentionBatch(
            np.array([[0, 1, 0]], np.int32), torch.zeros((1, 1), dtype=torch.int64), torch.zeros(1).long()
        )
        kernels.step_attention(kv, one_row, 1).attend(0, torch.zeros((1, 1, 8), dtype=dtype))
    sys.stdout.write(f"kernels: numba has compiled attention ({kernels.name})\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
