"""All layers of a step on the Triton kernels: the arithmetic of one primitive after the other, with fewer trips through memory.

Fused: the residual stream's sum with the next norm; rotation with the write to the cache; gate and up with their product.
A step of decode rows alone can run as a CUDA graph (triton_graphs.py): what it launches does not depend on what it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.interface import AttentionBatch, DecodeStep, StackLayer
from kernels.triton_graphs import Capture, DecodeGraphs, DecodeInputs, graph_steps
from kernels.triton_launch import aligned, launch_norm
from kernels.triton_step import DeviceBatch, TritonAttention, on_device
from kernels.triton_tuning import AttentionTuning

TuningOf = Callable[[Tensor, int], AttentionTuning]  # for KV, and so many heads of queries


@dataclass(slots=True)
class _Room:
    """Where a step's layers put what they compute, one layer after the other in the same memory; None until the first has."""

    normed: Tensor | None = None
    qkv: Tensor | None = None
    queries: Tensor | None = None
    attended: Tensor | None = None
    mixed: Tensor | None = None
    gated: Tensor | None = None
    delta: Tensor | None = None


class TritonStack:
    """kernels.interface.LayerStack."""

    def __init__(
        self,
        layers: Sequence[StackLayer],
        num_heads: int,
        norm_eps: float,
        tuning_of: TuningOf,
        capture: Capture | None = None,
    ) -> None:
        """`capture`: what makes graphs of decode steps; None: nothing does."""
        self._layers = tuple(layers)
        self._num_heads, self._eps, self._tuning_of = num_heads, norm_eps, tuning_of
        self._room = 0, _Room()
        self._kv_layers: tuple[int, Sequence[Tensor]] | None = None
        self._graphs = None if capture is None else DecodeGraphs(self._decode, capture)

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, batch: AttentionBatch) -> Tensor:
        """Run the layers over hidden in place, or return another tensor that is good until the next step."""
        tuning = self._tuning_of(kv, self._num_heads)
        if self._graphs is not None:
            decoded = self._graphs.run(hidden, cos, sin, kv, batch, tuning.part)
            if decoded is not None:
                return decoded
        step = on_device(batch, kv.device, tuning, self._num_heads // kv.shape[-2])
        return self._run(hidden, cos, sin, kv, step, tuning, self._room_for(len(hidden)))

    def steps_to_capture(self, max_rows: int, max_positions: int, kv: Tensor) -> list[DecodeStep]:
        """See LayerStack."""
        part = self._tuning_of(kv, self._num_heads).part
        return [] if self._graphs is None else graph_steps(max_rows, max_positions, part)

    def _decode(self, inputs: DecodeInputs, kv: Tensor) -> Tensor:
        """One row of each of several sequences, all inputs in memory that stays where it is."""
        tuning = self._tuning_of(kv, self._num_heads)
        step = DeviceBatch(
            inputs.tiles,
            inputs.tiles[:0],
            inputs.tables,
            inputs.write_positions,
            num_slots=len(inputs.tiles),
            num_parts=inputs.num_parts,
        )
        return self._run(inputs.hidden, inputs.cos, inputs.sin, kv, step, tuning, _Room())

    def _run(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv: Tensor,
        step: DeviceBatch,
        tuning: AttentionTuning,
        room: _Room,
    ) -> Tensor:
        attention = TritonAttention(kv, step, self._num_heads, tuning, self._layers_of(kv))
        normed = room.normed = torch.empty_like(hidden) if room.normed is None else room.normed
        delta: Tensor | None = None
        for index, layer in enumerate(self._layers):
            launch_norm(hidden, delta, layer.attention_norm, self._eps, normed)
            room.qkv = self._normed_heads(layer, layer.qkv(normed, room.qkv), kv)
            room.queries = attention.rotate_and_write(index, room.qkv, cos, sin, room.queries)
            room.attended = attention.attend(index, room.queries, layer.window, room.attended)
            room.mixed = layer.attention_out(room.attended.flatten(1), room.mixed)
            launch_norm(hidden, room.mixed, layer.mlp_norm, self._eps, normed)
            room.gated = layer.gate_up(normed, room.gated)
            delta = room.delta = layer.down(room.gated, room.delta)
        return hidden if delta is None else hidden.add_(delta)

    def _room_for(self, num_rows: int) -> _Room:
        """The last step's, if that had as many rows."""
        if self._room[0] != num_rows:
            self._room = num_rows, _Room()
        return self._room[1]

    def _layers_of(self, kv: Tensor) -> Sequence[Tensor]:
        """One by one; of the same memory the same as before."""
        if self._kv_layers is None or self._kv_layers[0] != kv.data_ptr():
            self._kv_layers = kv.data_ptr(), kv.unbind(1)
        return self._kv_layers[1]

    def _normed_heads(self, layer: StackLayer, qkv: Tensor, kv: Tensor) -> Tensor:
        """Norm each head of queries and keys by itself, in models that do."""
        num_kv_heads, head_dim = kv.shape[-2:]
        heads = qkv.view(len(qkv), -1, head_dim)
        begin = 0
        for weight, count in ((layer.query_norm, self._num_heads), (layer.key_norm, num_kv_heads)):
            if weight is not None:
                chosen = heads[:, begin : begin + count]
                rows = aligned(chosen.reshape(-1, head_dim))
                normed = torch.empty_like(rows)
                launch_norm(rows, None, weight, self._eps, normed)
                chosen.copy_(normed.view(chosen.shape))
            begin += count
        return qkv
