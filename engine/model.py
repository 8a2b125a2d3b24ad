"""A decoder-only model in plain torch over a kernel back end: tokens of one step in, logits of the rows that sample out.

Llama's structure: pre-norm residual layers of attention and gated MLP, with rotary positions. The families that share it differ
in biases, in norms of heads, in windows of attention: where the config has none, the tensor or the window is None. All rows of
a step, prefill and decode alike, go through the layers in one pass; what tells them apart is only in the batch's attention spans.
Where a node has several ranks (engine/split.py) each has a model with its own columns of every linear.
Not here: KV ownership, sampling, which rows run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import Batch, Segment, build_batch
from engine.config_values import ModelError
from engine.device import CPU
from engine.kv_memory import TORCH_DTYPES
from engine.model_config import ModelConfig, read_model_config
from engine.model_weights import Tensors, WeightReader
from engine.plan import BROKEN_ROW
from engine.ranks import Ranks
from engine.rope import Angles
from engine.split import WHOLE, Split, check_split
from engine.step_memory import StepTensors
from engine.tensor_names import ignored_tensors, tensor_shapes
from engine.weights import TensorFiles
from kernels.choice import Choice, NoKernels, WeightDtype, choose_kernels
from kernels.interface import (
    DecodeRows,
    Kernels,
    LayerStack,
    Linear,
    ModelEnds,
    PlainDraws,
    SlotNumbers,
    StackLayer,
    StepRows,
    WholeModel,
)
from kernels.upload import upload


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer."""

    attention_norm: Tensor  # [hidden_size]
    qkv: Linear  # hidden_size to (num_heads + 2 * num_kv_heads) * head_dim: queries, keys, values
    attention_out: Linear  # num_heads * head_dim to hidden_size
    mlp_norm: Tensor  # [hidden_size]
    gate_up: Linear  # hidden_size to intermediate_size, gated
    down: Linear  # intermediate_size to hidden_size
    query_norm: Tensor | None = None  # [head_dim]
    key_norm: Tensor | None = None  # [head_dim]


