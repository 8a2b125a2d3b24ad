"""Name and shape of every tensor that a checkpoint of the served families holds.

Not here: files, and what is computed with the tensors.
"""

from __future__ import annotations

from engine.model_config import ModelConfig


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """All tensors that the model needs."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes |= _linear_shapes(prefix, _attention_linears(config))
        if config.norms_heads:
            shapes |= {f"{prefix}.self_attn.{side}_norm.weight": (config.head_dim,) for side in "qk"}
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        shapes |= _linear_shapes(prefix, _mlp_linears(config))
    shapes["model.norm.weight"] = (hidden,)
    if not config.ties_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def ignored_tensors(config: ModelConfig) -> frozenset[str]:
    """Leftovers of older exporters: frequencies follow from config.json, and a tied head is the embedding."""
    frequencies = {f"model.layers.{index}.self_attn.rotary_emb.inv_freq" for index in range(config.num_layers)}
    frequencies.add("model.rotary_emb.inv_freq")
    return frozenset(frequencies | ({"lm_head.weight"} if config.ties_embeddings else set()))


# Of a layer: output width, input width, whether it has a bias.
_Linears = dict[str, tuple[int, int, bool]]


def _attention_linears(config: ModelConfig) -> _Linears:
    hidden, has_bias = config.hidden_size, config.has_qkv_bias
    query_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "self_attn.q_proj": (query_width, hidden, has_bias),
        "self_attn.k_proj": (kv_width, hidden, has_bias),
        "self_attn.v_proj": (kv_width, hidden, has_bias),
        "self_attn.o_proj": (hidden, query_width, config.has_output_bias),
    }


def _mlp_linears(config: ModelConfig) -> _Linears:
    hidden, wide, has_bias = config.hidden_size, config.intermediate_size, config.has_mlp_bias
    return {
        "mlp.gate_proj": (wide, hidden, has_bias),
        "mlp.up_proj": (wide, hidden, has_bias),
        "mlp.down_proj": (hidden, wide, has_bias),
    }


def _linear_shapes(prefix: str, linears: _Linears) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (width_out, width_in, has_bias) in linears.items():
        shapes[f"{prefix}.{name}.weight"] = (width_out, width_in)
        if has_bias:
            shapes[f"{prefix}.{name}.bias"] = (width_out,)
    return shapes
