"""A decoder-only model in plain torch over a kernel back end: tokens of one step in, logits of the rows that sample out.

Llama's structure: pre-norm residual layers of attention and gated MLP, with rotary positions. All rows of a step, prefill
and decode alike, go through the layers in one pass; what tells them apart is only in the batch's attention spans.
Not here: KV ownership, sampling, which rows run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from engine.batch import Batch
from engine.kv_memory import TORCH_DTYPES
from engine.model_config import ModelConfig, ModelError, read_model_config
from engine.weights import TensorFiles
from kernels.choice import NoKernels, choose_kernels
from kernels.interface import Kernels, LayerStack, Linear, StackLayer, StepAttention


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer."""

    attention_norm: Tensor  # [hidden_size]
    qkv: Linear  # hidden_size to (num_heads + 2 * num_kv_heads) * head_dim: queries, keys, values
    attention_out: Linear  # num_heads * head_dim to hidden_size
    mlp_norm: Tensor  # [hidden_size]
    gate_up: Linear  # hidden_size to intermediate_size, gated
    down: Linear  # intermediate_size to hidden_size


@dataclass(frozen=True, slots=True)
class Model:
    """Weights in the back end's form, and the forward pass."""

    config: ModelConfig
    dtype: str  # "fp32" or "bf16"
    kernels: Kernels
    shortfall: str  # why the kernels are not those that were asked for; "" where they are
    embedding: Tensor  # [vocab_size, hidden_size]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden_size]
    head: Linear  # hidden_size to vocab_size
    inverse_frequencies: Tensor  # [head_dim / 2] fp32
    stack: LayerStack | None  # the layers once more, where the back end runs all of them in one call

    def first_layers(self, count: int) -> Model:
        """The same model with fewer layers; weights are shared."""
        layers = self.layers[:count]
        config = replace(self.config, num_layers=count)
        return replace(self, config=config, layers=layers, stack=_stack(self.kernels, config, layers))

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: Tensor) -> Tensor:
        """Compute one step: writes the rows' KV, returns logits [num_logits, vocab_size] in the model's dtype.

        kv: [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim] in the model's dtype.
        """
        angles = batch.positions[:, None].float() * self.inverse_frequencies
        cos, sin = angles.cos(), angles.sin()
        hidden = self.embedding.index_select(0, batch.token_ids)
        if self.stack is not None:
            hidden = self.stack(hidden, cos, sin, kv, batch.attention)
        else:
            hidden = self._layer_by_layer(hidden, cos, sin, kv, batch)
        if not batch.logit_rows.numel():
            return hidden.new_empty((0, self.config.vocab_size))
        eps = self.config.rms_norm_eps
        return self.head(self.kernels.rms_norm(hidden.index_select(0, batch.logit_rows), self.final_norm, eps))

    def _layer_by_layer(self, hidden: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, batch: Batch) -> Tensor:
        attention = self.kernels.step_attention(kv, batch.attention, self.config.num_heads)
        eps = self.config.rms_norm_eps
        for index, layer in enumerate(self.layers):
            normed = self.kernels.rms_norm(hidden, layer.attention_norm, eps)
            hidden = hidden + layer.attention_out(self._attend(index, layer.qkv(normed), cos, sin, attention))
            normed = self.kernels.rms_norm(hidden, layer.mlp_norm, eps)
            hidden = hidden + layer.down(layer.gate_up(normed))
        return hidden

    def _attend(self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, attention: StepAttention) -> Tensor:
        num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
        heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, self.config.head_dim)
        rotated = self.kernels.rotate(heads[:, : num_heads + num_kv_heads], cos, sin)
        attention.write(layer, rotated[:, num_heads:], heads[:, num_heads + num_kv_heads :])
        return attention.attend(layer, rotated[:, :num_heads].contiguous()).flatten(1)


def load_model(model_dir: Path, dtype: str, kernels_name: str = "cpu") -> Model:
    """Load a Hugging Face directory for dtype "fp32", "bf16" or "auto", and a back end of kernels/choice.py.

    Dense copies are dropped one by one: peak memory is the packed model plus about three times its largest matrix.
    Raises ModelError in one sentence.
    """
    config = read_model_config(model_dir)
    dtype = config.resolve_dtype(dtype)
    torch_dtype = TORCH_DTYPES[dtype]
    try:
        kernels, shortfall = choose_kernels(kernels_name, torch_dtype)
    except NoKernels as error:
        raise ModelError(f"{error}; use fp32") from None
    with TensorFiles(model_dir) as files:
        expected = tensor_shapes(config)
        files.check(expected, _ignored_tensors(config))

        def read(name: str) -> Tensor:
            return files.read(name, torch_dtype)

        def joined(*names: str) -> Tensor:
            return torch.cat([read(name) for name in names])

        def pack(*names: str) -> Linear:
            return kernels.pack_linear(joined(*names))

        def layer(prefix: str) -> LayerWeights:
            attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
            return LayerWeights(
                attention_norm=read(f"{prefix}.input_layernorm.weight"),
                qkv=pack(*(f"{attention}.{part}_proj.weight" for part in "qkv")),
                attention_out=pack(f"{attention}.o_proj.weight"),
                mlp_norm=read(f"{prefix}.post_attention_layernorm.weight"),
                gate_up=kernels.pack_gate_up(joined(f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight")),
                down=pack(f"{mlp}.down_proj.weight"),
            )

        layers = tuple(layer(f"model.layers.{index}") for index in range(config.num_layers))
        return Model(
            config=config,
            dtype=dtype,
            kernels=kernels,
            shortfall=shortfall,
            embedding=read("model.embed_tokens.weight"),
            layers=layers,
            final_norm=read("model.norm.weight"),
            # Tied or not, the head is packed by itself; looking tokens up needs the table as it is.
            head=pack("model.embed_tokens.weight" if config.ties_embeddings else "lm_head.weight"),
            inverse_frequencies=_inverse_frequencies(config),
            stack=_stack(kernels, config, layers),
        )


def _stack(kernels: Kernels, config: ModelConfig, layers: tuple[LayerWeights, ...]) -> LayerStack | None:
    stacked = [
        StackLayer(each.attention_norm, each.qkv, each.attention_out, each.mlp_norm, each.gate_up, each.down)
        for each in layers
    ]
    return kernels.stack(stacked, config.num_heads, config.rms_norm_eps)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a LlamaForCausalLM checkpoint."""
    hidden, wide = config.hidden_size, config.intermediate_size
    query_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (query_width, hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv_width, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv_width, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, query_width),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.mlp.gate_proj.weight": (wide, hidden),
            f"{prefix}.mlp.up_proj.weight": (wide, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, wide),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not config.ties_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _ignored_tensors(config: ModelConfig) -> frozenset[str]:
    """Leftovers of older exporters: frequencies follow from config.json, and a tied head is the embedding."""
    frequencies = {f"model.layers.{index}.self_attn.rotary_emb.inv_freq" for index in range(config.num_layers)}
    return frozenset(frequencies | ({"lm_head.weight"} if config.ties_embeddings else set()))


def _inverse_frequencies(config: ModelConfig) -> Tensor:
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    return 1.0 / (config.rope_theta**exponents)