@dataclass(frozen=True, slots=True)
class Model:
    """Weights in the back end's form, and the forward pass."""

    config: ModelConfig
    dtype: str  # "fp32", "bf16" or "fp16"
    kernels: Kernels
    shortfall: str  # why the kernels are not those that were asked for; "" where they are
    ends: ModelEnds
    layers: tuple[LayerWeights, ...]
    angles: Angles
    # All of it, or the layers, once more, where the back end runs that in one call.
    whole: WholeModel | None
    stack: LayerStack | None
    split: Split = WHOLE  # which columns of its linears are here
    ranks: Ranks | None = None  # who has the others

    @property
    def bits_name(self) -> str:
        """What computes: two of one name compute the same bits."""
        return f"{self.kernels.name}-{self.angles.digest}"

    def first_layers(self, count: int) -> Model:
        """The same model with fewer layers; weights are shared."""
        layers = self.layers[:count]
        config = replace(self.config, num_layers=count)
        whole, stack = _in_one_call(self.kernels, config, layers, self.ends, self.split)
        return replace(self, config=config, layers=layers, whole=whole, stack=stack)

    def joins(self, ranks: Ranks) -> Model:
        """The same model, which computes together with the other ranks' parts; all of them call all that follows alike."""
        return replace(self, ranks=ranks)

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: Tensor, memory: StepTensors | None = None) -> Tensor:
        """Compute one step: writes the rows' KV, returns logits [num_logits, vocab_size] in the model's dtype.

        kv: [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim] in the model's dtype; of a rank, its heads. memory:
        where what the step makes may lie, the logits included; they are good until the next step with the same memory. None:
        in fresh memory.
        """
        memory = StepTensors() if memory is None else memory
        cos, sin = self.angles.up_to(batch.attention.block_tables.shape[1] * kv.shape[3])
        if self.whole is not None:
            logits = self._room_for_logits(len(batch.logit_rows), memory)
            self.whole.logits(StepRows(*batch[:3]), cos, sin, kv, batch.attention, logits)
            return logits
        num_rows, device = len(batch.token_ids), self.ends.embedding.device
        positions, shape = upload(batch.positions, device), (num_rows, cos.shape[1])
        cos = torch.index_select(cos, 0, positions, out=memory.take("cos", shape, cos))
        sin = torch.index_select(sin, 0, positions, out=memory.take("sin", shape, sin))
        hidden = memory.take("hidden", (num_rows, self.config.hidden_size), self.ends.embedding)
        torch.index_select(self.ends.embedding, 0, upload(batch.token_ids, device), out=hidden)
        if self.stack is not None:
            hidden = self.stack(hidden, cos, sin, kv, batch.attention)
        else:
            hidden = self._layer_by_layer(hidden, cos, sin, kv, batch)
        num_logits = len(batch.logit_rows)
        if not num_logits:
            return hidden.new_empty((0, self.config.vocab_size))
        shape = (num_logits, self.config.hidden_size)
        last = hidden
        if num_logits < num_rows:
            last = memory.take("last", shape, hidden)
            torch.index_select(hidden, 0, upload(batch.logit_rows, device), out=last)
        normed = self.kernels.rms_norm(
            last, self.ends.final_norm, self.config.rms_norm_eps, memory.take("normed", shape, hidden)
        )
        if self.ranks is not None:
            return self.ranks.gathered(self.ends.head(normed))[:, : self.config.vocab_size].contiguous()
        return self.ends.head(normed, self._room_for_logits(num_logits, memory))

    def capture(self, kv: Tensor, max_rows: int, max_positions: int) -> None:
        """Run the decode steps that the back end records, so that no stream waits for that later. Block 0 of kv is overwritten.

        It also draws once, for which a back end may have to compile.
        """
        block_size = kv.shape[3]
        for step in () if self.stack is None else self.stack.steps_to_capture(max_rows, max_positions, kv):
            row = Segment([0], step.position, [0] * (step.position // block_size + 1), 1)
            self.forward(build_batch([row] * step.num_rows, block_size), kv)
        logits, slots = self.ends.embedding.new_zeros((1, self.config.vocab_size)), np.zeros(1, np.int64)
        draws = PlainDraws(np.ones(1), slots.astype(np.uint64), slots, BROKEN_ROW)
        self.kernels.draw(logits, draws, torch.zeros(1, dtype=torch.int64, device=logits.device))

    def decode(
        self, numbers: SlotNumbers, rows: DecodeRows, kv: Tensor, memory: StepTensors
    ) -> NDArray[np.int64] | Tensor:
        """Compute a step of decode rows that logits, temperatures and seeds alone decide, where there is a `whole`.

        Returns the drawn token ids [num_rows], which `numbers` knows then; or, where they could not be told so, the logits, as
        forward() does. Raises ValueError where a position is past the blocks of its sequence.
        """
        assert self.whole is not None
        cos, sin = self.angles.up_to(int(rows.positions.max()) + 1)
        logits = self._room_for_logits(len(rows.slots), memory)
        token_ids = self.whole.decode(numbers, rows, cos, sin, kv, logits)
        return logits if token_ids is None else token_ids

    def _room_for_logits(self, num_logits: int, memory: StepTensors) -> Tensor:
        shape = (num_logits, self.config.vocab_size)
        if num_logits > memory.max_logits:
            return self.ends.embedding.new_empty(shape)
        return memory.take("logits", shape, self.ends.embedding)

    def _layer_by_layer(self, hidden: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, batch: Batch) -> Tensor:
        attention = self.kernels.step_attention(kv, batch.attention, self.split.width(self.config.num_heads))
        eps = self.config.rms_norm_eps
        for index, layer in enumerate(self.layers):
            normed = self.kernels.rms_norm(hidden, layer.attention_norm, eps)
            queries, keys, values = self._heads(layer, layer.qkv(normed), cos, sin)
            attention.write(index, keys, values)
            attended = attention.attend(index, queries.contiguous(), self.config.windows[index])
            hidden = hidden + self._whole(layer.attention_out(self._whole(attended.flatten(1))))
            normed = self.kernels.rms_norm(hidden, layer.mlp_norm, eps)
            hidden = hidden + self._whole(layer.down(self._whole(layer.gate_up(normed))))
        return hidden

    def _whole(self, columns: Tensor) -> Tensor:
        """With the other ranks' columns."""
        return columns if self.ranks is None else self.ranks.gathered(columns)

    def _heads(self, layer: LayerWeights, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [num_rows, num_heads, head_dim], keys and values [num_rows, num_kv_heads, head_dim], rotated."""
        num_heads, num_kv_heads = map(self.split.width, (self.config.num_heads, self.config.num_kv_heads))
        heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, self.config.head_dim)
        rotating, values = heads[:, : num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads :]
        if layer.query_norm is not None and layer.key_norm is not None:
            queries, keys = rotating[:, :num_heads], rotating[:, num_heads:]
            rotating = torch.cat((self._norm(queries, layer.query_norm), self._norm(keys, layer.key_norm)), 1)
        rotated = self.kernels.rotate(rotating, cos, sin)
        return rotated[:, :num_heads], rotated[:, num_heads:], values

    def _norm(self, heads: Tensor, weight: Tensor) -> Tensor:
        """Each head of [num_rows, heads, head_dim] by itself."""
        rows = heads.reshape(-1, self.config.head_dim)
        return self.kernels.rms_norm(rows, weight, self.config.rms_norm_eps).view(heads.shape)


def load_model(
    model_dir: Path,
    dtype: str,
    kernels_name: str = "cpu",
    device: torch.device = CPU,
    weight_dtype: WeightDtype = "auto",
    split: Split = WHOLE,
) -> Model:
    """Load a Hugging Face directory for dtype "fp32", "bf16", "fp16" or "auto", a back end of kernels/choice.py, and a device.

    weight_dtype "int8": all linears, the head included, keep their weights in 8 bits; activations and KV are of the dtype.
    split: of one rank of several; it computes once it `joins` the others.
    Dense copies are dropped one by one: peak memory is the packed model plus about three times its largest matrix.
    Raises ModelError in one sentence.
    """
    config = read_model_config(model_dir)
    check_split(config, split.size)
    dtype = config.resolve_dtype(dtype)
    choice = _chosen_kernels(kernels_name, device, weight_dtype, split)
    with TensorFiles(model_dir) as files:
        files.check(tensor_shapes(config), ignored_tensors(config))
        if config.ties_embeddings:
            files.check_tied("lm_head.weight", to="model.embed_tokens.weight")
        return build_model(config, dtype, files, choice, device, split)


def build_model(
    config: ModelConfig,
    dtype: str,
    tensors: Tensors,
    choice: Choice,
    device: torch.device = CPU,
    split: Split = WHOLE,
) -> Model:
    """Build a model out of tensors that are what its config asks for, for dtype "fp32", "bf16" or "fp16"."""
    kernels, shortfall = choice
    reader = WeightReader(tensors, kernels, TORCH_DTYPES[dtype], device, split)
    layers = tuple(_read_layer(reader, config, f"model.layers.{index}") for index in range(config.num_layers))
    ends = ModelEnds(
        embedding=reader.whole("model.embed_tokens.weight"),
        final_norm=reader.whole("model.norm.weight"),
        # Tied or not, the head is packed by itself; looking tokens up needs the table as it is.
        head=reader.head("model.embed_tokens" if config.ties_embeddings else "lm_head", config.vocab_size),
    )
    if config.ties_embeddings and split.size == 1:  # others' heads are a small part of what a step reads
        ends = ends._replace(near_head=kernels.near_head(ends.embedding))
    whole, stack = _in_one_call(kernels, config, layers, ends, split)
    return Model(
        config=config,
        dtype=dtype,
        kernels=kernels,
        shortfall=shortfall,
        ends=ends,
        layers=layers,
        angles=Angles.of(config.rope, config.head_dim, device),
        whole=whole,
        stack=stack,
        split=split,
    )


def _read_layer(reader: WeightReader, config: ModelConfig, prefix: str) -> LayerWeights:
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    return LayerWeights(
        attention_norm=reader.whole(f"{prefix}.input_layernorm.weight"),
        qkv=reader.linear(config.has_qkv_bias, *(f"{attention}.{part}_proj" for part in "qkv")),
        attention_out=reader.linear(config.has_output_bias, f"{attention}.o_proj"),
        mlp_norm=reader.whole(f"{prefix}.post_attention_layernorm.weight"),
        gate_up=reader.gate_up(config.has_mlp_bias, f"{mlp}.gate_proj", f"{mlp}.up_proj"),
        down=reader.linear(config.has_mlp_bias, f"{mlp}.down_proj"),
        query_norm=reader.whole(f"{attention}.q_norm.weight") if config.norms_heads else None,
        key_norm=reader.whole(f"{attention}.k_norm.weight") if config.norms_heads else None,
    )


def _chosen_kernels(name: str, device: torch.device, weight_dtype: WeightDtype, split: Split) -> Choice:
    try:
        return choose_kernels(name, device.type, weight_dtype, num_ranks=split.size)
    except NoKernels as error:
        raise ModelError(str(error)) from None


def _in_one_call(
    kernels: Kernels, config: ModelConfig, layers: tuple[LayerWeights, ...], ends: ModelEnds, split: Split
) -> tuple[WholeModel | None, LayerStack | None]:
    """The whole model where there is such a thing, else the layers where there are those."""
    if split.size > 1:
        return None, None  # between any two of its linears activations go from rank to rank
    stacked = [
        StackLayer(
            each.attention_norm,
            each.qkv,
            each.attention_out,
            each.mlp_norm,
            each.gate_up,
            each.down,
            each.query_norm,
            each.key_norm,
            window,
        )
        for each, window in zip(layers, config.windows[: len(layers)], strict=True)
    ]
    whole = kernels.whole(ends, stacked, config.num_heads, config.rms_norm_eps)
    return whole, None if whole is not None else kernels.stack(stacked, config.num_heads, config.rms_norm_eps)
