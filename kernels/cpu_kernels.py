"""The fast back end: C++ compiled by `make setup` (kernels/cpu), for one CPU's vector instructions.

It keeps the law of interface.py by construction rather than by measurement: every sum is one chain over one row's own numbers
in an order that the model's shape fixes, however many rows and threads there are. Where numbers are rounded to the dtype is
where the reference rounds, but for one thing: attention scores and weights stay fp32 in both, in another order of summation.

One variant's bits are not another's, nor those of other sources: both are in the back end's name, and with it in the fingerprint.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cpu_contest import MAX_NEAR_ROWS, Contest, CpuNearHead, Draws
from kernels.cpu_library import (
    DTYPE_CODES,
    MAX_HEAD_DIM,
    NUM_PHASES,
    CBatch,
    CCache,
    CDecodeRows,
    CEnds,
    CLayer,
    CRotation,
    CShares,
    CSlots,
    CStack,
    Library,
    Workspace,
    address,
    reference,
)
from kernels.cpu_linear import CpuLinear
from kernels.int8_weights import INT8_SUFFIX, Int8Weight, quantized
from kernels.interface import (
    AttentionBatch,
    Contenders,
    DecodeRows,
    DecodeStep,
    Linear,
    ModelEnds,
    PlainDraws,
    Shares,
    SlotNumbers,
    StackLayer,
    StepAttention,
    StepRows,
)
from kernels.torch_reference import TorchBlockCopies
from kernels.weight_memory import WeightMemory


def _c_cache(kv: Tensor, num_heads: int) -> CCache:
    _, num_layers, _, block_size, num_kv_heads, head_dim = kv.shape
    return CCache(kv.data_ptr(), num_layers, block_size, num_kv_heads, head_dim, num_heads, kv.stride(3))


class _CStep:
    """A step's batch in C's terms; keeps what the pointers point to."""

    def __init__(self, kv: Tensor, batch: AttentionBatch, num_heads: int) -> None:
        self._kept = (kv, batch.block_tables, batch.write_positions)
        self._spans = np.ascontiguousarray(batch.spans, np.int32)
        self.cache: Final = _c_cache(kv, num_heads)
        self.batch: Final = CBatch(
            self._spans.ctypes.data,
            batch.block_tables.data_ptr(),
            batch.write_positions.data_ptr(),
            batch.block_tables.stride(0),
            len(batch.spans),
            batch.write_positions.shape[0],
        )


class CpuAttention:
    """kernels.interface.StepAttention by itself; the layers of a whole model run in CpuStack."""

    def __init__(self, library: Library, kv: Tensor, batch: AttentionBatch, num_heads: int) -> None:
        self._library = library
        self._workspace = Workspace(library)
        self._step = _CStep(kv, batch, num_heads)
        self._kv, self._batch = kv, batch

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store the step's keys and values of one layer."""
        block_size = self._kv.shape[3]
        block, offset = self._batch.write_positions // block_size, self._batch.write_positions % block_size
        self._kv[block, layer, 0, offset] = keys
        self._kv[block, layer, 1, offset] = values

    def attend(self, layer: int, queries: Tensor, window: int | None = None) -> Tensor:
        """Attend over all positions up to each row's own, or the last `window` of them."""
        queries = queries.contiguous()
        out = torch.empty_like(queries)
        self._library.call.baton_attend(
            self._workspace.address,
            reference(self._step.cache),
            reference(self._step.batch),
            queries.data_ptr(),
            out.data_ptr(),
            layer,
            window or 0,
            torch.get_num_threads(),
            DTYPE_CODES[queries.dtype],
        )
        return out


