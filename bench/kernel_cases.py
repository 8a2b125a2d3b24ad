"""What `bench.kernels` measures: a primitive of a back end and the same by torch, over the same numbers.

    decode   one row of each of several sequences        torch: scaled_dot_product_attention over KV that lies together
    chunk    a run of rows of one sequence               the same, causal
    linear   rows times a weight                         torch.nn.functional.linear
    gated    silu(rows x gate) * (rows x up)             linear over both weights at once, then silu, then *: three kernels
    gather   blocks out of the pool, side by side        torch.index_select

torch's side of attention is spared the block table: it is what the kernels would be without paging, and not what a server could
run. What a kernel reads once from far away (weights, KV, blocks) may be drawn several times over, so that no cache holds it; rows
are few, and in a model the kernel before has just written them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from kernels.interface import AttentionBatch, Kernels

BLOCK_SIZE = 16
_USUAL_HEAD_DIM = 128

Calls = Sequence[Callable[[], Tensor]]  # one for each copy of the inputs


class Inputs(Protocol):
    """The numbers of a case, on a device, in one or several copies."""

    def ours(self, kernels: Kernels) -> Calls:
        """By a back end."""

    def torchs(self) -> Calls:
        """The same results by torch."""

    @property
    def torch_way(self) -> str:
        """Which of its ways torch takes, if it has several."""


class Case(Protocol):
    """What is computed, by its sizes."""

    @property
    def name(self) -> str:
        """For a table."""

    @property
    def num_operations(self) -> int:
        """An addition is one, too."""

    def num_bytes(self, itemsize: int) -> int:
        """Read and written, for numbers of so many bytes."""

    def copied_bytes(self, itemsize: int) -> int:
        """Of it, what each copy of the inputs has for itself."""

    def drawn(self, dtype: torch.dtype, device: torch.device, num_copies: int) -> Inputs:
        """Random numbers."""


class Pair(NamedTuple):
    """The same results twice."""

    ours: Calls
    torchs: Calls
    torch_way: str


def pair_of(case: Case, kernels: Kernels, dtype: torch.dtype, device: torch.device, num_copies: int = 1) -> Pair:
    """Draw the numbers and prepare both sides; results of both are of the same shape."""
    inputs = case.drawn(dtype, device, num_copies)
    return Pair(inputs.ours(kernels), inputs.torchs(), inputs.torch_way)


@dataclass(frozen=True, slots=True)
class LinearCase:
    """Rows times a weight, or two weights and a gate."""

    num_rows: int
    in_features: int = 4096
    out_features: int = 4096
    is_gated: bool = False

    @property
    def name(self) -> str:
        """For a table."""
        return f"{'gated' if self.is_gated else 'linear'} {self.num_rows} x {self.in_features} x {self.out_features}"

    @property
    def num_operations(self) -> int:
        """Of the products alone."""
        return 2 * self.num_rows * self._num_weights

    def num_bytes(self, itemsize: int) -> int:
        """The weight, the rows and the result."""
        return (self._num_weights + self.num_rows * (self.in_features + self.out_features)) * itemsize

    def copied_bytes(self, itemsize: int) -> int:
        """The weight."""
        return self._num_weights * itemsize

    def drawn(self, dtype: torch.dtype, device: torch.device, num_copies: int) -> _LinearInputs:
        """So many weights, and the rows once."""
        x = torch.randn((self.num_rows, self.in_features), device=device, dtype=dtype)
        shape = ((1 + self.is_gated) * self.out_features, self.in_features)
        weights = [torch.randn(shape, device=device, dtype=dtype) for _ in range(num_copies)]
        if self.is_gated:  # numbers as small as a model's, or silu would be a step
            weights = [weight.mul_(self.in_features**-0.5) for weight in weights]
        return _LinearInputs(x, weights, self.is_gated)

    @property
    def _num_weights(self) -> int:
        return (1 + self.is_gated) * self.in_features * self.out_features


@dataclass(frozen=True, slots=True)
class _LinearInputs:
    x: Tensor
    weights: list[Tensor]
    is_gated: bool
    torch_way: str = ""

    def ours(self, kernels: Kernels) -> Calls:
        pack = kernels.pack_gate_up if self.is_gated else kernels.pack_linear
        return [partial(pack(weight), self.x) for weight in self.weights]

    def torchs(self) -> Calls:
        if not self.is_gated:
            return [partial(linear, self.x, weight) for weight in self.weights]

        def gated(weight: Tensor) -> Tensor:
            gate, up = linear(self.x, weight).chunk(2, -1)
            return silu(gate) * up

        return [partial(gated, weight) for weight in self.weights]


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """So many sequences, each with so many positions, of which it computes the last `num_rows`."""

    num_sequences: int
    num_positions: int
    num_rows: int = 1
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = _USUAL_HEAD_DIM

    @property
    def name(self) -> str:
        """For a table."""
        is_usual = self.head_dim == _USUAL_HEAD_DIM
        heads = "" if is_usual else f", head_dim {self.head_dim}"
        if self.num_rows == 1:
            return f"decode {self.num_sequences} x {self.num_positions}{heads}"
        return f"chunk {self.num_rows} of {self.num_positions}{heads}"

    @property
    def num_operations(self) -> int:
        """Of both products, over the positions that each row sees."""
        seen_before = self.num_rows * (self.num_positions - self.num_rows)
        pairs_seen = self.num_sequences * (seen_before + self.num_rows * (self.num_rows + 1) // 2)
        return 4 * pairs_seen * self.num_heads * self.head_dim

    def num_bytes(self, itemsize: int) -> int:
        """Keys, values, queries and results."""
        num_queries = self.num_sequences * self.num_rows * self.num_heads * self.head_dim
        return self.copied_bytes(itemsize) + 2 * num_queries * itemsize

    def copied_bytes(self, itemsize: int) -> int:
        """Keys and values."""
        return 2 * self.num_sequences * self.num_positions * self.num_kv_heads * self.head_dim * itemsize

    def drawn(self, dtype: torch.dtype, device: torch.device, num_copies: int) -> _AttentionInputs:
        """So many pools, and the queries once."""
        blocks_each = -(-self.num_positions // BLOCK_SIZE)
        num_blocks = self.num_sequences * blocks_each
        shape = (num_blocks, 1, 2, BLOCK_SIZE, self.num_kv_heads, self.head_dim)
        pools = [torch.randn(shape, device=device, dtype=dtype) for _ in range(num_copies)]
        tables = torch.randperm(num_blocks).view(self.num_sequences, blocks_each)
        first = self.num_positions - self.num_rows
        spans = [(index * self.num_rows, self.num_rows, first) for index in range(self.num_sequences)]
        num_rows = self.num_sequences * self.num_rows
        batch = AttentionBatch(np.array(spans, np.int32), tables, torch.zeros(num_rows, dtype=torch.int64))
        queries = torch.randn((num_rows, self.num_heads, self.head_dim), device=device, dtype=dtype)
        return _AttentionInputs(self, pools, batch, queries)


@dataclass(frozen=True, slots=True)
class _AttentionInputs:
    case: AttentionCase
    pools: list[Tensor]
    batch: AttentionBatch
    queries: Tensor

    def ours(self, kernels: Kernels) -> Calls:
        steps = [kernels.step_attention(kv, self.batch, self.case.num_heads) for kv in self.pools]
        return [partial(step.attend, 0, self.queries) for step in steps]

    def torchs(self) -> Calls:
        asked, seen = self._asked(), self._seen()

        def attend(keys: Tensor, values: Tensor) -> Tensor:
            found = scaled_dot_product_attention(asked, keys, values, **seen, enable_gqa=True)
            return found.transpose(1, 2).reshape(self.queries.shape)

        pools = [self._together(kv) for kv in self.pools]
        return [partial(attend, kv[0], kv[1]) for kv in pools]

    @property
    def torch_way(self) -> str:
        """The kernel that torch chooses."""
        if self._is_lower_right():
            return "flash_attention"
        asked, kv, seen = self._asked(), self._together(self.pools[0]), self._seen()
        chosen: int = torch._fused_sdp_choice(asked, kv[0], kv[1], **seen, enable_gqa=True)
        return str(torch.nn.attention.SDPBackend(chosen).name).lower()

    def _asked(self) -> Tensor:
        """The queries as torch wants them: [sequences, heads, rows, head_dim]."""
        queries = self.queries.view(self.case.num_sequences, self.case.num_rows, self.case.num_heads, -1)
        return queries.transpose(1, 2).contiguous()

    def _together(self, kv: Tensor) -> Tensor:
        """Keys and values without blocks: [2, sequences, KV heads, positions, head_dim]."""
        found = kv[:, 0].transpose(0, 1)[:, self.batch.block_tables.to(kv.device)]
        return found.flatten(2, 3)[:, :, : self.case.num_positions].transpose(2, 3).contiguous()

    def _seen(self) -> dict[str, Any]:
        """What a row sees, in the fastest way that torch has to say so."""
        num_rows, num_positions = self.case.num_rows, self.case.num_positions
        if num_rows in (1, num_positions):
            return {"is_causal": num_rows > 1}
        if self._is_lower_right():
            from torch.nn.attention.bias import causal_lower_right  # with what compiles for torch: seconds

            return {"attn_mask": causal_lower_right(num_rows, num_positions)}
        own = num_positions - num_rows + torch.arange(num_rows, device=self.queries.device)
        return {"attn_mask": torch.arange(num_positions, device=own.device)[None, :] <= own[:, None]}

    def _is_lower_right(self) -> bool:
        """Whether flash attention takes a chunk behind other positions; any other way of torch's needs a mask."""
        if self.case.num_rows in (1, self.case.num_positions) or not self.queries.is_cuda:
            return False
        kv = self.pools[0].new_empty(
            (2, self.case.num_sequences, self.case.num_kv_heads, self.case.num_positions, self.case.head_dim)
        )
        asked = torch.backends.cuda.SDPAParams(self._asked(), kv[0], kv[1], None, 0.0, False, True)
        return bool(torch.backends.cuda.can_use_flash_attention(asked))