class CpuStack:
    """kernels.interface.LayerStack: every layer of a step in one call."""

    def __init__(self, library: Library, layers: Sequence[StackLayer], num_heads: int, norm_eps: float) -> None:
        self._library = library
        self._layers = tuple(layers)  # keeps the weights
        self._num_heads = num_heads
        self._workspace = Workspace(library)
        hidden_size = layers[0].attention_norm.shape[0]
        self._c_layers = (CLayer * len(layers))(*(_c_layer(layer) for layer in layers))
        self._c = CStack(self._c_layers, len(layers), hidden_size, norm_eps)
        self._seconds = (ctypes.c_double * NUM_PHASES)()

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, batch: AttentionBatch) -> Tensor:
        """Run the layers over hidden in place, and return it."""
        return self._run(hidden, cos, sin, _CStep(kv, batch, self._num_heads))

    def steps_to_capture(self, max_rows: int, max_positions: int, kv: Tensor) -> list[DecodeStep]:
        """None: a step is one call."""
        return []

    @property
    def workspace_bytes(self) -> int:
        """What is kept for the next step."""
        return self._workspace.num_bytes

    @property
    def seconds(self) -> dict[str, float]:
        """Where the time of all steps so far went, by part of a layer."""
        return dict(zip(PHASES, self._seconds, strict=True))

    def _run(self, hidden: Tensor, cos: Tensor, sin: Tensor, step: _CStep) -> Tensor:
        self._library.call.baton_layers(
            self._workspace.address,
            reference(self._c),
            reference(step.cache),
            reference(step.batch),
            reference(CRotation(cos.data_ptr(), sin.data_ptr(), None)),
            hidden.data_ptr(),
            torch.get_num_threads(),
            self._seconds,
            DTYPE_CODES[hidden.dtype],
        )
        return hidden


class CpuModel(CpuStack):
    """kernels.interface.WholeModel; and the stack of its layers."""

    def __init__(
        self, library: Library, ends: ModelEnds, layers: Sequence[StackLayer], num_heads: int, norm_eps: float
    ) -> None:
        super().__init__(library, layers, num_heads, norm_eps)
        if not isinstance(ends.head, CpuLinear):
            raise TypeError("the head of a model is packed by its own back end")
        self._ends = ends  # keeps the weights
        self._head = ends.head
        addresses = ends.embedding.data_ptr(), ends.final_norm.data_ptr()
        self._c_ends = CEnds(*addresses, ends.head.c)
        self._near_head = ends.near_head if isinstance(ends.near_head, CpuNearHead) else None
        if self._near_head is not None:
            self._normed = ends.embedding.new_empty((MAX_NEAR_ROWS, ends.embedding.shape[1]))
            self._screen = self._near_head.screen(self._normed)
            self._c_near_ends = CEnds(*addresses, self._near_head.linear.c)
            self._c_near_ends.normed = self._normed.data_ptr()
        self._draws = Draws()
        # Of the last decode step, and what they are of: nearly every step's are the same.
        self._c_slots, self._c_cache = CSlots(), CCache()
        self._numbers: SlotNumbers | None = None
        self._kv: Tensor | None = None
        self._dtype_code = DTYPE_CODES[ends.embedding.dtype]

    def logits(
        self, rows: StepRows, cos: Tensor, sin: Tensor, kv: Tensor, batch: AttentionBatch, logits: Tensor
    ) -> None:
        """See WholeModel."""
        step, ends = _CStep(kv, batch, self._num_heads), self._c_ends
        ends.token_ids, ends.logit_rows = rows.token_ids.data_ptr(), rows.logit_rows.data_ptr()
        ends.logits, ends.num_logits = logits.data_ptr(), len(rows.logit_rows)
        is_done = self._library.call.baton_forward(
            self._workspace.address,
            reference(self._c),
            reference(step.cache),
            reference(step.batch),
            reference(CRotation(cos.data_ptr(), sin.data_ptr(), rows.positions.data_ptr())),
            reference(ends),
            torch.get_num_threads(),
            self._seconds,
            self._dtype_code,
        )
        if not is_done:
            raise _no_such_token()

    def decode(
        self, numbers: SlotNumbers, rows: DecodeRows, cos: Tensor, sin: Tensor, kv: Tensor, logits: Tensor
    ) -> NDArray[np.int64] | None:
        """See WholeModel."""
        num_rows, near = len(rows.slots), self._near_head
        if near is not None and not near.begins(num_rows):
            near = None
        ends = self._c_ends if near is None else self._c_near_ends
        ends.logits = logits.data_ptr()
        token_ids = self._draws.begin(num_rows, None if near is None else self._screen)
        outcome = self._library.call.baton_decode(
            self._workspace.address,
            reference(self._c),
            reference(self._cache_of(kv)),
            reference(CRotation(cos.data_ptr(), sin.data_ptr())),
            reference(ends),
            reference(self._slots_of(numbers)),
            reference(CDecodeRows(address(rows.slots), address(rows.positions), num_rows)),
            reference(self._draws.c),
            torch.get_num_threads(),
            self._seconds,
            self._dtype_code,
        )
        if outcome < 0:
            raise _no_such_token() if outcome == -1 else _no_such_block(numbers, rows, kv.shape[3])
        if near is not None:
            near.ends(is_told=bool(outcome))
            if not outcome:
                self._head(self._normed[:num_rows], logits)
        return token_ids if outcome else None

    def _slots_of(self, numbers: SlotNumbers) -> CSlots:
        if numbers is not self._numbers:
            self._c_slots = CSlots(*map(address, numbers), numbers.block_ids.shape[1])
            self._numbers = numbers
        return self._c_slots

    def _cache_of(self, kv: Tensor) -> CCache:
        if kv is not self._kv:
            self._c_cache = _c_cache(kv, self._num_heads)
            self._kv = kv
        return self._c_cache