@dataclass(frozen=True, slots=True)
class GatherCase:
    """Blocks of a pool of four times as many, for a transport."""

    num_blocks: int
    block_bytes: int

    @property
    def name(self) -> str:
        """For a table."""
        return f"gather {self.num_blocks} blocks of {self.block_bytes >> 10} KiB"

    @property
    def num_operations(self) -> int:
        """None: bytes are moved."""
        return 0

    def num_bytes(self, itemsize: int) -> int:
        """Read and written; whatever the numbers are."""
        return 2 * self.copied_bytes(itemsize)

    def copied_bytes(self, itemsize: int) -> int:
        """The blocks."""
        return self.num_blocks * self.block_bytes

    def drawn(self, dtype: torch.dtype, device: torch.device, num_copies: int) -> _GatherInputs:
        """So many pools."""
        shape = (4 * self.num_blocks, self.block_bytes // dtype.itemsize)
        pools = [torch.randn(shape, device=device, dtype=dtype) for _ in range(num_copies)]
        return _GatherInputs(pools, torch.randperm(len(pools[0]))[: self.num_blocks].to(device))


@dataclass(frozen=True, slots=True)
class _GatherInputs:
    pools: list[Tensor]
    block_ids: Tensor
    torch_way: str = ""

    def ours(self, kernels: Kernels) -> Calls:
        return [partial(kernels.gather_blocks, pool, self.block_ids) for pool in self.pools]

    def torchs(self) -> Calls:
        return [partial(torch.index_select, pool, 0, self.block_ids) for pool in self.pools]