def _no_such_token() -> IndexError:
    return IndexError("a token id is none of the vocabulary's")


def _no_such_block(numbers: SlotNumbers, rows: DecodeRows, block_size: int) -> ValueError:
    num_blocks = numbers.num_blocks[rows.slots]
    row = int((num_blocks * block_size <= rows.positions).argmax())
    return ValueError(f"position {rows.positions[row]} is past the {num_blocks[row]} blocks of its sequence")


PHASES: Final = ("norm", "qkv", "rotate and write", "attend", "attention out", "gate and up", "down", "head", "draw")


def _c_layer(layer: StackLayer) -> CLayer:
    norms = (layer.attention_norm, layer.mlp_norm, layer.query_norm, layer.key_norm)
    linears = []
    for linear in (layer.qkv, layer.attention_out, layer.gate_up, layer.down):
        if not isinstance(linear, CpuLinear):
            raise TypeError("the layers of a stack are packed by its own back end")
        linears.append(linear.c)
    return CLayer(*(None if norm is None else norm.data_ptr() for norm in norms), *linears, layer.window or 0)


class CpuKernels(TorchBlockCopies):
    """kernels.interface.Kernels on one variant of the library."""

    def __init__(self, library: Library, variant: str, *, is_int8: bool = False) -> None:
        """`is_int8`: whether linears keep their weights in 8 bits."""
        self._library = library
        self._memory = WeightMemory()
        self._is_int8 = is_int8
        self._contest = Contest(1)
        self.name: Final = f"cpu-{variant}{INT8_SUFFIX if is_int8 else ''}"
        self.keeps_row_bits: Final = True  # by construction

    @property
    def num_taken_over(self) -> int:
        """Pieces of work, of this process so far, that were done by another thread than had begun them (kernels/cpu/turns.h)."""
        return int(self._library.call.baton_num_taken_over())

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Lay [out_features, in_features] out as panels."""
        return CpuLinear(self._library, self._memory, weight, bias, rounded=self._rounded(weight))

    def pack_gate_up(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Lay gate and up out side by side, so that their product is taken in registers."""
        return CpuLinear(self._library, self._memory, weight, bias, is_gated=True, rounded=self._rounded(weight))

    def _rounded(self, weight: Tensor) -> Int8Weight | None:
        if weight.dtype is torch.bfloat16 and weight.shape[1] % 2:  # the last one's pair would be the next row's first
            raise ValueError(
                f"a linear of {weight.shape[1]} inputs: in bf16 these kernels take pairs; --kernels torch takes any"
            )
        return quantized(weight) if self._is_int8 else None

    def near_head(self, weight: Tensor) -> CpuNearHead | None:
        """Half as many bytes to read again, unless the head has as few itself."""
        return None if self._is_int8 else CpuNearHead(self._library, self._memory, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        """Normalise in fp32 and round before the weight."""
        x = x.contiguous()
        if out is None:
            out = torch.empty_like(x)
        rows, width = x.shape
        self._library.call.baton_rms_norm(
            x.data_ptr(), weight.data_ptr(), rows, width, eps, out.data_ptr(), DTYPE_CODES[x.dtype]
        )
        return out

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate in x's dtype: element i pairs with i + head_dim / 2."""
        if x.stride()[1:] != (x.shape[2], 1):
            x = x.contiguous()
        cos, sin = cos.contiguous(), sin.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        shape = (ctypes.c_int32 * 3)(*x.shape)
        rotation = CRotation(cos.data_ptr(), sin.data_ptr(), None)
        self._library.call.baton_rotate(
            x.data_ptr(), reference(rotation), shape, x.stride(0), out.data_ptr(), DTYPE_CODES[x.dtype]
        )
        return out

    def silu_gate(self, gate_up: Tensor) -> Tensor:
        """Compute silu in fp32, round, multiply."""
        gate_up = gate_up.contiguous()
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty((rows, width))
        self._library.call.baton_gate(gate_up.data_ptr(), rows, width, out.data_ptr(), DTYPE_CODES[gate_up.dtype])
        return out

    def step_attention(self, kv: Tensor, batch: AttentionBatch, num_heads: int) -> StepAttention:
        """Prepare one step."""
        if kv.shape[-1] > MAX_HEAD_DIM:
            raise ValueError(f"head_dim {kv.shape[-1]} is more than {MAX_HEAD_DIM}")
        return CpuAttention(self._library, kv, batch, num_heads)

    def stack(self, layers: Sequence[StackLayer], num_heads: int, norm_eps: float) -> CpuStack:
        """All layers of a step in one call."""
        return CpuStack(self._library, layers, num_heads, norm_eps)

    def whole(self, ends: ModelEnds, layers: Sequence[StackLayer], num_heads: int, norm_eps: float) -> CpuModel:
        """All of a step in one call."""
        return CpuModel(self._library, ends, layers, num_heads, norm_eps)

    def contenders(self, logits: Tensor, temperatures: NDArray[np.float32], streams: NDArray[np.uint64]) -> Contenders:
        """Leave few: the others' noise cannot make up for their logits."""
        logits = logits.contiguous()
        num_rows, vocab_size = logits.shape
        if num_rows > self._contest.max_rows:
            self._contest = Contest(1 << (num_rows - 1).bit_length())
        self._contest.set(temperatures, streams, vocab_size)
        self._library.call.baton_contend(
            reference(self._contest.c), logits.data_ptr(), torch.get_num_threads(), DTYPE_CODES[logits.dtype]
        )
        return self._contest.found()

    def shares(
        self,
        logits: Tensor,
        temperatures: NDArray[np.float32],
        greatest: NDArray[np.float32],
        token_ids: NDArray[np.int32],
    ) -> Shares:
        """Add exponentials up, in a pass over each row that is asked of."""
        logits = logits.contiguous()
        shares = Shares(np.zeros(len(logits)), np.zeros(len(logits)))
        arrays = (temperatures, greatest, token_ids, *shares)
        asked = CShares(*(address(array) for array in arrays), *logits.shape)
        self._library.call.baton_share(
            reference(asked), logits.data_ptr(), torch.get_num_threads(), DTYPE_CODES[logits.dtype]
        )
        return shares

    def draw(self, logits: Tensor, draws: PlainDraws, last: Tensor) -> None:
        """The sampler draws, among those."""
